"""transformers' own continuous batching on a fixed list of requests, offline. Prints one JSON line.

Run by benchmarks/engine.py in a Python that has torch and transformers:
    python hf_continuous_batching.py MODEL_DIR REQUESTS.json THREADS
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig


def main(model_dir: str, requests_path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    with open(requests_path) as file:
        requests = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=512, allow_block_sharing=False)
    context = model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    )
    with context as manager:
        warm = manager.add_request(requests[0]["prompt"][:16], request_id="warm", max_new_tokens=4)
        answers: dict[str, list[int]] = {}
        collect(manager, 1, answers)
        assert warm in answers
        answers.clear()
        start_s = time.perf_counter()
        for i, request in enumerate(requests):
            manager.add_request(request["prompt"], request_id=str(i), max_new_tokens=request["output_tokens"])
        collect(manager, len(requests), answers)
        wall_s = time.perf_counter() - start_s
    tokens = [answers[str(i)] for i in range(len(requests))]
    sys.stdout.write(json.dumps({"wall_s": wall_s, "tokens": tokens}) + "\n")


def collect(manager, count: int, answers: dict[str, list[int]]) -> None:  # type: ignore[no-untyped-def]  # untyped peer
    while len(answers) < count:
        result = manager.get_result(timeout=600)
        if result is not None and result.is_finished():
            answers[result.request_id] = list(result.generated_tokens)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

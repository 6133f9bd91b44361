"""Plain transformers `generate`, one request. Prints one JSON line.

python hf_generate.py MODEL_DIR REQUESTS.json THREADS
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main(model_dir: str, requests_path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    with open(requests_path) as file:
        request = json.load(file)[0]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor([request["prompt"]])

    def generate(count: int) -> tuple[float, list[int]]:
        start_s = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return time.perf_counter() - start_s, out[0, ids.shape[1] :].tolist()

    generate(4)
    prefill_s, _ = generate(1)
    wall_s, tokens = generate(request["output_tokens"])
    decode_s = (wall_s - prefill_s) / (len(tokens) - 1)
    sys.stdout.write(json.dumps({"wall_s": wall_s, "decode_s": decode_s, "tokens": [tokens]}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

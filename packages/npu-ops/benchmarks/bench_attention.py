"""masked_attention on this CPU against the ways to write it with torch alone: forward and backward, in turns.

    python packages/npu-ops/benchmarks/bench_attention.py [--rounds 8] [--threads 1]

Times are the best of the rounds, in milliseconds; the ratio is to the faster rival.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from npu_ops import document_causal_mask, masked_attention

B, L, N, N_KV, DOCUMENTS = 2, 256, 16, 4, 4
CASES = [(torch.float32, 16, 16), (torch.float32, 64, 64), (torch.float32, 48, 32), (torch.bfloat16, 16, 16)]
CASES += [(torch.bfloat16, 64, 64)]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(N // N_KV, 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def milliseconds(attend: Callable, inputs: list[torch.Tensor], mask: torch.Tensor) -> float:
    begin = time.perf_counter()
    attend(*inputs, mask).sum().backward()
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mask = document_causal_mask(torch.arange(L).div(L // DOCUMENTS, rounding_mode="floor").expand(B, L))
    sides = {"npu_ops": masked_attention, "sdpa": sdpa, "explicit": explicit}
    print(f"B={B} L=S={L} N={N} Nkv={N_KV}, {DOCUMENTS} documents a row, {options.threads} thread(s)")
    print("dtype      H/V     npu_ops      sdpa  explicit     ratio")
    for dtype, size, value_size in CASES:
        shapes = [(B, L, N, size), (B, L, N_KV, size), (B, L, N_KV, value_size)]
        inputs = [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(options.rounds):
            for name, attend in sides.items():
                best[name] = min(best[name], milliseconds(attend, inputs, mask))
        ratio = best["npu_ops"] / min(best["sdpa"], best["explicit"])
        times = "".join(f"{best[name]:>10.1f}" for name in sides)
        print(f"{str(dtype)[6:]:<9} {size:>3}/{value_size:<3}{times}{ratio:>10.2f}", flush=True)


if __name__ == "__main__":
    main()

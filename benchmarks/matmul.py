"""The machine's own rate: the benchmark model's matrix products and nothing else.

    python -m benchmarks.matmul --precision fp32

Forward, gradient of the input and gradient of the weights of every linear layer, at the token count
of a microbatch. Prints floating-point operations per second: what no step can exceed.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.bare import LAYERS, VOCAB, D
from llmfoundry.estimate import CPU_TOKENS

SHAPES = [(D, 3 * D), (D, D), (D, 4 * D), (4 * D, D)]  # (in, out) of a block's linear layers
PRODUCTS = [*(SHAPES * LAYERS), (D, VOCAB)]


def flops_per_token() -> int:
    """Of the matrix products of one token's training step: 2 a multiply-add, 3 products a layer."""
    return sum(3 * 2 * wide * out for wide, out in PRODUCTS)


def rate(dtype: torch.dtype, *, repeats: int) -> float:
    """FLOP/s over all products, the fastest of `repeats` passes."""
    operands = [
        (torch.randn(CPU_TOKENS, wide).to(dtype), torch.randn(out, wide).to(dtype))
        for wide, out in PRODUCTS
    ]
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for x, weight in operands:
            y = x @ weight.T
            y @ weight
            y.T @ x
        best = min(best, time.perf_counter() - started)
    return flops_per_token() * CPU_TOKENS / best


def main() -> None:
    """Print the rate of one precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], required=True)
    options = parser.parse_args()
    dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16
    print(rate(dtype, repeats=20))


if __name__ == "__main__":
    main()

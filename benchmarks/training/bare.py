"""The yardstick: the benchmark's mathematics in the shortest PyTorch loop one would write.

    python -m benchmarks.training.bare --precision fp32 --steps 20 [--compile]

Learned positions, pre-norm blocks without biases, exact GELU, a tied head, AdamW, clipping; all
rows causal and whole. No checkpoints, no logging, no data: random tokens. Prints `step N` lines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, LAYERS, VOCAB, SEQ, ROWS = 256, 4, 6, 8192, 512, 8


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch; unset: the benchmark's."""

    d: int = D
    heads: int = HEADS
    layers: int = LAYERS
    vocab: int = VOCAB
    seq: int = SEQ
    rows: int = ROWS


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, self.sizes = sizes.d, sizes
        self.norm_1, self.norm_2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Update x (B, T, D)."""
        q, k, v = (
            part.view(self.sizes.rows, self.sizes.seq, self.sizes.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """6,950,144 parameters at the benchmark's sizes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(sizes.vocab, sizes.d), nn.Embedding(sizes.seq, sizes.d)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.d, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.wte.weight.T


def bare_steps(
    sizes: Sizes, *, precision: str, steps: int, compiled: bool, device: str = "cpu"
) -> Iterator[None]:
    """Train on random tokens, which are there before a step begins; a pause after each."""
    with torch.device(device):
        model = Model(sizes)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    low = precision == "amp_bf16"
    for _ in range(steps):
        tokens = torch.randint(0, sizes.vocab, (sizes.rows, sizes.seq + 1), device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def bare_loop() -> None:
    """Print each step's time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    run = bare_steps(Sizes(), precision=given.precision, steps=given.steps, compiled=given.compile)
    started = time.perf_counter()
    for step, _ in enumerate(run, 1):
        print(f"step {step} {time.perf_counter() - started:.6f}", flush=True)
        started = time.perf_counter()


if __name__ == "__main__":
    bare_loop()

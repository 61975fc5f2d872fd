"""The yardstick: the benchmark's mathematics in the shortest PyTorch loop one would write.

    python -m benchmarks.training.bare --precision fp32 --steps 20 [--compile]

Learned positions, pre-norm blocks without biases, exact GELU, a tied head, AdamW, clipping; all
rows causal and whole. No checkpoints, no logging, no data: random tokens. Prints `step N` lines.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, LAYERS, VOCAB, SEQ, ROWS = 256, 4, 6, 8192, 512, 8


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Update x (B, T, D)."""
        q, k, v = (
            part.view(ROWS, SEQ, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """6,950,144 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, D), nn.Embedding(SEQ, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(D, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.wte.weight.T


def main() -> None:
    """Train on random tokens and print each step's time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    model = Model()
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    low = options.precision == "amp_bf16"
    for step in range(1, options.steps + 1):
        started = time.perf_counter()
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} {time.perf_counter() - started:.6f}", flush=True)


if __name__ == "__main__":
    main()

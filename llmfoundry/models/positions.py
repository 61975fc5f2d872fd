"""Rotary positions (Su et al., 2021), in the half-split form of GPT-NeoX, Llama and DBRX."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (..., T, 1, head_dim) of positions (..., T), in fp32.

    Feature pair (i, i + head_dim/2) turns by position * theta^(-2i / head_dim).
    """
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1 / theta ** (half / head_dim)  # rounded as transformers rounds them
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x (B, T, H, head_dim) by the table, in fp32 or wider; x's dtype comes back."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

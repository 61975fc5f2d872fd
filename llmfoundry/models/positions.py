"""Positions: rotary tables (Su et al., 2021) and queries sharpened with their position.

Rotation is the half-split form of GPT-NeoX, Llama and DBRX, with transformers' ways to stretch its
frequencies. The decoder makes tables once a forward pass; `models/attention.py` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.ops.packed_layout import PackedLayout, at
from llmfoundry.recipe.architecture.model import ModelConfig

Table = tuple[Tensor, Tensor]  # cosine and sine, (..., T, 1, head_dim) in fp32


def rotary_table(positions: Tensor, frequencies: Tensor) -> Table:
    """Cosine and sine of positions (..., T) times frequencies (half,) or (..., T, half).

    Feature pair (i, i + head_dim/2) turns by position * frequencies[i].
    """
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: Table) -> Tensor:
    """Turn x (B, T, H, head_dim) by the table, in fp32 or wider; x's dtype comes back."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def rotary_frequencies(config: ModelConfig, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Radians per position, (half,) or, with lengths (..., T), (..., T, half), in fp32.

    Pair i has rope_theta^(-2i / head_dim), stretched as rope_hf_config says; all is rounded as
    transformers' LlamaRotaryEmbedding rounds it.

    Args:
        config: filled, with rope.
        lengths: what `dynamic_lengths` gives.
        device: where the table will be.
    """
    attn, head_dim = config.attn_config, config.head_dim
    assert attn.rope_theta is not None and head_dim is not None, "the recipe was not filled"
    base: float | Tensor = attn.rope_theta
    if lengths is not None:
        factor, known = attn.rope_hf_config.factor, config.max_seq_len
        assert factor is not None and known is not None
        growth = factor * lengths.clamp(min=known) / known - (factor - 1)
        base = (base * growth ** (head_dim / (head_dim - 2)))[..., None]
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1 / base**exponents
    stretch = STRETCHES.get(attn.rope_hf_config.type)
    return frequencies if stretch is None else stretch(frequencies, config)


def dynamic_lengths(
    config: ModelConfig, layout: PackedLayout | None, total: int, device: torch.device
) -> Tensor | None:
    """The lengths that decide how much `type: dynamic` stretches; None: nothing is stretched.

    A token's length is that of its own document, so that what a document is packed with changes
    nothing (transformers takes the longest of the whole batch). Without a layout it is `total`:
    the row with all that its key-value cache holds, which grows in generation. Keys in the cache
    are turned anew with it, but what deeper layers made of them stays as it was: beyond
    max_seq_len, generation with a cache is near to that without, not equal.

    In a tree the paths that share a token may have different lengths, and with them frequencies:
    beyond max_seq_len nothing can be shared.

    Decided on the host: lengths of at most max_seq_len cost nothing.

    Args:
        config: filled, with rope.
        layout: documents of the rows.
        total: tokens of a row, those in the cache with it.
        device: where the tokens are.

    Raises:
        UserError: a path of a tree is longer than max_seq_len.
    """
    assert config.max_seq_len is not None, "the recipe was not filled"
    if config.attn_config.rope_hf_config.type != "dynamic":
        return None
    if layout is None:
        long = total > config.max_seq_len
        return torch.full((), total, device=device) if long else None
    longest = layout.depth if layout.ends is not None else max(map(max, layout.lengths))
    if longest <= config.max_seq_len:
        return None
    if layout.ends is not None:
        raise UserError(
            f"max_seq_len: a prompt has {longest} tokens, but the model knows"
            f" {config.max_seq_len}; rope_hf_config.type: dynamic stretches longer ones each by its"
            " own length, so that prompts which begin alike cannot be computed together; write"
            f" {config.max_seq_len} or less, or another type"
        )
    rows = [torch.tensor(row) for row in layout.lengths]
    of_tokens = [row.repeat_interleave(row, output_size=layout.width) for row in rows]
    lengths = torch.stack(of_tokens)
    if layout.ranges is not None:
        lengths = at(lengths, layout.ranges)
    if device.type == "cuda":
        lengths = lengths.pin_memory()  # from pageable memory the copy would wait for the device
    return lengths.to(device, non_blocking=True)


def _linear(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Chen et al., 2023: positions / factor."""
    factor = config.attn_config.rope_hf_config.factor
    assert factor is not None
    return frequencies / factor


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Llama 3.1's: pairs that turn seldom over the original length are slowed by `factor`.

    Those that turn at least high_freq_factor times are kept, and between low_freq_factor and that
    the two are mixed.
    """
    rope = config.attn_config.rope_hf_config
    original, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    assert rope.factor and original and low is not None and high is not None
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


STRETCHES: dict[str, Callable[[Tensor, ModelConfig], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
}  # dynamic changes the base itself


def query_temperature(positions: Tensor, floor_scale: int, attn_scale: float) -> Tensor:
    """Factors (..., T, 1, 1) on the queries at positions (..., T), in fp32.

    1 + attn_scale * log(1 + floor((p + 1) / floor_scale)), as Llama 4 has it in its layers without
    rotation; here in every layer whose settings say so.
    """
    steps = torch.floor((positions + 1.0) / floor_scale)
    return (1 + attn_scale * torch.log1p(steps))[..., None, None]


def longest_document(config: ModelConfig) -> int | None:
    """Tokens that a document may have; None: any number, as no positions are learned."""
    return config.max_seq_len if config.learned_pos_emb else None

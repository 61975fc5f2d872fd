"""Backend `flex`: PyTorch's FlexAttention, one compiled kernel for every option except dropout.

ALiBi and the softcap modify logits inside the kernel, so that no bias is materialized. A block mask
lists the blocks of keys to compute. It runs only on CUDA: on a CPU it has no backward pass.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmfoundry.ops.attention.base import (
    AttentionPlan,
    AttentionSpec,
    padded_heads,
    repeat_heads,
    working_dtype,
)
from llmfoundry.ops.attention.sinks import scaled_by_sinks
from llmfoundry.ops.packed_layout import PackedLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys per block of the mask: FlexAttention's default."""
MIN_HEAD_DIM = 16
"""Minimum width of Triton's matmul."""
RECOMPILE_LIMIT = 64
"""Maximum number of compiled versions of the kernel. PyTorch's default, 8, is not enough for kinds
of layers (local, global), training and evaluation, and steps until lengths become dynamic."""


def refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Return why flex does not support a case; None: it does."""
    if device.type == "cpu":
        return "FlexAttention has no backward pass on a CPU; write auto"
    if device.type != "cuda":
        return f"FlexAttention is served on CUDA alone, not on {device.type}; write auto"
    if dtype == torch.float64:
        return "FlexAttention takes no double precision; write auto"
    if importlib.util.find_spec("triton") is None:
        return "its kernel is compiled by Triton, which is not installed; write auto"
    return None


def prepare(
    layout: PackedLayout | None,
    spec: AttentionSpec,
    *,
    queries: int,
    past: int,
    device: torch.device,
) -> AttentionPlan:
    """Prepare the block mask and the function on logits."""
    if layout is not None and layout.ends is not None:
        mask = tree_mask(layout.ends, layout.positions, spec.window)
        return AttentionPlan(
            "flex", spec, block_mask=mask, score_mod=_score_mod(spec, layout.positions)
        )
    documents = None if layout is None else layout.documents
    mask = block_mask(queries, spec.window, documents, device, past=past)
    offset = _offset(past, device)
    return AttentionPlan("flex", spec, block_mask=mask, score_mod=_score_mod(spec, offset=offset))


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Return attention of q (B, T, H, hd) over k, v (B, S, KV, hd), (B, T, H, hd)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    assert not dropout, "plan refuses it"
    groups, width = q.shape[2] // k.shape[2], v.shape[3]
    if groups & (groups - 1):  # its backward pass supports only powers of two query heads per head
        k, v = repeat_heads(q, k, v)
    dtype = working_dtype(v)
    q, k, v = (padded_heads(x.to(dtype), MIN_HEAD_DIM) for x in (q, k, v))
    # inside a compiled block, the kernel becomes part of the block's graph
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    wanted = {} if sinks is None else {"return_aux": AuxRequest(lse=True)}
    result = kernel(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=plan.score_mod,
        block_mask=plan.block_mask,
        scale=plan.spec.scale,
        enable_gqa=q.shape[2] != k.shape[2],
        **wanted,
    )
    out = result if sinks is None else scaled_by_sinks(result[0], result[1].lse, sinks)
    return out.transpose(1, 2)[..., :width]


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """Return FlexAttention compiled, for blocks that are not; compiled at the first call."""
    from torch.nn.attention.flex_attention import flex_attention

    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    # fullgraph: beyond the limit raise, instead of falling back to materialized logits
    return torch.compile(flex_attention, fullgraph=True)


def _offset(past: int, device: torch.device) -> Tensor | None:
    """Return the number of keys before the first query as a tensor; None: there are none.

    A Python number would be compiled into the kernel. The tensor is filled on the device, without a
    synchronization.
    """
    return torch.full((), past, device=device) if past else None


def _score_mod(
    spec: AttentionSpec, positions: Tensor | None = None, offset: Tensor | None = None
) -> Callable[..., Tensor] | None:
    """Return the function on a scaled logit: softcap, then ALiBi's bias; None: neither.

    Args:
        spec: options of the layers.
        positions: (B, T) of trees; otherwise indices differ by as much as positions do.
        offset: (), number of keys before the first query; None: none.
    """
    softcap, slopes = spec.softcap, spec.slopes
    if softcap is None and slopes is None:
        return None

    def change(logit: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            logit = softcap * torch.tanh(logit / softcap)
        if slopes is None:
            return logit
        if positions is None:
            place = query if offset is None else query + offset
            return logit + slopes[head] * (key - place)
        return logit + slopes[head] * (positions[row, key] - positions[row, query])

    return change


def block_mask(
    queries: int, window: int, documents: Tensor | None, device: torch.device, *, past: int = 0
) -> BlockMask:
    """Return the block mask of causal attention: blocks that are partly or fully visible.

    PyTorch's create_block_mask materializes a byte per pair of tokens (4 GB for a sequence of 64k).
    Here the first and last token of a block decide, because documents are ascending and windows are
    bands.

    Args:
        queries: number of queries, the last tokens of a sequence.
        window: keys before a query that it attends to; -1: all.
        documents: (B, past + queries), ascending in a sequence; None: one document per sequence.
        device: device of the tokens.
        past: number of earlier tokens of a sequence, which are only keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = past + queries
    first = torch.arange(0, length, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=length - 1)
    begin = torch.arange(past, length, BLOCK, device=device)[:, None]  # of the blocks of queries
    end = (begin + BLOCK - 1).clamp(max=length - 1)
    some = (first <= end)[None]  # (B or 1, blocks of queries, blocks of keys)
    every = ((last < begin) & (begin + BLOCK <= length) & (first + BLOCK <= length))[None]
    if window >= 0:
        some = some & (begin - last <= window)
        every = every & (end - first <= window)
    if documents is not None:
        opening, closing = documents[:, None, first], documents[:, None, last]
        some = some & (closing >= documents[:, begin])
        every = every & (opening == documents[:, end])
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(window, documents, _offset(past, device)),
        seq_lengths=(queries, length),
    )


def tree_mask(ends: Tensor, positions: Tensor, window: int) -> BlockMask:
    """Return the block mask for trees, also from the minimum and maximum of each block.

    With a window a block may be computed in which nothing is visible, because only the range of
    positions is known.

    Args:
        ends: (B, T) of the layout.
        positions: (B, T) of the layout.
        window: keys on its path before a query that it attends to; -1: all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = ends.shape[1]
    missing = -length % BLOCK

    def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return minimum and maximum of each block, (B, blocks)."""
        filled = torch.cat([x, x[:, -1:].expand(-1, missing)], dim=1)
        low, high = filled.unflatten(1, (-1, BLOCK)).aminmax(dim=2)
        return low, high

    first = torch.arange(0, length, BLOCK, device=ends.device)
    last = (first + BLOCK - 1).clamp(max=length - 1)
    soonest, latest = extremes(ends)
    earlier = first < first[:, None]  # (blocks of queries, blocks of keys)
    some = (earlier & (latest[:, None] > first[:, None])) | (first == first[:, None])
    complete = (first + BLOCK <= length)[:, None]
    every = earlier & complete & (soonest[:, None] > last[:, None])
    if window >= 0:
        low, high = extremes(positions)
        some = some & (low[:, :, None] - high[:, None] <= window)
        every = every & (high[:, :, None] - low[:, None] <= window)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=_tree_mask_mod(ends, positions, window),
        seq_lengths=(length, length),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the number of visible blocks of keys, and these first."""
    flags = blocks[:, None].int()
    order = torch.argsort(flags, dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), order.int()


def _tree_mask_mod(ends: Tensor, positions: Tensor, window: int) -> Callable[..., Tensor]:
    """Return the mask function for trees; see `_mask_mod`."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < ends[row, key])
        if window < 0:
            return seen
        return seen & (positions[row, query] - positions[row, key] <= window)

    return sees


def _mask_mod(
    window: int, documents: Tensor | None, offset: Tensor | None
) -> Callable[..., Tensor]:
    """Return the function whether a query attends to a key, for partly visible blocks."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if offset is None else query + offset
        seen = key <= query
        if window >= 0:
            seen = seen & (query - key <= window)
        return seen if documents is None else seen & (documents[row, query] == documents[row, key])

    return sees

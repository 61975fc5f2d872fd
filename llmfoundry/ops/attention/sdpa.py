"""The backend `sdpa`: PyTorch's scaled_dot_product_attention, on every device.

On a CPU packed documents are attended to one by one and trees by pieces: both leave out keys that
nobody sees, which a mask does not. Elsewhere one call serves, causal or with a mask.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.attention.spec import (
    AttentionPlan,
    AttentionSpec,
    TreePiece,
    causal_bias,
    dense_bias,
    document_segments,
)
from llmfoundry.ops.devices import without_autocast, working_dtype
from llmfoundry.ops.packed_layout import PackedLayout

Serve = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]


def refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Why it cannot serve; None: it can, on every device."""
    return None


def prepare(
    layout: PackedLayout | None,
    spec: AttentionSpec,
    *,
    queries: int,
    past: int,
    device: torch.device,
) -> AttentionPlan:
    """Documents, pieces and chunks on a CPU; a mask elsewhere, where one is needed."""
    if device.type == "cpu" and layout is not None and layout.ends is not None:
        by_piece = _outside_of_graphs(_by_piece)
        return AttentionPlan(
            "sdpa", spec, packed=True, pieces=tree_pieces(layout, spec), by_run=by_piece
        )
    if device.type == "cpu" and layout is not None and past:
        segments = document_segments(layout, past)
        asked = [(n, keys) for n, keys in segments if n and not (n == keys and _is_plain(n, spec))]
        bias, by_run = _bottom_corner(asked, spec, device), _outside_of_graphs(_by_segment)
        return AttentionPlan("sdpa", spec, bias=bias, packed=True, segments=segments, by_run=by_run)
    if device.type == "cpu" and layout is not None:
        lengths = [n for row in layout.lengths for n in row]
        runs = tuple((len(list(same)), n) for n, same in groupby(lengths))
        needing = [n for n in lengths if not _is_plain(n, spec)]
        bias, by_run = _corner(needing, spec, device), _outside_of_graphs(_by_run)
        return AttentionPlan("sdpa", spec, bias=bias, packed=True, runs=runs, by_run=by_run)
    if device.type == "cpu" and past == 0:
        needing = [] if _is_plain(queries, spec) else [queries]
        return AttentionPlan("sdpa", spec, bias=_corner(needing, spec, device))
    if layout is None and _is_plain(past + queries, spec) and (past == 0 or queries == 1):
        return AttentionPlan("sdpa", spec)
    # With a mask and shared heads no CUDA kernel serves but the one that holds all logits.
    shared = device.type != "cuda"
    bias = dense_bias(layout, spec, queries, past, device)
    return AttentionPlan("sdpa", spec, shared_heads=shared, bias=bias)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd); (B, T, H, hd)."""
    dtype, spec, queries = working_dtype(v), plan.spec, q.shape[1]
    if q.device.type != "cpu":
        return _call(q.to(dtype), k.to(dtype), v.to(dtype), plan.bias, spec.scale, dropout)
    inner = _cpu_dtype(dtype, queries, plan)
    with without_autocast(q):
        q, k, v = q.to(inner), k.to(inner), v.to(inner)
        if plan.packed:
            assert plan.by_run is not None
            out = plan.by_run(q, k, v, plan, dropout)
        elif queries != k.shape[1]:  # the last of the row, the others cached or elsewhere
            out = _call(q, k, v, plan.bias, spec.scale, dropout)
        else:
            out = _whole(q, k, v, plan.bias, spec, dropout)
    return out.to(dtype)


def _cpu_dtype(dtype: torch.dtype, queries: int, plan: AttentionPlan) -> torch.dtype:
    """What PyTorch's kernel computes in: fp32 for narrower types, but for long rows of bf16.

    The CPU's bf16 kernel is compiled for every length that it meets, and each is kept: documents of
    all lengths made it 8 times slower than fp32, and its memory grew without end. Rows of whole
    blocks share a few. Measured (one core, forward and backward, H 4, hd 64): bf16 0.75 of fp32's
    time at T 2048, 0.88 at 512.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return dtype
    single = not plan.packed and queries >= 1024 and queries % 64 == 0
    return dtype if single else torch.float32


def _is_plain(length: int, spec: AttentionSpec) -> bool:
    """Whether so many tokens need nothing but causality."""
    return spec.slopes is None and not 0 <= spec.window < length - 1


def _corner(lengths: list[int], spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """The bias of the longest of these lengths; the others take its top-left corner."""
    if not lengths:
        return None
    return _as_numbers(causal_bias(max(lengths), max(lengths), spec, device))


def _bottom_corner(
    shapes: list[tuple[int, int]], spec: AttentionSpec, device: torch.device
) -> Tensor | None:
    """A bias for the most queries and keys; others take its bottom-right corner."""
    if not shapes:
        return None
    queries, keys = (max(sizes) for sizes in zip(*shapes, strict=True))
    return _as_numbers(causal_bias(queries, keys, spec, device))


def _as_numbers(bias: Tensor) -> Tensor:
    """Numbers in place of a mask, once: each call would turn a boolean mask into them."""
    if bias.dtype != torch.bool:
        return bias
    return torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, float("-inf"))


def _outside_of_graphs(serve: Serve) -> Serve:
    """`serve`, kept out of compiled blocks: with its lengths every batch would be compiled anew.

    The compiler takes a second to import; where it is not there yet, nothing is compiled.
    """
    return _disabled(serve) if "torch._dynamo" in sys.modules else serve


@functools.cache
def _disabled(serve: Serve) -> Serve:
    return torch.compiler.disable(serve)


def _by_run(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """One call for each run of documents of one length."""
    sizes = [count * length for count, length in plan.runs]
    # split and cat, not slices: their backward passes touch each gradient once
    parts = zip(plan.runs, *(x.flatten(0, 1).split(sizes) for x in (q, k, v)), strict=True)
    outputs = []
    for shape, *run in parts:
        q_run, k_run, v_run = (x.unflatten(0, shape) for x in run)  # (count, length, heads, hd)
        out = _whole(q_run, k_run, v_run, plan.bias, plan.spec, dropout)
        outputs.append(out.flatten(0, 1))
    return torch.cat(outputs).view(q.shape)


def _by_segment(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """A call for each document that has queries, the last of its tokens."""
    queries, keys = zip(*plan.segments, strict=True)
    parts = zip(
        q.flatten(0, 1).split(queries),
        k.flatten(0, 1).split(keys),
        v.flatten(0, 1).split(keys),
        strict=True,
    )
    outputs = []
    for q_part, k_part, v_part in parts:  # (queries or keys, heads, hd)
        wanted, seen = len(q_part), len(k_part)
        if not wanted:
            continue
        one, bias = (q_part[None], k_part[None], v_part[None]), None
        if wanted < seen or not _is_plain(seen, plan.spec):
            assert plan.bias is not None
            bias = plan.bias[..., -wanted:, -seen:]
        outputs.append(_call(*one, bias, plan.spec.scale, dropout)[0])
    return torch.cat(outputs).view(q.shape)


def _by_piece(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """A call for each piece of the trees of q (B, T, H, hd)."""
    spec = plan.spec
    slopes = None if spec.slopes is None else spec.slopes.view(1, -1, 1, 1)
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    outputs = []
    for part, piece in zip(
        q.flatten(0, 1).split([p.queries for p in plan.pieces]), plan.pieces, strict=True
    ):
        bias = piece.bias if slopes is None else slopes * piece.bias
        keys, values = flat_k[piece.keys], flat_v[piece.keys]  # (keys, KV, hd)
        outputs.append(_call(part[None], keys[None], values[None], bias, spec.scale, dropout)[0])
    return torch.cat(outputs).view(q.shape)


def _whole(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, spec: AttentionSpec, dropout: float
) -> Tensor:
    """Causal attention of rows (B, T, ...) in one call."""
    length = q.shape[1]
    if bias is None or _is_plain(length, spec):
        return _call(q, k, v, None, spec.scale, dropout)
    return _call(q, k, v, bias[..., :length, :length], spec.scale, dropout)


def _call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype),
        dropout_p=dropout,
        is_causal=bias is None and q.shape[1] > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)  # (B, T, H, hd)


PIECE = 128
"""Queries a piece."""


def tree_pieces(layout: PackedLayout, spec: AttentionSpec) -> tuple[TreePiece, ...]:
    """All tokens of the rows, in order, as queries of pieces; the layout is on a CPU."""
    assert layout.ends is not None
    pieces = []
    for row, (ends, positions) in enumerate(zip(layout.ends, layout.positions, strict=True)):
        offset = row * len(ends)
        for start in range(0, len(ends), PIECE):
            pieces.append(_tree_piece(ends, positions, start, offset, spec))
    return tuple(pieces)


def _tree_piece(
    ends: Tensor, positions: Tensor, start: int, offset: int, spec: AttentionSpec
) -> TreePiece:
    """Queries start, start + 1, … of a row (T,) whose first token has the flat place `offset`."""
    stop = min(start + PIECE, len(ends))
    queries = torch.arange(start, stop)[:, None]
    keys = torch.cat([(ends[:start] > start).nonzero()[:, 0], queries[:, 0]])
    distance = positions[keys] - positions[start:stop, None]
    sees = (keys <= queries) & (queries < ends[keys])
    if spec.window >= 0:
        sees &= distance >= -spec.window
        seen = sees.any(dim=0)
        keys, distance, sees = keys[seen], distance[:, seen], sees[:, seen]
    back = distance.float() if spec.slopes is not None else torch.zeros(sees.shape)
    bias = back.masked_fill(~sees, float("-inf"))[None, None]
    first, last = int(keys[0]), int(keys[-1])
    if last - first + 1 == len(keys):
        return TreePiece(stop - start, slice(offset + first, offset + last + 1), bias)
    return TreePiece(stop - start, keys + offset, bias)

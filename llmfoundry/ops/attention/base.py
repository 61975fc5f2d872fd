"""What attention backends share, and the two that run on every device: `sdpa` and `torch`.

A layer asks by an `AttentionSpec`, a forward pass makes an `AttentionPlan` (`select.py`). A backend
has three functions: `refusal` (where it does not run, and why; these two run everywhere), `prepare`
(a plan, once a forward pass) and `attend` (once a layer). `flex` and `flash` run on CUDA alone.

`sdpa` is PyTorch's scaled_dot_product_attention. On a CPU packed documents are attended to one by
one and trees by pieces: both leave out keys that nobody sees, which a mask does not. Elsewhere one
call serves, causal or with a mask. `torch` is plain matmul and softmax: the reference.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.attention_limits import ALIBI, DROPOUT, SOFTCAP
from llmfoundry.ops.devices import has_autocast, kind_of, without_autocast
from llmfoundry.ops.packed_layout import PackedLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Serve = Callable[[Tensor, Tensor, Tensor, "AttentionPlan", float], Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention.

    Attributes:
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale and before any bias.
        slopes: (H,) ALiBi's slopes; None: no ALiBi.
        window: a query sees itself and so many keys before it; -1: all.
        dropout: share of the attention weights that are dropped while training.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    window: int = -1
    dropout: float = 0.0

    @property
    def options(self) -> tuple[str, ...]:
        """What is asked, in the words of `attention_limits`."""
        asked = {
            ALIBI: self.slopes is not None,
            SOFTCAP: self.softcap is not None,
            DROPOUT: self.dropout > 0,
        }
        return tuple(option for option, is_set in asked.items() if is_set)


@dataclass(frozen=True)
class TreePiece:
    """Some adjacent queries of rows that hold trees, and the keys that any of them sees.

    Attributes:
        queries: so many, from where the piece before ends.
        keys: flat places b * T + t, ascending; a slice where they are adjacent too.
        bias: (1, 1, queries, keys) in fp32: 0 where a query sees a key, with ALiBi how far it lies
            back, as a number below 0; minus infinity where it does not.
    """

    queries: int
    keys: Tensor | slice
    bias: Tensor


@dataclass(frozen=True)
class RangePlan:
    """Adjacent queries of the rows, and the keys that any of them sees.

    Attributes:
        queries: so many, from where the range before ends.
        start: place in the row of the first key.
        stop: one past the last key, which is that of the last query.
        plan: how they attend.
    """

    queries: int
    start: int
    stop: int
    plan: AttentionPlan


@dataclass(frozen=True)
class AttentionPlan:
    """What the layers of one forward pass that have the same spec share.

    Attributes:
        impl: the backend that serves; what follows `shared_heads` is for one or two of them.
        spec: what the layers ask; a window that bounds nothing is gone.
        shared_heads: whether the backend reads a key-value head that several query heads share;
            else such heads are repeated for it.
        bias: torch and sdpa: broadcastable to (B, H, T, S): added to the logits, or a boolean
            mask, True where a query sees a key; a document's or a run's is its top-left corner.
            None: causal attention, nothing added.
        packed: sdpa on a CPU: documents are attended to by runs, trees by pieces. A flag of its
            own: torch.compile guards a flag, but the runs' number and lengths too if it is asked
            whether there are any, and nothing if it is asked so of `by_run`.
        runs: with `packed`: (count, length) of adjacent documents of one length, in order.
        pieces: with `packed`: of rows that hold trees, in order.
        by_run: with `packed`: what attends to runs or pieces.
        block_mask: flex: which blocks of keys a block of queries sees.
        score_mod: flex: what is done to a logit; None: nothing.
        borders: varlen, flash and flash3, packed rows: (N + 1,) int32, where the queries of the N
            documents of all rows, one after the other, begin and end.
        longest: with them: the most queries that a document has.
        key_borders: the same of the keys: of a document that begins before the first query there
            are more, its last query then being that of its last key; else the same tensor.
        longest_keys: the most keys that a document has.
        segments: sdpa on a CPU, queries that are the last of packed rows: (queries, keys) of each
            document of all rows; `bias` is then read from its bottom-right corner.
        parts: where queries are some of the row's alone: a plan for each range, and
            nothing of the above.
    """

    impl: str
    spec: AttentionSpec
    shared_heads: bool = True
    bias: Tensor | None = None
    packed: bool = False
    runs: tuple[tuple[int, int], ...] = ()
    pieces: tuple[TreePiece, ...] = ()
    by_run: Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor] | None = None
    block_mask: BlockMask | None = None
    score_mod: Callable[..., Tensor] | None = None
    borders: Tensor | None = None
    longest: int = 0
    key_borders: Tensor | None = None
    longest_keys: int = 0
    segments: tuple[tuple[int, int], ...] = ()
    parts: tuple[RangePlan, ...] = ()


def alibi_slopes(n_heads: int, alibi_bias_max: int, device: torch.device) -> Tensor:
    """Slopes (H,) of ALiBi (Press et al., 2022), in MPT's order for any number of heads."""
    power = 1 << (n_heads - 1).bit_length()
    exponents = torch.arange(1, power + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-exponents * alibi_bias_max / power)
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads] if power != n_heads else slopes


def causal_bias(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Who sees whom among the last `queries` of `keys` positions.

    Without slopes a boolean mask (1, 1, queries, keys), True where a query sees a key; with them
    ALiBi's bias (1, H, queries, keys) in their dtype, minus infinity where it does not.
    """
    key = torch.arange(keys, device=device)
    distance = (key - key[keys - queries :, None])[None, None]
    sees = distance <= 0
    if spec.window >= 0:
        sees &= distance >= -spec.window
    if spec.slopes is None:
        return sees
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))


def dense_bias(
    layout: PackedLayout | None, spec: AttentionSpec, queries: int, past: int, device: torch.device
) -> Tensor:
    """As `causal_bias`, (1 or B, 1 or H, queries, past + queries), documents kept apart.

    The layout is that of all past + queries tokens.
    """
    if layout is not None and layout.ends is not None:
        return _tree_bias(layout.ends, layout.positions, spec)
    bias = causal_bias(queries, past + queries, spec, device)
    if layout is None:
        return bias
    same = layout.documents[:, None, past:, None] == layout.documents[:, None, None, :]
    return bias & same if spec.slopes is None else bias.masked_fill(~same, float("-inf"))


def _tree_bias(ends: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """As `causal_bias` for trees, (B, 1 or H, T, T); distances are those along the path."""
    place = torch.arange(ends.shape[1], device=ends.device)
    sees = (place <= place[:, None]) & (place[:, None] < ends[:, None, :])
    distance = positions[:, None, :] - positions[:, :, None]
    if spec.window >= 0:
        sees &= distance >= -spec.window
    sees, distance = sees[:, None], distance[:, None]
    if spec.slopes is None:
        return sees
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))


def document_segments(layout: PackedLayout, past: int) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of each document of all rows whose first `past` tokens are keys alone.

    The queries are the last of the document's tokens; there may be none.
    """
    found = []
    for row in layout.lengths:
        ends = accumulate(row)
        found += [(min(n, max(0, end - past)), n) for n, end in zip(row, ends, strict=True)]
    return tuple(found)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, S, KV, hd) with as many heads as q (B, T, H, hd)."""
    groups = q.shape[2] // k.shape[2]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Autocast's dtype where it is on for devices of this kind, else `dtype`; fp64 stays."""
    if dtype == torch.float64 or not has_autocast(kind):
        return dtype
    return torch.get_autocast_dtype(kind)


def working_dtype(v: Tensor) -> torch.dtype:
    """What attention computes in: autocast's dtype where it is on, else the values' own.

    Queries and keys may come wider than the values, from their normalization.
    """
    return autocast_dtype(v.device.type, v.dtype)


def sdpa_prepare(
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


def sdpa_attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd); (B, T, H, hd)."""
    dtype, spec, queries = working_dtype(v), plan.spec, q.shape[1]
    if kind_of(q.device) != "cpu":
        return _call(q.to(dtype), k.to(dtype), v.to(dtype), plan.bias, spec.scale, dropout)
    inner = _cpu_dtype(dtype, queries, plan)
    with without_autocast(q.device.type):
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


def torch_prepare(
    layout: PackedLayout | None,
    spec: AttentionSpec,
    *,
    queries: int,
    past: int,
    device: torch.device,
) -> AttentionPlan:
    """A mask of all queries and keys."""
    bias = dense_bias(layout, spec, queries, past, device)
    return AttentionPlan("torch", spec, shared_heads=False, bias=bias)


def torch_attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Plain matmul and softmax in fp32 (fp64 for fp64), all logits in memory: the reference."""
    spec, bias, dtype = plan.spec, plan.bias, working_dtype(v)
    assert bias is not None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with without_autocast(q.device.type):
        logits = torch.einsum("bthd,bshd->bhts", q.to(wide), k.to(wide))  # (B, H, T, S)
        logits = logits * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        is_mask = bias.dtype == torch.bool
        logits = logits.masked_fill(~bias, float("-inf")) if is_mask else logits + bias
        weights = F.dropout(logits.softmax(-1), dropout)
        return torch.einsum("bhts,bshd->bthd", weights, v.to(wide)).to(dtype)  # (B, T, H, hd)

"""Interface of attention backends, and the two that run on every device: `sdpa` and `torch`.

A layer specifies its attention by an `AttentionSpec`; each forward pass has an `AttentionPlan`
(`select.py`). A backend has three functions: `refusal` (why it does not support a case; these two
support every device), `prepare` (creates a plan, once per forward pass) and `attend` (once per
layer). `flex` and `flash` run only on CUDA.

`sdpa` is PyTorch's scaled_dot_product_attention. On a CPU it is called per document, and for trees
per piece, which skips masked keys; a mask does not skip them. On other devices one call, causal or
with a mask, is made. `torch` is plain matmul and softmax: the reference.
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

from llmfoundry.attention_limits import ALIBI, DROPOUT, SINKS, SOFTCAP
from llmfoundry.ops.attention.sinks import attend_on_cpu, with_sink_key
from llmfoundry.ops.devices import has_autocast, kind_of, without_autocast
from llmfoundry.ops.packed_layout import PackedLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Serve = Callable[[Tensor, Tensor, Tensor, "AttentionPlan", float, Tensor | None], Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of a layer.

    Attributes:
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale and before any bias.
        slopes: (H,), ALiBi's slopes; None: no ALiBi.
        window: a query attends to itself and this number of keys before it; -1: all.
        dropout: fraction of attention weights that are dropped in training.
        sinks: the layers have sinks (`sinks.py`), which are passed to `attend`.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    window: int = -1
    dropout: float = 0.0
    sinks: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options in use, in the terms of `attention_limits`."""
        options = {
            ALIBI: self.slopes is not None,
            SOFTCAP: self.softcap is not None,
            DROPOUT: self.dropout > 0,
            SINKS: self.sinks,
        }
        return tuple(option for option, is_set in options.items() if is_set)


@dataclass(frozen=True)
class TreePiece:
    """Adjacent queries of sequences that hold trees, and the keys that any of them attends to.

    Attributes:
        queries: number of queries; they follow those of the previous piece.
        keys: flat indices b * T + t, ascending; a slice if they are adjacent.
        bias: (1, 1, queries, keys), fp32: 0, or with ALiBi the negative distance, if the query
            attends to the key; otherwise minus infinity.
    """

    queries: int
    keys: Tensor | slice
    bias: Tensor


@dataclass(frozen=True)
class RangePlan:
    """Adjacent queries of all sequences, and the keys that any of them attends to.

    Attributes:
        queries: number of queries; they follow those of the previous range.
        start: position of the first key.
        stop: one past the position of the last key, which is that of the last query.
        plan: attention of these queries.
    """

    queries: int
    start: int
    stop: int
    plan: AttentionPlan


@dataclass(frozen=True)
class AttentionPlan:
    """Attention of all layers with the same spec in one forward pass.

    Attributes:
        impl: the backend. The fields after `shared_heads` belong to one or two backends.
        spec: options of the layers, without a window that covers all keys.
        shared_heads: whether the backend supports key-value heads that several query heads share;
            otherwise such heads are repeated.
        bias: torch and sdpa: broadcastable to (B, H, T, S): added to the logits, or a boolean mask,
            True: the query attends to the key. A document or run uses its top-left corner. None:
            causal attention without a bias.
        packed: sdpa on a CPU: whether attention is computed by runs of documents, or by pieces of
            trees. This is a separate flag because torch.compile guards it. Testing `runs` for
            emptiness would add guards on its length and contents; testing `by_run` adds none.
        runs: with `packed`: (count, length) of adjacent documents of the same length, in order.
        pieces: with `packed`: pieces of sequences with trees, in order.
        by_run: with `packed`: function that attends to runs or pieces.
        block_mask: flex: blocks of keys that each block of queries attends to.
        score_mod: flex: function on a logit; None: identity.
        borders: varlen, flash and flash3 with packed sequences: (N + 1,) int32, cumulative number
            of queries of the N documents of all sequences.
        longest: with `borders`: largest number of queries of a document.
        key_borders: the same for keys. A document that begins before the first query has more keys
            than queries, and its last query is that of its last key. Otherwise the same tensor.
        longest_keys: largest number of keys of a document.
        segments: sdpa on a CPU, if the queries are the last tokens of packed sequences: (queries,
            keys) of each document; `bias` is then read from its bottom-right corner.
        parts: if the queries are only some tokens of a sequence: a plan for each range; all other
            fields are then unset.
    """

    impl: str
    spec: AttentionSpec
    shared_heads: bool = True
    bias: Tensor | None = None
    packed: bool = False
    runs: tuple[tuple[int, int], ...] = ()
    pieces: tuple[TreePiece, ...] = ()
    by_run: Serve | None = None
    block_mask: BlockMask | None = None
    score_mod: Callable[..., Tensor] | None = None
    borders: Tensor | None = None
    longest: int = 0
    key_borders: Tensor | None = None
    longest_keys: int = 0
    segments: tuple[tuple[int, int], ...] = ()
    parts: tuple[RangePlan, ...] = ()


def alibi_slopes(n_heads: int, alibi_bias_max: int, device: torch.device) -> Tensor:
    """Return the slopes (H,) of ALiBi (Press et al., 2022), in MPT's order for any H."""
    power = 1 << (n_heads - 1).bit_length()
    exponents = torch.arange(1, power + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-exponents * alibi_bias_max / power)
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads] if power != n_heads else slopes


def causal_bias(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return the mask or bias of causal attention for the last `queries` of `keys` positions.

    Without slopes: a boolean mask (1, 1, queries, keys), True: the query attends to the key. With
    slopes: ALiBi's bias (1, H, queries, keys) in their dtype, minus infinity for masked keys.
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
    """Return the mask or bias of `causal_bias`, with documents or trees separated.

    Its shape is (1 or B, 1 or H, queries, past + queries). The layout describes all past + queries
    tokens.
    """
    if layout is not None and layout.ends is not None:
        return _tree_bias(layout.ends, layout.positions, spec)
    bias = causal_bias(queries, past + queries, spec, device)
    if layout is None:
        return bias
    same = layout.documents[:, None, past:, None] == layout.documents[:, None, None, :]
    return bias & same if spec.slopes is None else bias.masked_fill(~same, float("-inf"))


def _tree_bias(ends: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the mask or bias of trees, (B, 1 or H, T, T); distances are along the path."""
    index = torch.arange(ends.shape[1], device=ends.device)
    is_before, is_in_subtree = index <= index[:, None], index[:, None] < ends[:, None, :]
    sees = is_before & is_in_subtree
    distance = positions[:, None, :] - positions[:, :, None]
    if spec.window >= 0:
        sees &= distance >= -spec.window
    sees, distance = sees[:, None], distance[:, None]
    if spec.slopes is None:
        return sees
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))


def document_segments(layout: PackedLayout, past: int) -> tuple[tuple[int, int], ...]:
    """Return (queries, keys) of each document, if the first `past` tokens are only keys.

    The queries are the last tokens of the document; there may be none.
    """
    segments = []
    for row in layout.lengths:
        ends = accumulate(row)
        segments += [(min(n, max(0, end - past)), n) for n, end in zip(row, ends, strict=True)]
    return tuple(segments)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, S, KV, hd) repeated to the heads of q (B, T, H, hd)."""
    groups = q.shape[2] // k.shape[2]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)


def padded_heads(x: Tensor, width: int) -> Tensor:
    """Return heads (B, T, heads, hd) padded with zeros to `width`; unchanged if they are wider."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Return autocast's dtype if it is enabled for the device type, else `dtype`; fp64 stays."""
    if dtype == torch.float64 or not has_autocast(kind):
        return dtype
    return torch.get_autocast_dtype(kind)


def working_dtype(v: Tensor) -> torch.dtype:
    """Return the dtype of attention: autocast's if it is enabled, else that of the values.

    Queries and keys may be wider than the values because of their normalization.
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
    """Prepare runs, pieces or segments on a CPU; on other devices a mask, if one is needed."""
    # trees on a CPU: pieces
    if device.type == "cpu" and layout is not None and layout.ends is not None:
        by_piece = _outside_of_graphs(_by_piece)
        return AttentionPlan(
            "sdpa", spec, packed=True, pieces=tree_pieces(layout, spec), by_run=by_piece
        )

    # documents on a CPU: the queries of each document, or runs of documents of the same length
    if device.type == "cpu" and layout is not None and past:
        segments = document_segments(layout, past)
        biased = [(n, keys) for n, keys in segments if n and not (n == keys and _is_plain(n, spec))]
        bias, by_run = _bottom_corner(biased, spec, device), _outside_of_graphs(_by_segment)
        return AttentionPlan("sdpa", spec, bias=bias, packed=True, segments=segments, by_run=by_run)
    if device.type == "cpu" and layout is not None:
        lengths = [n for row in layout.lengths for n in row]
        runs = tuple((len(list(same)), n) for n, same in groupby(lengths))
        needing = [n for n in lengths if not _is_plain(n, spec)]
        bias, by_run = _corner(needing, spec, device), _outside_of_graphs(_by_run)
        return AttentionPlan("sdpa", spec, bias=bias, packed=True, runs=runs, by_run=by_run)

    # sequences without documents: one call, with a bias only for a window or ALiBi
    if device.type == "cpu" and past == 0:
        needing = [] if _is_plain(queries, spec) else [queries]
        return AttentionPlan("sdpa", spec, bias=_corner(needing, spec, device))
    if layout is None and _is_plain(past + queries, spec) and (past == 0 or queries == 1):
        return AttentionPlan("sdpa", spec)
    # with a mask and shared heads, the only CUDA kernel is the one that materializes all logits
    shared = device.type != "cuda"
    bias = dense_bias(layout, spec, queries, past, device)
    return AttentionPlan("sdpa", spec, shared_heads=shared, bias=bias)


def sdpa_attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Return the attention output (B, T, H, hd) of q (B, T, H, hd) over k, v (B, S, KV, hd)."""
    dtype, spec, queries = working_dtype(v), plan.spec, q.shape[1]
    if kind_of(q.device) != "cpu":
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        return _call(q, k, v, plan.bias, spec.scale, dropout, sinks)
    inner = _cpu_dtype(dtype, queries, plan)
    with without_autocast(q.device.type):
        q, k, v = q.to(inner), k.to(inner), v.to(inner)
        if plan.packed:
            assert plan.by_run is not None
            out = plan.by_run(q, k, v, plan, dropout, sinks)
        elif queries != k.shape[1]:  # the last tokens; the others are cached or on other ranks
            out = _call(q, k, v, plan.bias, spec.scale, dropout, sinks)
        else:
            out = _whole(q, k, v, plan.bias, spec, dropout, sinks)
    return out.to(dtype)


def _cpu_dtype(dtype: torch.dtype, queries: int, plan: AttentionPlan) -> torch.dtype:
    """Return the dtype for PyTorch's CPU kernel: fp32 for narrower types, except long bf16 inputs.

    The bf16 kernel is compiled for every length, and all versions are cached. Documents of many
    lengths made it 8 times slower than fp32, and memory grew without bound. Lengths that are
    multiples of the block share a few versions. Measured (one core, forward and backward, H 4,
    hd 64): bf16 takes 0.75 of fp32's time at T 2048, 0.88 at 512.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return dtype
    single = not plan.packed and queries >= 1024 and queries % 64 == 0
    return dtype if single else torch.float32


def _is_plain(length: int, spec: AttentionSpec) -> bool:
    """Return whether `length` tokens need only causality, no window or bias."""
    return spec.slopes is None and not 0 <= spec.window < length - 1


def _corner(lengths: list[int], spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """Return the bias of the longest length; shorter ones use its top-left corner."""
    if not lengths:
        return None
    return _as_numbers(causal_bias(max(lengths), max(lengths), spec, device))


def _bottom_corner(
    shapes: list[tuple[int, int]], spec: AttentionSpec, device: torch.device
) -> Tensor | None:
    """Return the bias of the most queries and keys; others use its bottom-right corner."""
    if not shapes:
        return None
    queries, keys = (max(sizes) for sizes in zip(*shapes, strict=True))
    return _as_numbers(causal_bias(queries, keys, spec, device))


def _as_numbers(bias: Tensor) -> Tensor:
    """Convert a boolean mask to numbers once; otherwise each call would convert it."""
    if bias.dtype != torch.bool:
        return bias
    return torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, float("-inf"))


def _outside_of_graphs(serve: Serve) -> Serve:
    """Exclude a function from compiled blocks: each batch of other lengths would recompile them.

    Importing the compiler takes a second. If it is not imported, nothing is compiled.
    """
    return _disabled(serve) if "torch._dynamo" in sys.modules else serve


@functools.cache
def _disabled(serve: Serve) -> Serve:
    return torch.compiler.disable(serve)


def _by_run(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Call attention once per run of documents of the same length."""
    sizes = [count * length for count, length in plan.runs]
    # split and cat, not slices: their backward passes write each gradient once
    parts = zip(plan.runs, *(x.flatten(0, 1).split(sizes) for x in (q, k, v)), strict=True)
    outputs = []
    for shape, *run in parts:
        q_run, k_run, v_run = (x.unflatten(0, shape) for x in run)  # (count, length, heads, hd)
        out = _whole(q_run, k_run, v_run, plan.bias, plan.spec, dropout, sinks)
        outputs.append(out.flatten(0, 1))
    return torch.cat(outputs).view(q.shape)


def _by_segment(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Call attention once per document with queries, which are its last tokens."""
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
        outputs.append(_call(*one, bias, plan.spec.scale, dropout, sinks)[0])
    return torch.cat(outputs).view(q.shape)


def _by_piece(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Call attention once per piece of the trees of q (B, T, H, hd)."""
    spec = plan.spec
    slopes = None if spec.slopes is None else spec.slopes.view(1, -1, 1, 1)
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    outputs = []
    for part, piece in zip(
        q.flatten(0, 1).split([p.queries for p in plan.pieces]), plan.pieces, strict=True
    ):
        bias = piece.bias if slopes is None else slopes * piece.bias
        keys, values = flat_k[piece.keys], flat_v[piece.keys]  # (keys, KV, hd)
        one = (part[None], keys[None], values[None])
        outputs.append(_call(*one, bias, spec.scale, dropout, sinks)[0])
    return torch.cat(outputs).view(q.shape)


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    spec: AttentionSpec,
    dropout: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute causal attention of sequences (B, T, ...) in one call."""
    length = q.shape[1]
    if bias is None or _is_plain(length, spec):
        return _call(q, k, v, None, spec.scale, dropout, sinks)
    return _call(q, k, v, bias[..., :length, :length], spec.scale, dropout, sinks)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    sinks: Tensor | None,
) -> Tensor:
    """Call PyTorch's attention on (B, T or S, heads, hd); without a bias it is causal."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype)
    if sinks is not None:
        assert not dropout, "plan refuses it"
        if mask is not None:
            mask = _as_numbers(mask).to(q.dtype)
        if kind_of(q.device) == "cpu":
            return attend_on_cpu(q, k, v, sinks, mask, scale).transpose(1, 2)
        k, v, mask = with_sink_key(k, v, sinks, mask, q.shape[2])
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and q.shape[2] > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)  # (B, T, H, hd)


PIECE = 128
"""Queries per piece."""


def tree_pieces(layout: PackedLayout, spec: AttentionSpec) -> tuple[TreePiece, ...]:
    """Return pieces that cover all tokens of the sequences, in order; the layout is on a CPU."""
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
    """Return the piece of queries from `start` of a sequence (T,) with flat index `offset`."""
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
    """Prepare a mask of all queries and keys."""
    bias = dense_bias(layout, spec, queries, past, device)
    return AttentionPlan("torch", spec, shared_heads=False, bias=bias)


def torch_attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Compute matmul and softmax in fp32 (fp64 for fp64), with all logits: the reference."""
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
        if sinks is not None:
            column = sinks.to(wide).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], dim=-1)
        weights = F.dropout(logits.softmax(-1), dropout)[..., : k.shape[1]]
        return torch.einsum("bhts,bshd->bthd", weights, v.to(wide)).to(dtype)  # (B, T, H, hd)

"""Ways to keep the packed documents of a sequence apart in a class of transformers.

Entry points: `WAYS`, which a class understands or not, and `document_rows`, for every class: one
sequence for each document. `causal_lm.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from llmfoundry.ops.packed_layout import PackedLayout

FULL, SLIDING = "full_attention", "sliding_attention"
HIDDEN = torch.finfo(torch.bfloat16).min  # mask value; finite in bf16 and fp32


def padding_mask(tokens: Tensor, layout: PackedLayout | None) -> Tensor | None:
    """Return a mask (B, T) that is 0 at padding; None if there is no padding."""
    if layout is None or layout.padding is None or not any(layout.padding):
        return None
    ends = tokens.shape[1] - torch.tensor(layout.padding, device=tokens.device)
    return (torch.arange(tokens.shape[1], device=tokens.device) < ends[:, None]).long()


class MaskTraits(Protocol):
    """Properties of a class that the strategies depend on."""

    def takes(self, name: str) -> bool:
        """Return whether its forward pass has an argument of this name."""

    def mask_types(self) -> dict[str, int | None] | int | None:
        """See the function `mask_types`."""


def mask_types(config: Any) -> dict[str, int | None] | int | None:
    """Return the attention window of each layer type, or the window of all layers (None: full).

    Raises:
        NotImplementedError: there are layer types other than full and sliding attention.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return window
    if not kinds <= {FULL, SLIDING}:
        raise NotImplementedError(f"layers of {sorted(kinds)}")
    if kinds == {FULL}:
        return None
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}


def by_positions(traits: MaskTraits, layout: PackedLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Isolate documents by their positions; the class derives the mask from them."""
    if not traits.takes("position_ids"):
        raise NotImplementedError("positions")
    return {"position_ids": layout.positions}


def by_mask(traits: MaskTraits, layout: PackedLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Isolate documents by an additive mask, with positions if the class takes them."""
    windows = traits.mask_types()
    is_visible = visible(layout)
    mask: Any
    if isinstance(windows, dict):
        mask = {}
        for layer_type, window in windows.items():
            mask[layer_type] = _additive(is_visible, layout, window, dtype)
    else:
        mask = _additive(is_visible, layout, windows, dtype)
    arguments = {"attention_mask": mask}
    if traits.takes("position_ids"):
        arguments["position_ids"] = layout.positions
    return arguments


Way = Callable[[Any, PackedLayout, torch.dtype], dict[str, Any]]
WAYS: dict[str, Way] = {"positions": by_positions, "mask": by_mask}


def visible(layout: PackedLayout) -> Tensor:
    """Return a boolean (B, T, T): whether token i of a sequence attends to token j."""
    index = torch.arange(layout.positions.shape[1], device=layout.positions.device)
    is_causal = index[:, None] >= index
    is_same_document = layout.documents[:, :, None] == layout.documents[:, None, :]
    is_visible = is_causal & is_same_document
    if layout.ends is not None:  # in a tree, token j is visible up to the end of its branch
        is_visible = is_visible & (index[:, None] < layout.ends[:, None, :])
    return is_visible


def _additive(
    is_visible: Tensor, layout: PackedLayout, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return an additive mask (B, 1, T, T): 0 at visible tokens within the window."""
    if window is not None:
        distance = layout.positions[:, :, None] - layout.positions[:, None, :]
        is_visible = is_visible & (distance < window)
    hidden = max(HIDDEN, torch.finfo(dtype).min)
    zeros = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
    return zeros.masked_fill_(~is_visible, hidden)[:, None]


def document_rows(layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Return index tensors that unpack a layout into one sequence per document or tree path.

    Returns:
        (B * T,), for each token of the layout, its flat index in the R unpacked sequences;
        (R, L), for each token of the unpacked sequences, its flat index in the layout, -1 at
        padding.
    """
    paths = _document_paths(layout) if layout.ends is None else _tree_paths(layout)
    width = max(map(len, paths))
    sources = torch.full((len(paths), width), -1)
    back = torch.zeros(layout.positions.numel(), dtype=torch.int64)
    for row, path in enumerate(paths):
        indices = torch.tensor(path)
        sources[row, : len(path)] = indices
        back[indices] = row * width + torch.arange(len(path))
    return back, sources


def _document_paths(layout: PackedLayout) -> list[list[int]]:
    """Return for each document the flat indices of its tokens."""
    width, paths = layout.positions.shape[1], []
    for row, lengths in enumerate(layout.lengths):
        start = row * width
        for length in lengths:
            paths.append(list(range(start, start + length)))
            start += length
    return [path for path in paths if path]


def _tree_paths(layout: PackedLayout) -> list[list[int]]:
    """Return the path from each root to each leaf. A leaf is a token that no later token sees."""
    assert layout.ends is not None
    width, paths = layout.positions.shape[1], []
    for row, ends in enumerate(layout.ends.tolist()):
        ancestors: list[int] = []  # visible tokens up to the current token
        for i, end in enumerate(ends):
            ancestors = [j for j in ancestors if ends[j] > i] + [i]
            is_leaf = end == i + 1 or i + 1 == width
            if is_leaf:
                paths.append([row * width + j for j in ancestors])
    return paths

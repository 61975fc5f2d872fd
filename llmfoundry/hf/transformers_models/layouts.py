"""Ways to tell a class of transformers who attends to whom in a row of several documents.

    positions   positions that begin anew, and no mask: transformers finds the documents by them and
                makes its own masks, of windows and chunks too, for every kind of attention
    mask        an additive mask (B, 1, T, T), which classes take as it is; with windows a mask for
                each kind of layer. Serves trees, and classes that know no positions, as MPT
    rows        a row for each document: right for every causal class, and the slowest

`HFCausalLM` tries them in this order and keeps the first that is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from llmfoundry.ops.packed_layout import Layout

FULL, SLIDING = "full_attention", "sliding_attention"
HIDDEN = torch.finfo(torch.bfloat16).min  # finite in every dtype that has an exponent of 8 bits


class Asked(Protocol):
    """What the ways need to know of a class."""

    def takes(self, name: str) -> bool:
        """Whether it has an argument of this name."""

    def mask_types(self) -> dict[str, int | None] | int | None:
        """See `mask_types`."""


def mask_types(config: Any) -> dict[str, int | None] | int | None:
    """Windows by the names of a class's layers; or the one window of all of them, or none.

    Raises:
        NotImplementedError: there are layers of yet another kind.
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


def by_positions(asked: Asked, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Positions alone."""
    if not asked.takes("position_ids"):
        raise NotImplementedError("positions")
    return {"position_ids": layout.positions}


def by_mask(asked: Asked, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """An additive mask, and positions where the class takes them."""
    windows = asked.mask_types()
    seen = visible(layout)
    if isinstance(windows, dict):
        mask: Any = {
            kind: _additive(seen, layout, window, dtype) for kind, window in windows.items()
        }
    else:
        mask = _additive(seen, layout, windows, dtype)
    given = {"attention_mask": mask}
    if asked.takes("position_ids"):
        given["position_ids"] = layout.positions
    return given


Way = Callable[[Any, Layout, torch.dtype], dict[str, Any]]
WAYS: dict[str, Way] = {"positions": by_positions, "mask": by_mask}


def visible(layout: Layout) -> Tensor:
    """(B, T, T), whether token i of a row sees token j."""
    places = torch.arange(layout.positions.shape[1], device=layout.positions.device)
    seen = (places[:, None] >= places) & (
        layout.documents[:, :, None] == layout.documents[:, None, :]
    )
    return seen if layout.ends is None else seen & (places[:, None] < layout.ends[:, None, :])


def _additive(seen: Tensor, layout: Layout, window: int | None, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T): 0 where a token is seen, a window counted in positions."""
    if window is not None:
        places = layout.positions
        seen = seen & (places[:, :, None] - places[:, None, :] < window)
    hidden = max(HIDDEN, torch.finfo(dtype).min)
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill_(~seen, hidden)[:, None]


def document_rows(layout: Layout) -> tuple[Tensor, Tensor]:
    """How a layout's documents, or the paths of its trees, become rows of their own.

    Returns:
        (B * T,) for each flat place the flat place among the new rows where it is computed; (R, L)
        the flat places that the new rows are made of, -1 after a row's end.
    """
    paths = _document_paths(layout) if layout.ends is None else _tree_paths(layout)
    width = max(map(len, paths))
    sources = torch.full((len(paths), width), -1)
    back = torch.zeros(layout.positions.numel(), dtype=torch.int64)
    for row, path in enumerate(paths):
        places = torch.tensor(path)
        sources[row, : len(path)] = places
        back[places] = row * width + torch.arange(len(path))
    return back, sources


def _document_paths(layout: Layout) -> list[list[int]]:
    width, paths = layout.positions.shape[1], []
    for row, lengths in enumerate(layout.lengths):
        at = row * width
        for length in lengths:
            paths.append(list(range(at, at + length)))
            at += length
    return [path for path in paths if path]


def _tree_paths(layout: Layout) -> list[list[int]]:
    """From each root to each leaf: a token is a leaf if its part ends right after it."""
    assert layout.ends is not None
    width, paths = layout.positions.shape[1], []
    for row, ends in enumerate(layout.ends.tolist()):
        above: list[int] = []
        for place, end in enumerate(ends):
            above = [j for j in above if ends[j] > place] + [place]
            if end == place + 1 or place + 1 == width:
                paths.append([row * width + j for j in above])
    return paths

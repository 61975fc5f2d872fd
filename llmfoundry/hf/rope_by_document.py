"""Rotary angles that depend on the length of each packed document instead of the batch.

Entry point: `RopeByDocument`. LongRoPE (Phi-3) has two sets of frequencies; dynamic RoPE has one
for each length. The classes of transformers choose the set by the longest sequence of a batch,
including padding. Here a hook computes the angles for each document length, and every token uses
the angles of its document.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.ops.packed_layout import PackedLayout


class RopeByDocument:
    """Hooks on the rotary modules of a model, at work within `within`."""

    def __init__(self, base: nn.Module) -> None:
        """Register the hooks; models without rotary modules have none."""
        self._layout: PackedLayout | None = None
        for module in base.modules():
            if hasattr(module, "rope_type") and hasattr(module, "config"):
                module.register_forward_hook(self._angles, with_kwargs=True)

    @contextmanager
    def within(self, layout: PackedLayout | None) -> Iterator[None]:
        """Take the lengths of documents from a layout without branches; None: whole rows."""
        self._layout = None if layout is None or layout.ends is not None else layout
        try:
            yield
        finally:
            self._layout = None

    def _angles(self, module: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Any:
        """(cos, sin), (B, T, head) each, in place of those that one choice gives all tokens."""
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        kind, longest = _kind(module, layer_type)
        if self._layout is None or kind not in ("longrope", "dynamic"):
            return None
        x = args[0] if args else kwargs["x"]
        lengths = _lengths(self._layout)
        choices = lengths.clamp(min=longest)
        if kind == "longrope":  # one choice for all that are longer
            choices = choices.clamp(max=longest + 1)
        positions = self._layout.positions
        more = {} if layer_type is None else {"layer_type": layer_type}
        for choice in choices.unique().tolist():
            if kind == "dynamic":  # a short text takes back what a longer one left
                module.forward(x, torch.zeros_like(positions[:, :1]), **more)
            is_long = kind == "longrope" and choice > longest
            seen = positions if is_long else positions.clamp(max=choice - 1)
            angles = module.forward(x, seen.to(x.device), **more)
            is_chosen = (choices == choice)[..., None].to(x.device)
            pairs = zip(angles, found, strict=True)
            found = tuple(torch.where(is_chosen, new, old) for new, old in pairs)
        return found


def _kind(module: Any, layer_type: str | None) -> tuple[str, int]:
    """The type of RoPE, and the length up to which its original frequencies hold."""
    kind, ropes = module.rope_type, getattr(module.config, "rope_parameters", None) or {}
    if layer_type is not None:
        kind, ropes = kind[layer_type], ropes[layer_type]
    if not isinstance(kind, str):
        return "", 0
    longest = ropes.get("original_max_position_embeddings")
    return kind, int(longest or module.config.max_position_embeddings)


def _lengths(layout: PackedLayout) -> Tensor:
    """(B, T), on the host: the length of each token's document, without padding."""
    padding = layout.padding or (0,) * len(layout.lengths)
    rows = []
    for row, pad in zip(layout.lengths, padding, strict=True):
        ends = torch.tensor(row).cumsum(0)
        real = ends.clamp(max=int(ends[-1]) - pad) - (ends - torch.tensor(row))
        rows.append(torch.repeat_interleave(real.clamp(min=0), torch.tensor(row)))
    return torch.stack(rows)

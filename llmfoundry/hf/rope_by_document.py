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
    """Hooks on the rotary modules of a model, active inside `with rope.within(layout)`."""

    def __init__(self, base: nn.Module) -> None:
        """Register the hooks; models without rotary modules have none."""
        self._layout: PackedLayout | None = None
        for module in base.modules():
            if hasattr(module, "rope_type") and hasattr(module, "config"):
                module.register_forward_hook(self._angles, with_kwargs=True)

    @contextmanager
    def within(self, layout: PackedLayout | None) -> Iterator[None]:
        """Use the document lengths of a layout; None, or a layout with branches: full sequences."""
        self._layout = None if layout is None or layout.ends is not None else layout
        try:
            yield
        finally:
            self._layout = None

    def _angles(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Return cos and sin, (B, T, head) each, by document length; None: keep the output.

        A forward hook: `args` and `kwargs` are those of the rotary module. `output` has the angles
        that the module computed for the longest sequence of the batch.
        """
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        kind, longest = _kind(module, layer_type)
        if self._layout is None or kind not in ("longrope", "dynamic"):
            return None
        # the length that determines the angles of each token, (B, T)
        x = args[0] if args else kwargs["x"]
        angle_lengths = _lengths(self._layout).clamp(min=longest)
        if kind == "longrope":  # all longer documents have the same frequencies
            angle_lengths = angle_lengths.clamp(max=longest + 1)
        # compute the angles for each length, and select them for its tokens
        positions = self._layout.positions
        more = {} if layer_type is None else {"layer_type": layer_type}
        for length in angle_lengths.unique().tolist():
            if kind == "dynamic":  # a short sequence resets frequencies of an earlier, longer one
                module.forward(x, torch.zeros_like(positions[:, :1]), **more)
            is_long = kind == "longrope" and length > longest
            used_positions = positions if is_long else positions.clamp(max=length - 1)
            angles = module.forward(x, used_positions.to(x.device), **more)
            is_selected = (angle_lengths == length)[..., None].to(x.device)
            pairs = zip(angles, output, strict=True)
            output = tuple(torch.where(is_selected, new, old) for new, old in pairs)
        return output


def _kind(module: Any, layer_type: str | None) -> tuple[str, int]:
    """Return the type of RoPE, and the maximum length of its original frequencies."""
    kind, ropes = module.rope_type, getattr(module.config, "rope_parameters", None) or {}
    if layer_type is not None:
        kind, ropes = kind[layer_type], ropes[layer_type]
    if not isinstance(kind, str):
        return "", 0
    longest = ropes.get("original_max_position_embeddings")
    return kind, int(longest or module.config.max_position_embeddings)


def _lengths(layout: PackedLayout) -> Tensor:
    """Return the length of each token's document without padding, (B, T), on the CPU."""
    padding = layout.padding or (0,) * len(layout.lengths)
    rows = []
    for document_lengths, n_padding in zip(layout.lengths, padding, strict=True):
        lengths = torch.tensor(document_lengths)  # the last ones include padding
        ends = lengths.cumsum(0)
        begins = ends - lengths
        text_end = int(ends[-1]) - n_padding
        text_lengths = (ends.clamp(max=text_end) - begins).clamp(min=0)
        rows.append(torch.repeat_interleave(text_lengths, lengths))
    return torch.stack(rows)

"""The losses between two logs, added up on the device; the trainer logs their means."""

from __future__ import annotations

import torch
from torch import Tensor


class LossWindow:
    """Sums of the losses of some steps, and of what else the objective reports."""

    def __init__(
        self,
        device: torch.device,
        sums: float | list[float] = 0.0,
        steps: int = 0,
        *,
        only_finite: bool = False,
    ) -> None:
        """Begin, or go on from what `state` returned.

        Args:
            device: of the sums.
            sums: so far.
            steps: whose losses they are.
            only_finite: leave out steps whose first loss is not finite.
        """
        self._sums, self.steps = torch.tensor(sums, device=device), steps
        self._left_out = torch.zeros((), device=device, dtype=torch.int64)
        self._only_finite = only_finite

    def add(self, losses: Tensor) -> None:
        """Add those of a step."""
        if self._only_finite:
            sound = torch.isfinite(losses[0])
            losses = torch.where(sound, losses, 0.0)
            self._left_out = self._left_out + ~sound
        self._sums = self._sums + losses
        self.steps += 1

    def take(self) -> tuple[Tensor, int, Tensor]:
        """Sums, steps, and how many of the steps (), int64, the sums are without; begin anew."""
        found = self._sums, self.steps, self._left_out
        self._sums, self._left_out = torch.zeros_like(found[0]), torch.zeros_like(found[2])
        self.steps = 0
        return found

    def state(self) -> tuple[float | list[float], int]:
        """Sums and steps, for a checkpoint; waits for the device."""
        return self._sums.tolist(), self.steps - int(self._left_out)

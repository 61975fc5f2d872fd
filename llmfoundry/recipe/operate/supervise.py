"""The `supervise` section: what is done when a run ends before it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds

LEVELS = ("off", "quick", "full")
EXCLUDE = "{exclude}"
"""In `launch`: the machines to do without, with commas between."""


@dataclass
class SuperviseConfig:
    """A process around the run that starts it, sees why it ended, and starts it again, or not."""

    enabled: bool = False
    """Supervise a run of scripts/train.py or finetune.py; scripts/supervise.py does in any case."""
    no_progress: Annotated[int, Range(1, 1000)] = 3
    """Attempts in a row without a newer checkpoint, whatever they failed of, after which it gives
    up (exit status 93)."""
    max_restarts: Annotated[int, Range(0, 1000)] = 3
    """Restarts after failures of one kind since the last newer checkpoint; at most 1 where a loss
    was not finite and 2 where the cause is unknown."""
    wait_seconds: Annotated[float, Range(0, 86_400, "a day")] = 2.0
    """Pause before a restart; twice as long after each attempt without progress, 300 s at most."""
    confirm: Annotated[str, choice(LEVELS)] = "quick"
    """How suspected machines are checked before the next start: off, quick or full, as
    scripts/check.py does."""
    act: bool = False
    """Whether machines that the check finds bad are taken out: drained (Slurm) and left out of the
    next start. false: it is only told, and the run starts again on the same ones."""
    launch: list[str] = field(default_factory=list)
    """Words before `scripts/train.py RECIPE ...`, as [srun, --nodes=2, "--exclude={exclude}",
    torchrun, ...]; unset: this machine alone. A word with {exclude} is left out while there is
    none to do without."""
    webhook: str | None = None
    """A URL that gets {"text": ...} for every decision, as Slack's incoming webhooks take it; write
    it as ${oc.env:SLACK_WEBHOOK}."""

    def check(self, key: str = "supervise.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            yield f"{key}webhook: is not a URL; write one that begins with https://"

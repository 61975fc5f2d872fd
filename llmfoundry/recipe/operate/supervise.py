"""The `supervise` section: what is done when a run ends before it is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert, nearest

LEVELS = ("off", "quick", "full")
WEBHOOK_FORMS = ("slack", "discord", "teams", "json")
EXCLUDE = "{exclude}"
_FIELD = re.compile(r"\{[^{}]*\}")
"""In `launch`: the machines to do without, with commas between."""
NODES = "{nodes}"
"""In `launch`: how many machines of the Slurm job are left."""


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
    """Whether machines that the check finds bad are taken out: drained (Slurm) or cordoned
    (Kubernetes), and left out of the next start. false: it is only told, and the run starts again
    on the same ones."""
    launch: list[str] = field(default_factory=list)
    """Words before `scripts/train.py RECIPE ...`, as [srun, -K, "--nodes={nodes}",
    "--exclude={exclude}", python]; unset: this machine alone. {nodes}: how many machines of the
    Slurm job are left, so that it goes on with fewer; a number: so many, and others are spare. A
    word with {exclude} is left out while there is none to do without."""
    requeue: bool = False
    """Whether a Slurm job that is to go on later or elsewhere (exit status 75) puts itself back
    into the queue (scontrol requeue), with `act` without machines found bad; not after SIGINT, a
    person's. false: whoever has started it does."""
    webhook: str | None = None
    """A URL that gets every decision as a line; it is a secret: write ${oc.env:SLACK_WEBHOOK}."""
    webhook_form: Annotated[str | None, choice(WEBHOOK_FORMS)] = None
    """What is posted: slack: {"text": ...}, as Mattermost, Rocket.Chat and Google Chat take it too;
    discord; teams: an adaptive card; json: the text and the whole event. Unset: by the URL's host,
    else slack."""

    def check(self, key: str = "supervise.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
        if self.webhook is not None and not _is_url(self.webhook):
            yield f"{key}webhook: is not a URL; write one that begins with https://"
        for number, word in enumerate(self.launch):
            for name in _FIELD.findall(word):
                if name != EXCLUDE and nearest(name, [EXCLUDE]):
                    yield f"{key}launch[{number}]: {name} stands for nothing; write {EXCLUDE}"
            if not word.strip():
                yield f"{key}launch[{number}]: is empty; remove it"
        if self.act and self.confirm == "off":
            yield f"{key}act: has no effect with {key}confirm: off; remove it"
        if self.webhook is None:
            yield from inert(key, self, ["webhook_form"], f"without {key}webhook")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return False
    return is_http and bool(parts.hostname) and text.isascii() and not re.search(r"[\s\x7f]", text)

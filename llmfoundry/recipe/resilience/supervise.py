"""The `supervise` section: what is done when a run ends before it is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert, nearest
from llmfoundry.redaction import public

LEVELS = ("off", "quick", "full")
WEBHOOK_FORMS = ("slack", "discord", "teams", "json")
EXCLUDE = "{exclude}"
"""In `launch`: the machines to leave out, with commas between."""
NODES = "{nodes}"
"""In `launch`: how many machines of the Slurm job are left."""
_FIELD = re.compile(r"\{[^{}]*\}")


@dataclass
class SuperviseConfig:
    """A process around the run that starts it, finds why it ended, and decides on a restart."""

    enabled: bool = False
    """Supervise a run of scripts/train.py or finetune.py; scripts/supervise.py does in any case."""
    no_progress: Annotated[int, Range(1, 1000)] = 3
    """Attempts in a row without a newer checkpoint, whatever the cause, after which it gives up
    (exit status 93)."""
    max_restarts: Annotated[int, Range(0, 1000)] = 3
    """Restarts after failures of one kind since the last newer checkpoint; at most 1 where a loss
    was not finite and 2 where the cause is unknown."""
    max_restarts_per_day: Annotated[int, Range(0, 100_000)] = 24
    """Restarts within 24 hours, whatever the cause and though each attempt leaves a newer
    checkpoint, after which it gives up (exit status 93). 16,384 GPUs had about 8 a day."""
    min_goodput: Annotated[float, Range(0, below=1)] = 0.25
    """The smallest share of the last 24 hours in steps that a checkpoint has kept: below it gives
    up (93), after at least five attempts and an hour; 0: no limit."""
    vanished_seconds: Annotated[float, Range(0, 86_400, "a day")] = 60.0
    """How long a checkpoint that was there after the last attempt may be missing before the next
    start, as a file system is mounted late; then it ends with 93 and says what has vanished."""
    store_seconds: Annotated[float, Range(0, 31_536_000, "a year")] = 3600.0
    """How long to wait before a start for a store of checkpoints that does not answer, with pauses
    up to 300 s; then it ends with 1."""
    prometheus_port: Annotated[int | None, Range(1, 65_535)] = None
    """Serve the supervisor's own state for Prometheus here, at the address of
    logger.prometheus_host; unset: with logger.prometheus_port a hundred ports after that."""
    prometheus_textfile: str | None = None
    """The same in a file NAME.prom for node-exporter; unset: with logger.prometheus_textfile in
    the same folder, as NAME-supervisor.prom. It stays after the end, with the exit status."""
    wait_seconds: Annotated[float, Range(0, 86_400, "a day")] = 2.0
    """Pause before a restart; twice as long after each attempt without progress, 300 s at most."""
    confirm: Annotated[str, choice(LEVELS)] = "quick"
    """How suspected machines are checked before the next start: off, quick or full, as
    scripts/check.py does."""
    act: bool = False
    """Whether machines that the check finds bad are taken out: drained (Slurm) or cordoned
    (Kubernetes), and left out of the next start. false: it is only reported, and the run restarts
    on the same ones."""
    launch: list[str] = field(default_factory=list)
    """Words before `scripts/train.py RECIPE ...`, as [srun, -K, "--nodes={nodes}",
    "--exclude={exclude}", python]; unset: this machine alone. {nodes}: how many machines of the
    Slurm job are left, so that it continues with fewer; a number: so many, and others are spare. A
    word with {exclude} is omitted while there is none to leave out."""
    requeue: bool = False
    """Whether a Slurm job that is to resume later or elsewhere (exit status 75) requeues itself
    (scontrol requeue), with `act` without machines found bad; not after SIGINT, a person's. false:
    whoever has started it does."""
    webhook: str | None = None
    """A URL that gets every decision as a line; it is a secret: write ${oc.env:SLACK_WEBHOOK}."""
    webhook_form: Annotated[str | None, choice(WEBHOOK_FORMS)] = None
    """What is posted: slack: {"text": ...}, as for Mattermost, Rocket.Chat and Google Chat;
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
        if not (self.prometheus_textfile or ".prom").endswith(".prom"):
            yield (
                f"{key}prometheus_textfile: '{public(str(self.prometheus_textfile))}' does not end"
                " in .prom, and node-exporter reads no other; write NAME.prom"
            )
        if self.webhook is None:
            yield from inert(key, self, ["webhook_form"], f"without {key}webhook")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return False
    return is_http and bool(parts.hostname) and text.isascii() and not re.search(r"[\s\x7f]", text)

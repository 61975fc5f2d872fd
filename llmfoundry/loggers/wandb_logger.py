"""Weights & Biases' side of a run: online, or offline in save_folder/wandb for `wandb sync`.

The tracker calls `wandb_target`, a `BackgroundWriter` the rest. The idea: the package is kept to
its one task. It never asks, prints or watches the machine, leaves `sys.exit` alone, and what it
does when the process ends takes FINISH_SECONDS at most. A folder's W&B run is found again by the id
kept in the folder, so a resumed run continues the same one.

The package's own process keeps what it could not send yet on the disk and tries on, so a server
that goes away loses nothing; all that is left to do here is to say so. Online, a resumed run sends
only steps that the server does not have. Offline nobody knows those: each process leaves a folder
of its own under the same id, the steps after the checkpoint stand in two, and `wandb sync` counts
W&B's own steps on from the first folder's. So every row has time/batch, which is the x axis.
"""

from __future__ import annotations

import os
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.loggers.background_queue import LogTarget, MetricPoint, RunFacts, Samples, describe
from llmfoundry.loggers.folder_run import FolderRun
from llmfoundry.loggers.metrics_file import BATCH
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import public

RUN_ID_FILE = "wandb_run_id"
EXIT_CODES = {"finished": 0, "failed": 1, "killed": 255}  # W&B calls 255 killed
INIT_SECONDS, FINISH_SECONDS = 20.0, 10.0
_LOOK_SECONDS = 20.0
# Of wandb.errors: no login, or one that the server does not know.
_PERMANENT = ("AuthenticationError", "UsageError")


class WandbSession:
    """An open W&B run.

    `server`: its address, to look whether it is there; None offline. `is_new`: nothing of it was
    written before.
    """

    max_points = 10_000

    def __init__(
        self,
        run: Any,
        label: str,
        server: str | None,
        say: Callable[[str], None],
        *,
        is_new: bool,
    ) -> None:
        self._run, self._label, self._server, self._say = run, label, server, say
        self._first_step = run.starting_step
        self._knows_steps = is_new or server is not None
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._is_away = False

    def steps(self, name: str) -> Container[int]:
        """The batches that it has; offline nobody knows an older run's, and none is sent again."""
        return range(self._first_step if self._knows_steps else sys.maxsize)

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Hand metrics to W&B's process, which never fails, and look whether they can arrive."""
        for batch, group in groupby(points, lambda p: p.batch):
            if batch >= self._first_step:
                row = {BATCH: batch, **{p.name: p.value for p in group}}
                self._run.log(row, step=batch)
        self._look()

    def samples(self, samples: Samples) -> None:
        """A small page of texts: W&B's tables would be artifacts, with requests of their own."""
        import wandb

        if samples.batch >= self._first_step:
            texts = (f"<b>{escape(prompt)}</b>{escape(text)}" for prompt, text in samples.texts)
            page = "".join(f"<pre>{text}</pre>" for text in texts)
            html = wandb.Html(page, inject=False, data_is_not_path=True)
            self._run.log({BATCH: samples.batch, "samples": html}, step=samples.batch)

    def upload(self, path: Path) -> None:
        """Keep a text file with the run, passwords hidden."""
        copy = Path(self._run.dir) / path.name
        copy.write_text(public(path.read_text(encoding="utf-8")), encoding="utf-8")
        self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def end(self, status: str) -> None:
        """Send the rest, for FINISH_SECONDS at most."""
        folder = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=EXIT_CODES[status])
        except TimeoutError:
            self._say(
                f"{self._label} lacks the end of the run;"
                f" `wandb sync --include-online {folder}` sends it"
            )

    def _look(self) -> None:
        """Say when the server has gone, and when it is back."""
        if self._server is None or time.monotonic() < self._next_look:
            return
        problem = _problem(self._server)
        if problem is not None and not self._is_away:
            self._say(
                f"{self._label} does not answer: {problem}; training continues, W&B keeps the"
                " values on the disk and tries again"
            )
        elif problem is None and self._is_away:
            self._say(f"{self._label} answers again")
        self._is_away = problem is not None
        self._next_look = time.monotonic() + _LOOK_SECONDS


def wandb_target(config: LoggerConfig, run_folder: Path) -> LogTarget:
    """The project of `logger.wandb_project`.

    Raises:
        UserError: the package is not installed.
    """
    if find_spec("wandb") is None:
        raise UserError(
            "logger.wandb: needs the package wandb; pip install 'llmfoundry-recipes[wandb]'"
        )
    label = f"W&B ({config.wandb_mode}, project {config.wandb_project})"
    return LogTarget(
        label,
        partial(open_session, config, label),
        lambda folder: FolderRun.at(folder / RUN_ID_FILE).forget(),
        lambda error: type(error).__name__ in _PERMANENT,
        is_in_order=True,  # a step before its last is dropped, with a warning in its own log
    )


def open_session(
    config: LoggerConfig, label: str, facts: RunFacts, say: Callable[[str], None]
) -> WandbSession:
    """Import wandb, and begin or continue the folder's run."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no telemetry about the package
    import wandb

    own = FolderRun.at(facts.folder / RUN_ID_FILE)
    is_new = not own.id
    own.keep(own.id or secrets.token_hex(4))
    settings = wandb.Settings(**_settings(facts.folder))
    at_exit = sys.exit, sys.excepthook  # wandb's own would only note an exit code, which we give
    try:
        address = wandb.setup(settings).settings.base_url  # before `init`, which may ask and print
    finally:
        sys.exit, sys.excepthook = at_exit
    server = address if config.wandb_mode == "online" else None
    # Without a server `init` would wait for INIT_SECONDS, and so would the end of the process.
    if server is not None and (problem := _problem(server)) is not None:
        raise ConnectionError(f"{public(server)}: {problem}")
    copy = {"copied_from": own.copied_from} if own.copied_from else {}
    run = wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity,
        mode=config.wandb_mode,  # type: ignore[arg-type]
        id=own.id,
        name=facts.name,
        resume="allow",
        config={**facts.params, **{f"run.{k}": v for k, v in {**facts.tags, **copy}.items()}},
        settings=settings,
    )
    run.define_metric(BATCH)
    run.define_metric("*", step_metric=BATCH)
    return WandbSession(run, label, server, say, is_new=is_new)


def _settings(folder: Path) -> dict[str, Any]:
    """Silence, no watching of the machine or the code, and an end to every wait."""
    return {
        "root_dir": str(folder),  # W&B adds wandb/
        "console": "off",
        "silent": True,
        "quiet": True,
        "host": "",
        "program": "",
        "disable_code": True,
        "disable_git": True,
        "save_code": False,
        "allow_val_change": True,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "finish_timeout_raises": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
    }


def _problem(address: str) -> str | None:
    """Why nothing answers at an address; None where anything does."""
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        # Python may trust other certificates than W&B's process does.
        is_there = isinstance(getattr(error, "reason", None), ssl.SSLError)
        return None if is_there else describe(error)
    return None

"""Weights & Biases logger: online, or offline in save_folder/wandb for `wandb sync`.

The tracker calls `wandb_target`; a `BackgroundWriter` calls everything else. The package is limited
to logging: it does not prompt, print, monitor the machine or replace `sys.exit`, and it finishes
within FINISH_SECONDS at the end of the process. The save folder stores the id of its W&B run, so
that a resumed run continues the same W&B run.

The service process of the package stores unsent values on the disk and retries, so that an outage
of the server loses nothing; this module only reports it. Online, a resumed run sends only the steps
that the server does not have. Offline, these steps are unknown: each process writes another folder
with the same run id, steps after the checkpoint are in two folders, and `wandb sync` continues
W&B's step counter after the first folder. Therefore every row has time/batch, which is the x axis.
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
from llmfoundry.loggers.background_queue import (
    LogTarget,
    MetricPoint,
    RunFacts,
    TextSamples,
    describe,
)
from llmfoundry.loggers.folder_run import FolderRun
from llmfoundry.loggers.metrics_file import BATCH
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import public

RUN_ID_FILE = "wandb_run_id"
EXIT_CODES = {"finished": 0, "failed": 1, "killed": 255}  # W&B calls 255 killed
INIT_SECONDS, FINISH_SECONDS = 20.0, 10.0
_CHECK_SECONDS = 20.0  # interval at which the server is checked
# classes of wandb.errors: missing login, invalid login
_PERMANENT = ("AuthenticationError", "UsageError")


class WandbSession:
    """An open W&B run.

    Args:
        run: the run of the package.
        label: name of the logger in messages.
        server: address of the server, to check whether it responds; None: offline.
        say: prints a line.
        is_new: whether no earlier process wrote to the run.
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
        self._next_check = time.monotonic() + _CHECK_SECONDS
        self._is_away = False

    def steps(self, name: str) -> Container[int]:
        """Return the batches that the run has.

        The steps of an older offline run are unknown. All batches are returned for it, so that
        nothing is sent twice.
        """
        return range(self._first_step if self._knows_steps else sys.maxsize)

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Pass metrics to the service process, which never fails, and check the server."""
        for batch, group in groupby(points, lambda p: p.batch):
            if batch >= self._first_step:
                values = {p.name: p.value for p in group}
                self._run.log({BATCH: batch, **values}, step=batch)
        self._check_server()

    def samples(self, samples: TextSamples) -> None:
        """Log generated texts as an HTML page; a W&B table would need several requests."""
        import wandb

        if samples.batch >= self._first_step:
            page = ""
            for prompt, text in samples.texts:
                page += f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>"
            html = wandb.Html(page, inject=False, data_is_not_path=True)
            self._run.log({BATCH: samples.batch, "samples": html}, step=samples.batch)

    def upload(self, path: Path) -> None:
        """Store a text file with the run, passwords masked."""
        copy = Path(self._run.dir) / path.name
        copy.write_text(public(path.read_text(encoding="utf-8")), encoding="utf-8")
        self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def end(self, status: str) -> None:
        """Send the rest within FINISH_SECONDS and close the run."""
        folder = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=EXIT_CODES[status])
        except TimeoutError:
            self._say(
                f"{self._label} lacks the end of the run;"
                f" `wandb sync --include-online {folder}` sends it"
            )

    def _check_server(self) -> None:
        """Report when the server stops or starts to respond."""
        if self._server is None or time.monotonic() < self._next_check:
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
        self._next_check = time.monotonic() + _CHECK_SECONDS


def wandb_target(config: LoggerConfig, run_folder: Path) -> LogTarget:
    """Return the target for the project `logger.wandb_project`.

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
        is_in_order=True,  # W&B drops a step before its last one, with a warning in its log
    )


def open_session(
    config: LoggerConfig, label: str, facts: RunFacts, say: Callable[[str], None]
) -> WandbSession:
    """Import wandb, and start or continue the folder's run.

    Raises:
        ConnectionError: the server does not respond.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no telemetry about the package
    import wandb

    folder_run = FolderRun.at(facts.folder / RUN_ID_FILE)
    is_new = not folder_run.id
    folder_run.keep(folder_run.id or secrets.token_hex(4))

    # call `setup` before `init`, which may prompt and print; it replaces the exit hooks only to
    # record the exit code, which `end` passes anyway
    settings = wandb.Settings(**_settings(facts.folder))
    exit_hooks = sys.exit, sys.excepthook
    try:
        address = wandb.setup(settings).settings.base_url
    finally:
        sys.exit, sys.excepthook = exit_hooks

    # without a server, `init` and the end of the process would wait for INIT_SECONDS
    server = address if config.wandb_mode == "online" else None
    problem = None if server is None else _problem(server)
    if problem is not None:
        raise ConnectionError(f"{public(str(server))}: {problem}")

    tags = {f"run.{name}": text for name, text in facts.tags.items()}
    if folder_run.copied_from:
        tags["run.copied_from"] = folder_run.copied_from
    run = wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity,
        mode=config.wandb_mode,  # type: ignore[arg-type]
        id=folder_run.id,
        name=facts.name,
        resume="allow",
        config={**facts.params, **tags},
        settings=settings,
    )
    run.define_metric(BATCH)
    run.define_metric("*", step_metric=BATCH)
    return WandbSession(run, label, server, say, is_new=is_new)


def _settings(folder: Path) -> dict[str, Any]:
    """Return settings without output and without monitoring of machine or code, with timeouts."""
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
    """Return why a server does not respond; None if it responds, even with an error."""
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        # an unknown certificate is no problem: the service process may trust it
        is_certificate = isinstance(getattr(error, "reason", None), ssl.SSLError)
        return None if is_certificate else describe(error)
    return None

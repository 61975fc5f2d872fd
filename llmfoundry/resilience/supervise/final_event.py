"""The last decision of a supervised run to where its record is: MLflow, and the store of a URL.

The run's own processes send events there (`loggers/background_queue.py`, `checkpoint/mirror.py`);
after the last decision there are none. The supervisor calls `tell_mlflow` and `tell_store`, which
have it sent by a process: a store that does not answer holds nobody up, and the supervisor stays
small.

    python -m llmfoundry.resilience.supervise.final_event    # what to send is on standard input
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry.checkpoint.remote_events import FOLDERS
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.events import NAME as EVENTS
from llmfoundry.loggers.background_queue import describe
from llmfoundry.loggers.mlflow_logger import RUN_ID_FILE, tag_ended
from llmfoundry.recipe.front.paths import ROOT
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import hide, public

PATIENCE = 60.0  # seconds; an import of MLflow takes 2 to 10, a request of its 20 at most


def tell_mlflow(logger: LoggerConfig, folder: Path, status: str) -> str:
    """Send the tags of a run that has ended; empty, or why MLflow does not have them.

    Args:
        logger: filled.
        folder: the run's.
        status: finished, failed or killed: how it ended, if MLflow still believes that it runs.
    """
    if not logger.mlflow or not (folder / RUN_ID_FILE).is_file():
        return ""
    told = {"uri": logger.tracking_uri, "folder": str(folder.absolute()), "status": status}
    return _sent("MLflow", {"mlflow": told})


def tell_store(url: str, options: FetchOptions, folder: Path) -> str:
    """Send the events, and what else was written beside a run; empty, or why they are not there.

    Args:
        url: the run's.
        options: how its store is spoken to.
        folder: the working copy.
    """
    told = {"url": url, "options": asdict(options), "folder": str(folder.absolute())}
    return _sent(public(url), {"store": told})


def _sent(place: str, told: dict[str, Any]) -> str:
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,  # no address on a command line, which everybody sees
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        said, _ = process.communicate(json.dumps(told), timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: it may hang in a file system
        return f"{place} lacks the last decision: no answer in {PATIENCE:.0f} s"
    if process.returncode:
        why = said.strip() or f"status {process.returncode}"
        return f"{place} lacks the last decision: {why}"
    return ""


def main() -> int:
    """Send what standard input says; the exit status."""
    told = json.load(sys.stdin)
    hide({"storage_options": told.get("store", {}).get("options", {}).get("storage_options")})
    hide([value for section in told.values() for value in section.values()])
    try:
        for name, section in told.items():
            _ACTIONS[name](section)
    except Exception as error:
        with suppress(OSError):
            print(public(describe(error)), flush=True)
        return 1
    return 0


def _to_mlflow(told: dict[str, Any]) -> None:
    tag_ended(told["uri"], Path(told["folder"]), told["status"])


def _to_store(told: dict[str, Any]) -> None:
    from llmfoundry.checkpoint.remote_run import CHECKPOINTS
    from llmfoundry.data.fetch.object_store import ObjectStore

    store = ObjectStore(told["url"], FetchOptions(**told["options"]), key="save_folder")
    sizes, folder = store.files(skip=(CHECKPOINTS,)), Path(told["folder"])
    paths = [folder / EVENTS, *(path for name in FOLDERS for path in folder.glob(f"{name}/**/*"))]
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_file() and sizes.get(name) != path.stat().st_size:
            store.upload(name, path)


_ACTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "mlflow": _to_mlflow,
    "store": _to_store,
}


if __name__ == "__main__":
    sys.exit(main())

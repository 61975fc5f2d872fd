"""The last decision of a supervised run to MLflow, by a process that may take only so long.

The tags of a run in MLflow are sent by its own processes (`track/event_tags.py`); after the last
decision there are none. The supervisor calls `tell_mlflow`, which imports nothing of MLflow: the
process that does is killed where a store does not answer.

    python -m llmfoundry.operate.supervise.last_words    # what to send is on standard input
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from llmfoundry.masking import hide, public
from llmfoundry.recipe.front.paths import ROOT
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.track.background_writer import describe
from llmfoundry.track.mlflow_session import RUN_ID_FILE, tag_ended

PATIENCE = 30.0  # seconds; an import of MLflow takes 2 to 10


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
        return f"MLflow lacks the last decision: no answer in {PATIENCE:.0f} s"
    if process.returncode:
        return f"MLflow lacks the last decision: {said.strip() or 'it cannot be imported'}"
    return ""


def main() -> int:
    """Send what standard input says; the exit status."""
    told = json.load(sys.stdin)
    hide(told["uri"])
    try:
        tag_ended(told["uri"], Path(told["folder"]), told["status"])
    except Exception as error:
        with suppress(OSError):
            print(public(describe(error)), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

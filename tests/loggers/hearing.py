"""A writer whose words a test can read."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from llmfoundry.loggers.background_queue import BackgroundWriter, RunFacts, milliseconds
from llmfoundry.loggers.writers import make_target
from llmfoundry.recipe.logger import LoggerConfig


class Hears(list[str]):
    """Collects what a writer says."""

    def text(self) -> str:
        return "\n".join(self)


def writer(kind: str, folder: Path, heard: Hears, **config: Any) -> BackgroundWriter:
    """The writer that the recipe `logger: {<kind>: true, **config}` makes."""
    choices: dict[str, Any] = {"mlflow": False, kind: True, **config}
    filled = LoggerConfig(**choices)
    filled.fill()
    folder.mkdir(parents=True, exist_ok=True)
    target = make_target(kind, filled, folder)
    return BackgroundWriter(target, note=heard.append, warn=heard.append)


def facts(folder: Path, first_batch: int = 0, **given: Any) -> RunFacts:
    params, tags = given.get("params", {"seed": 17}), given.get("tags", {})
    return RunFacts(folder.name, folder, first_batch, milliseconds(), params, tags)


def finish(sender: BackgroundWriter, status: str = "finished", timeout: float = 300.0) -> None:
    sender.end(status, timeout=timeout)
    sender.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

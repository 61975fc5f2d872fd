"""A plugin for runs that are to be struck: `callbacks.plugins.slow={}` makes steps long enough."""

from __future__ import annotations

import time

from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.trainer import Callback, Trainer


class Slow(Callback):
    """Waits after each step."""

    def __init__(self, seconds: float) -> None:
        """For so many seconds."""
        self._seconds = seconds

    def on_step(self, trainer: Trainer) -> None:
        """Wait."""
        time.sleep(self._seconds)


CALLBACKS["slow"] = CallbackType(lambda job, seconds: Slow(seconds), keys={"seconds": 0.1})

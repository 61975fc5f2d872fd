"""What plugins add to the tables of choices is taken out again, for the tests that follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmfoundry.data.preparation.readers import FILE_TYPES
from llmfoundry.gauntlet.task_types import TASK_TYPES
from llmfoundry.recipe import choice_table, plugins
from llmfoundry.recipe.attention import NORMS
from llmfoundry.recipe.choice_table import ChoiceTable
from llmfoundry.recipe.logger import CALLBACKS, LOGGERS
from llmfoundry.recipe.loss import LOSSES
from llmfoundry.recipe.optimizer import OPTIMIZERS
from llmfoundry.recipe.schedule import SCHEDULES

TABLES: list[ChoiceTable[Any]] = [
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    CALLBACKS,
    LOGGERS,
    NORMS,
    FILE_TYPES,
    TASK_TYPES,
]


@contextmanager
def tables_as_before() -> Iterator[Callable[[], None]]:
    """Gives a function after which all is as in a new process; called at the end, too."""
    before = [({**table.data}, {**table.origins}) for table in TABLES]

    def undo() -> None:
        for table, (entries, origins) in zip(TABLES, before, strict=True):
            table.data, table.origins = {**entries}, {**origins}
        for name in plugins._imported:
            sys.modules.pop(name, None)
        plugins._imported.clear()
        choice_table.not_imported.clear()

    try:
        yield undo
    finally:
        undo()

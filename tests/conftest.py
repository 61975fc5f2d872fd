"""Files that take long come first, so that no worker of xdist ends alone with one of them.

xdist hands out a file at a time (`make test`), and would begin with those of the most tests. And
what no test needs is not waited for: the collector of garbage on all that was imported, the disk.
"""

from __future__ import annotations

import gc

import pytest

from tests.disk import skip_fsync

gc.disable()  # until everything is imported
skip_fsync()

LONG = (  # by the seconds of CPU that they take, from 60 to 10
    "tests/parallel/test_matrix.py",
    "tests/parallel/test_ranks.py",
    "tests/test_recipes.py",
    "tests/commands/test_evaluate.py",
    "tests/test_whole_path.py",
    "tests/train/test_moe_training.py",
    "tests/train/test_layouts.py",
    "tests/gauntlet/test_harness.py",
    "tests/train/test_saving.py",
    "tests/parallel/test_frozen.py",
    "tests/parallel/test_blocks.py",
    "tests/parallel/test_data_failure.py",
    "tests/recipe/test_launch_lines.py",
    "tests/recipe/test_any_input.py",
    "tests/recipe/test_front.py",
    "tests/test_console.py",
    "tests/gauntlet/test_generation.py",
    "tests/train/test_finetune_class.py",
    "tests/commands/test_finetune.py",
    "tests/train/test_callbacks.py",
    "tests/export/test_hf_settings.py",
    "tests/gauntlet/test_endpoint_scores.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by file; within a file all stay as they were."""
    place = {name: n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(LONG)))


def pytest_collection_finish() -> None:
    """What is there now stays; to look at it takes a second, in each run of a test."""
    gc.enable()
    gc.freeze()

"""Files that take long come first, so that no worker of xdist ends alone with one of them.

xdist hands out a file at a time (`make test`), and would begin with those of the most tests. And
what no test needs is not waited for: the collector of garbage on all that was imported, the disk.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.counts import VARIABLE, counts_folder, share_counts
from tests.day import day
from tests.disk import skip_fsync

# Under nohup, and behind &, signals are ignored, and what tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other take processors
gc.disable()  # until everything is imported
skip_fsync()
day()  # the same for all workers
OWNS_COUNTS = VARIABLE not in os.environ
counts_folder()  # the same for all workers, and for what they start

LONG = (  # by the seconds of CPU that they take, from 45 to 5
    "tests/train/spikes/test_runs.py",
    "tests/distributed/test_matrix.py",
    "tests/train/test_adapter_runs.py",
    "tests/test_estimate.py",
    "tests/cli/test_sweep.py",
    "tests/test_recipes.py",
    "tests/test_whole_path.py",
    "tests/checkpoint/test_reading_while_training.py",
    "tests/train/test_layouts.py",
    "tests/cli/commands/test_scaling.py",
    "tests/test_finetune_recipes.py",
    "tests/benchmarks/test_gpu_check.py",
    "tests/test_communication.py",
    "tests/distributed/test_activation_checkpoint.py",
    "tests/launch/test_hosts.py",  # waits
    "tests/launch/test_runs.py",  # waits
    "tests/hf/test_hf_settings.py",
    "tests/cli/commands/test_dry_run.py",
    "tests/cli/test_console.py",
    "tests/cli/commands/test_evaluate.py",
    "tests/cli/commands/test_registered_runs.py",
    "tests/hf/test_hf_class.py",
    "tests/recipe/test_examples.py",
    "tests/cli/test_any_input.py",
    "tests/recipe/test_yamls.py",
    "tests/recipe/test_launch_lines.py",
    "tests/ops/test_attention.py",
    "tests/resilience/test_run_check.py",
    "tests/distributed/test_shipped_recipes.py",
    "tests/train/test_moe_training.py",
    "tests/train/test_out_of_memory.py",
    "tests/recipe/test_groups.py",
    "tests/migrate/test_hints.py",
    "tests/distributed/test_process_group.py",
    "tests/test_seconds.py",
    "tests/train/test_quantized_runs.py",
    "tests/distributed/test_tensor.py",
    "tests/distributed/test_ranks.py",
    "tests/recipe/test_bounds.py",
    "tests/recipe/test_hydra.py",
    "tests/cli/test_help.py",
    "tests/test_docstring_names.py",
    "tests/test_processes.py",  # waits
    "tests/gauntlet/test_harness.py",
    "tests/loggers/test_secrets.py",
    "tests/cli/test_front.py",
    "tests/distributed/test_frozen.py",
    "tests/gauntlet/test_endpoint_scores.py",
    "tests/resilience/test_supervised_runs.py",
    "tests/resilience/test_supervisor.py",  # waits
    "tests/resilience/test_hang_monitor.py",
)


def pytest_report_header() -> str:
    """Which day's random cases are tried, to repeat them."""
    return f"day of the random cases: TESTS_DAY={day()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Let the first worker of xdist compile all test files, and others read what it compiled.

    In a fresh checkout that is half of the time that collecting takes.
    """
    compiled = [*Path(__file__).parent.glob("train/__pycache__/test_*.pyc")]  # of the last folder
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if is_first or compiled or sys.dont_write_bytecode:
        return
    deadline = time.monotonic() + 120  # whatever has become of the first one
    while not _collected().exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def _collected() -> Path:
    """Return the file that says that the first worker has imported all test files."""
    return counts_folder() / "collected"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by file; within a file all stay as they were."""
    place = {name: n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(LONG)))


def pytest_collection_finish() -> None:
    """What is there now stays; to look at it takes a second, in each run of a test.

    What is made later is looked at less often than by default, to read a recipe in a fifth less.
    """
    _collected().touch()
    if "llmfoundry.plan.count" in sys.modules:
        share_counts()
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """Remove the session's counts, in the process that made their folder."""
    if OWNS_COUNTS:
        shutil.rmtree(counts_folder(), ignore_errors=True)

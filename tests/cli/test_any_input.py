"""Whatever is written in a recipe or on a command line: a checked recipe, or lines and exit 2.

`mutations.py` makes the cases. What every script's front accepts is carried on as far as a training
run's own refusals: the estimate, the kernels' rules, and the model on the meta device.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import subprocess
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry.builders.model import attention_refusal, build_root, experts_refusal
from llmfoundry.cli import sweep_runs as sweep
from llmfoundry.cli.script import run
from llmfoundry.errors import LONGEST_LINE, MOST_LINES, UserError
from llmfoundry.plan import fit
from llmfoundry.plan.fit import choose_microbatch, with_guessed_vocabulary
from llmfoundry.plan.memory import GIB
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.paths import ROOT
from llmfoundry.recipe.train import TrainRecipe
from tests.day import day
from tests.recipe.mutations import SCRIPTS, Case, case, prepare_folder

SLOWEST = 5.0  # seconds of the processor
A_DAY = 100  # cases


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Recipes that scripts would start; works in a folder of its own, and sweeps start nothing."""
    module, recipes = types.ModuleType("remembering_target"), []
    module.remember = recipes.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "remembering_target", module)
    monkeypatch.setattr(sweep, "_execute", lambda arguments, meanwhile: 0)
    monkeypatch.setattr(fit, "largest_fitting_recipe", lambda *_: None)  # reads all recipes
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    prepare_folder(tmp_path)
    yield recipes


def outcome(tried: Case, received: list[Any]) -> tuple[str, str]:
    """What became of a case, accepted or refused, and what is wrong with that ("": nothing)."""
    for name, text in tried.files.items():
        Path(name).write_text(text)
    received.clear()
    out, errors, status = io.StringIO(), io.StringIO(), 0
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            run(tried.schema, "remembering_target:remember", tried.argv, help="What it does.")
    except SystemExit as error:
        status = int(error.code or 0)
    except Exception:
        return "crashed", traceback.format_exc()
    lines = errors.getvalue().splitlines()
    if status == 0:
        return "accepted", carried(received) if received else ""
    long = [line for line in lines if len(line) > 2 * LONGEST_LINE]
    if status != 2 or not lines or long or len(lines) > MOST_LINES + 1:
        return "refused", f"exit {status}, {len(lines)} lines, {len(long)} of them too long"
    return "refused", ""


def carried(received: list[Any]) -> str:
    """Take an accepted training recipe as far as its model without memory; "" or a traceback."""
    (recipe,) = received
    if not isinstance(recipe, TrainRecipe) or isinstance(recipe, FinetuneRecipe):
        recipe.fill()  # a fine-tuned model's shape is that of weights that are not here
        return ""
    cpu = torch.device("cpu")
    try:
        ready = with_guessed_vocabulary(recipe)
        choose_microbatch(ready, world_size=1, available=100 * GIB, device=cpu)
        attention_refusal(ready, cpu)
        experts_refusal(ready, cpu)
        if ready.model.n_layers <= 12:
            build_root(ready)
    except UserError:
        return ""
    except Exception:
        return traceback.format_exc()
    return ""


def try_all(seeds: range, received: list[Any]) -> None:
    """Try every seed's case, print what became of them, and fail with what went wrong."""
    counts: Counter[str] = Counter()
    slowest, wrong = (0.0, -1), []
    # What other tests of this process left, objects to collect and threads, is not a case's time.
    gc.collect()
    gc.freeze()
    for seed in seeds:
        tried, began = case(seed), time.thread_time()
        result, problem = outcome(tried, received)
        seconds = time.thread_time() - began
        if seconds > SLOWEST:  # the first case that needs a library also imports it
            began = time.thread_time()
            outcome(tried, received)
            seconds = time.thread_time() - began
        slowest = max(slowest, (seconds, seed))
        counts[result] += 1
        if problem:
            wrong.append(f"case({seed}): {tried.script} {tried.argv}\n{problem[-3000:]}"[:6000])
    print(f"\ntried {len(seeds):,}: {dict(counts)}; slowest {slowest[0]:.2f} s (seed {slowest[1]})")
    assert not wrong, f"{len(wrong)} of {len(seeds)}:\n" + "\n".join(wrong[:5])
    assert slowest[0] < SLOWEST, f"case({slowest[1]}) took {slowest[0]:.1f} s"
    assert min(counts["accepted"], counts["refused"]) > len(seeds) // 20, "both must be tried"


def test_mutated_commands_end_with_a_recipe_or_with_lines(received: list[Any]) -> None:
    """Others every day; what failed names its seed."""
    first = A_DAY * (day() % 100_000)
    try_all(range(first, first + A_DAY), received)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_tens_of_thousands_of_mutated_commands(part: int, received: list[Any]) -> None:
    try_all(range(10_000 * (part + 1), 10_000 * (part + 2)), received)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_scripts_end_with_0_or_2(received: list[Any]) -> None:
    """In processes of their own; of what would start work only --cfg job is asked."""
    counts: Counter[int] = Counter()
    slowest, wrong = 0.0, []
    for seed in range(1_000_000, 1_000_300):
        tried = case(seed)
        if any("\0" in word for word in tried.argv):
            continue  # no process can be given it
        outcome(tried, received)
        flags = ["--cfg", "job"] if received else []
        script = str(ROOT / "scripts" / f"{tried.script}.py")
        words = [os.fsencode(word) for word in (sys.executable, script, *tried.argv, *flags)]
        before = _children_seconds()
        got = subprocess.run(words, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
        slowest = max(slowest, _children_seconds() - before)
        counts[got.returncode] += 1
        if got.returncode not in (0, 2) or b"Traceback" in got.stderr:
            wrong.append(f"case({seed}): {tried.script} {tried.argv}\n{got.stderr[-2000:]!r}")
    print(f"\ntried {sum(counts.values())}: exit {dict(counts)}; slowest {slowest:.2f} s")
    assert not wrong, "\n".join(wrong[:5])
    assert slowest < SLOWEST


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_script_is_tried() -> None:
    there = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    there.remove("gpu_check")  # it takes no recipe: tests/benchmarks/test_gpu_check.py
    assert there == SCRIPTS.keys() == {case(seed).script for seed in range(200)}

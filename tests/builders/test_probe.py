"""`auto_probe`: the largest microbatch that was measured to fit, and a probe that ends no run."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.builders import microbatch
from llmfoundry.builders.microbatch import SHORT, ProbeRequest, ProbeResults, probe_fit
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.plan.search import ActivationChoice, Fit
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import write_recipe

ROWS = ("global_train_batch_size=8", "device_train_microbatch_size=auto", "auto_probe=on")
GIB = 2**30
Start = Callable[[ProbeRequest, Any], subprocess.Popen[bytes]]


def recipe(folder: Path, *overrides: str) -> TrainRecipe:
    found: TrainRecipe = checked(TrainRecipe, str(folder / "tiny.yaml"), [*ROWS, *overrides])
    found = found.resolve()
    found.model.fill(vocab_size=257)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_recipe(tmp_path)
    return tmp_path


def choose(place: Path, start: int, *, available: int = GIB, most: int | None = 8) -> Any:
    """Rows that the probe chooses, and what it reports."""
    lines: list[str] = []
    tiny = recipe(place)
    fit: Any = Fit(start, ActivationChoice("none"), need=None)  # type: ignore[arg-type]
    found = probe_fit(tiny, fit, ALONE, available=available, note=lines.append, most=most)
    return found.microbatch, lines


def machine_of(peaks: dict[int, int], tried: list[list[int]]) -> Start:
    """Processes of a machine on which a size takes so many bytes."""

    def start(request: ProbeRequest, env: Any) -> subprocess.Popen[bytes]:
        tried.append([*request.sizes])
        fits = [n for n in request.sizes if peaks[n] <= request.available]
        lines = [json.dumps({"rows": n, "peak": peaks[n], "seconds": 1.0}) for n in fits]
        request.results.write_text("\n".join([*lines, '{"rows": 4, "pe']))
        status = 0 if len(fits) == len(request.sizes) else SHORT
        return child(request, f"sys.exit({status})")

    return start


def child(request: ProbeRequest, code: str) -> subprocess.Popen[bytes]:
    with (request.results.parent / microbatch.STDERR).open("wb") as file:
        return subprocess.Popen([sys.executable, "-c", f"import sys; {code}"], stderr=file)


PEAKS = {1: 100, 2: 200, 4: 400, 8: 800}


@pytest.mark.parametrize(
    ("start", "available", "chosen", "sizes"),
    [
        (2, 500, 4, [[2, 4, 8]]),
        (2, 2000, 8, [[2, 4, 8]]),
        (8, 500, 4, [[8], [4]]),
        (8, 150, 1, [[8], [4], [2], [1]]),
        (4, 50, 4, [[4, 8], [2], [1]]),  # nothing fits: the estimate
        (4, 410, 2, [[4, 8], [2]]),  # 4 leaves no room for what differs between batches
    ],
)
def test_the_largest_size_that_fits_is_found_from_above_and_below(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    available: int,
    chosen: int,
    sizes: list[list[int]],
) -> None:
    tried: list[list[int]] = []
    monkeypatch.setattr(microbatch, "_start", machine_of(PEAKS, tried))
    assert choose(place, start, available=available)[0] == chosen
    assert tried == sizes


def test_what_was_measured_is_not_measured_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks are kept, not the choice: with less memory free a start takes less, without a probe."""
    tried: list[list[int]] = []
    monkeypatch.setattr(microbatch, "_start", machine_of(PEAKS, tried))
    assert choose(place, 2, available=500)[0] == 4
    assert [choose(place, 2, available=free)[0] for free in (500, 450, 250)] == [4, 4, 2]
    assert tried == [[2, 4, 8]]
    assert choose(place, 2, available=1000)[0] == 8 and tried[1:] == [[8]]
    assert choose(place, 2, available=1000, most=4)[0] == 4 and len(tried) == 2
    (kept,) = (place / "cache" / "probes").iterdir()
    for damaged in ("", "[]", '{"peaks": {"2": 1}, "seconds": {}, "too_large": {}}'):
        kept.write_text(damaged)
        tried.clear()
        assert choose(place, 2, available=500)[0] == 4 and tried == [[2, 4, 8]]


def test_another_recipe_is_measured_anew(place: Path) -> None:
    paths = [
        microbatch._cache_path(recipe(place, *overrides), ALONE)
        for overrides in ((), ("model.n_layers=3",), ("max_seq_len=32",), ("optimizer.lr=1e-4",))
    ]
    assert len({*paths}) == 4
    for same in ("run_name=other", "save_interval=1ba", "logger.mlflow=true"):
        assert microbatch._cache_path(recipe(place, same), ALONE) == paths[0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sys.exit('no such kernel')", "status 1: no such kernel"),
        ("import os; os.kill(os.getpid(), 9)", "one of its processes ended"),
        ("import time; time.sleep(600)", "it took more than 1 s"),
    ],
)
def test_a_probe_that_breaks_leaves_the_estimate(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr(microbatch, "SECONDS", 1.0)
    monkeypatch.setattr(microbatch, "_start", lambda request, env: child(request, code))
    chosen, lines = choose(place, 4)
    assert chosen == 4
    assert any(f"auto_probe: the probe failed ({why})" in line for line in lines), lines


def test_real_steps_are_measured_in_a_process(place: Path) -> None:
    """More rows take more memory, and all that was asked for is there."""
    chosen, lines = choose(place, 2, available=4 * GIB)
    assert chosen == 8, lines
    (kept,) = (place / "cache" / "probes").iterdir()
    peaks = json.loads(kept.read_text())["peaks"]
    assert list(peaks) == ["2", "4", "8"] and 0 < peaks["2"] <= peaks["4"] <= peaks["8"] < GIB


@pytest.mark.slow
def test_a_size_beyond_the_memory_that_is_free_fails_there_and_not_here(place: Path) -> None:
    chosen, lines = choose(place, 8, available=4 * 2**20)
    assert chosen == 8 and "found no size that fits" in lines[-1], lines


def test_a_request_can_be_sent(place: Path) -> None:
    tiny = recipe(place)
    request = ProbeRequest(tiny, [1, 2], 8, GIB, place, [])
    assert pickle.loads(pickle.dumps(request)) == request


def test_sizes_that_are_settled_are_not_tried_again() -> None:
    known = ProbeResults({2: 200}, {2: 1.0}, {8: 500})
    assert known.next_sizes([1, 2, 4, 8], 2, 500) == [4]
    assert known.next_sizes([1, 2, 4, 8], 2, 1000) == [4, 8]
    assert known.next_sizes([1, 2, 4, 8], 8, 500) == []  # 2 fits, which is enough to go on with


def test_a_setting_without_effect_is_refused(place: Path) -> None:
    with pytest.raises(UserError, match=r"^auto_probe: has no effect with device_train_microba"):
        recipe(place, "device_train_microbatch_size=2")

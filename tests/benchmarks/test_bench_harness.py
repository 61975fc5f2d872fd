"""The harness of benchmarks: who runs when, what is timed, whose ratio it is, what is written."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Measured, interleaved, shown, speeds, table, timed

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_says_which_machine_and_libraries_it_was(tmp_path: Path) -> None:
    rows = [{"contender": "ours", "of bare": harness.over_rounds([1.31, 1.0 / 3, 1.2]), "GiB": 0.5}]
    path = harness.write("training", rows, {"rounds": 3}, folder=tmp_path / "results")
    found = json.loads(path.read_text())
    assert found["rows"] == [{"contender": "ours", "of bare": [0.3333, 1.2, 1.31], "GiB": 0.5}]
    assert found["settings"] == {"rounds": 3} and found["libraries"]["torch"] == torch.__version__
    here = found["machine"]
    assert here["cores"] == len(os.sched_getaffinity(0))
    facts = Path("/proc/cpuinfo").read_text().split()
    assert all(name in facts for name in here["instruction_sets"])
    assert ("avx512f" in here["instruction_sets"]) == ("avx512f" in facts)
    assert os.uname().nodename not in path.read_text() and len(path.read_text().splitlines()) < 50
    # the same machine's next result takes its place
    assert harness.write("training", [], {}, folder=path.parent) == path
    assert len([*path.parent.iterdir()]) == 1


def test_ranges_are_over_machines_and_a_row_is_known_by_its_texts(tmp_path: Path) -> None:
    for name, ratio, other in (("a", [1.0, 1.72, 1.8], 0.9), ("b", [0.5, 1.04, 9.0], None)):
        rows = [{"contender": "ours", "precision": "fp32", "tok/s": 7.0, "of bare": ratio}]
        rows += [{"contender": "HF", "precision": "fp32", "of bare": other}] * (other is not None)
        content = json.dumps({"bench": "training", "rows": rows})
        (tmp_path / f"training-{name}.json").write_text(content)
    assert [*harness.ranges(tmp_path)] == [
        "training, ours, fp32: of bare 1.04 to 1.72 (2 machines)",
        "training, HF, fp32: of bare 0.90 (1 machine)",
    ]


def test_every_result_that_is_here_was_written_whole() -> None:
    for path in harness.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert path.name.startswith(found["bench"]) and found["rows"], path
        machine = found["machine"]
        assert machine["processor"] and machine["cores"] > 0 and machine["instruction_sets"], path
        assert found["date"] >= "2026" and "torch" in found["libraries"], path


def test_every_bench_is_run_by_a_make_target_or_imported_by_another() -> None:
    texts = {path: path.read_text() for path in ROOT.glob("benchmarks/**/*.py")}
    for path in (ROOT / "Makefile", *ROOT.glob("scripts/*.py")):
        texts[path] = path.read_text()
    for path in ROOT.glob("benchmarks/**/*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        package, _, name = module.rpartition(".")
        imports = (f"from {module} ", f"from {package} import {name}")
        plugin = f'"{path.name}"'  # named as a file, in a recipe
        ways = (f"-m {module}", f'"{module}"', f'"{module}:', plugin, *imports)
        others = [text for other, text in texts.items() if other != path]
        entered = any(way in text for way in ways for text in others)
        assert entered or name == "__init__", module


PRINTS = """
import sys, time
print("getting ready, 1,234 parameters")
for step in range(1, 4):
    time.sleep(0.05)
    print(f"{step}/3  loss 1.0", flush=True)
sys.exit(int(sys.argv[1]))
"""


def measured(rate: float, cpu: float = 1.0) -> Measured:
    return Measured(rate, cpu, first_step=2.0, memory=3 << 29, parameters=None)


def test_contenders_alternate_in_every_round() -> None:
    ran: list[str] = []

    def run(name: str) -> int:
        ran.append(name)
        return len(ran)

    found = interleaved(
        lambda turn: {name: partial(run, f"{name}{turn}") for name in ("a", "b")}, rounds=2
    )
    assert ran == ["a0", "b0", "a1", "b1"] and found == {"a": [1, 3], "b": [2, 4]}


def test_ratios_are_of_each_round_and_of_a_contenders_own_yardstick() -> None:
    results = {
        "ours": [measured(30.0, 8.0), measured(10.0, 9.0), measured(40.0, 6.0)],
        "bare": [measured(10.0, 4.0), measured(20.0, 3.0), measured(20.0, 2.0)],
        "compiled": [measured(60.0), measured(5.0), measured(20.0)],
    }
    yardsticks = {"ours": "bare", "bare": "bare", "compiled": "ours"}
    rows = speeds(results, yardsticks.__getitem__, "it")
    assert [row["of it, tok/s"] for row in rows] == [[0.5, 2.0, 3.0], [1, 1, 1], [0.5, 0.5, 2.0]]
    assert rows[0]["of it, tok/CPU-s"] == [2.0, 3.0, 3.0] and rows[0]["tok/s"] == [10, 30, 40]
    lines = table(rows, shown("it"))
    assert lines[1].split() == ["ours", "30", "2.00", "8", "3.00", "2.0", "1.50"]


def test_a_contender_in_another_folder_finds_the_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import benchmarks.harness, llmfoundry; print('step 1 0.1')"
    assert len(timed([sys.executable, "-c", program], tmp_path, least=1).ends) == 1


def test_a_process_is_timed_by_the_lines_of_its_steps(tmp_path: Path) -> None:
    run = timed([sys.executable, "-c", PRINTS, "0"], tmp_path, least=3)
    assert len(run.ends) == 3 == len(run.cpu_ends) and run.ends == sorted(run.ends)
    assert run.ends[2] - run.ends[0] >= 0.1 and run.memory > 1 << 20
    assert "1,234 parameters" in run.output
    for command, least in (([sys.executable, "-c", PRINTS, "0"], 4), ([*"ab"], 1)):
        with pytest.raises((RuntimeError, FileNotFoundError)):
            timed(command, tmp_path, least=least)
    with pytest.raises(RuntimeError, match="getting ready"):
        timed([sys.executable, "-c", PRINTS, "1"], tmp_path, least=3)

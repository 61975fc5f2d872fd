"""What a bench writes: the machine as it is, and ranges over machines by their medians."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from benchmarks import record

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_says_which_machine_and_libraries_it_was(tmp_path: Path) -> None:
    rows = [{"contender": "ours", "of bare": record.over_rounds([1.31, 1.0 / 3, 1.2]), "GiB": 0.5}]
    path = record.write("training", rows, {"rounds": 3}, folder=tmp_path / "results")
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
    assert record.write("training", [], {}, folder=path.parent) == path
    assert len([*path.parent.iterdir()]) == 1


def test_ranges_are_over_machines_and_a_row_is_known_by_its_texts(tmp_path: Path) -> None:
    for name, ratio, other in (("a", [1.0, 1.72, 1.8], 0.9), ("b", [0.5, 1.04, 9.0], None)):
        rows = [{"contender": "ours", "precision": "fp32", "tok/s": 7.0, "of bare": ratio}]
        rows += [{"contender": "HF", "precision": "fp32", "of bare": other}] * (other is not None)
        content = json.dumps({"bench": "training", "rows": rows})
        (tmp_path / f"training-{name}.json").write_text(content)
    assert [*record.ranges(tmp_path)] == [
        "training, ours, fp32: of bare 1.04 to 1.72 (2 machines)",
        "training, HF, fp32: of bare 0.90 (1 machine)",
    ]


def test_every_result_that_is_here_was_written_whole() -> None:
    for path in record.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert path.name.startswith(found["bench"]) and found["rows"], path
        machine = found["machine"]
        assert machine["processor"] and machine["cores"] > 0 and machine["instruction_sets"], path
        assert found["date"] >= "2026" and "torch" in found["libraries"], path


def test_every_bench_is_entered_by_a_make_target_or_by_another() -> None:
    texts = {path: path.read_text() for path in ROOT.glob("benchmarks/**/*.py")}
    for path in (ROOT / "Makefile", *ROOT.glob("scripts/*.py")):
        texts[path] = path.read_text()
    for path in ROOT.glob("benchmarks/*/**/*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        package, _, name = module.rpartition(".")
        imports = (f"from {module} ", f"from {package} import {name}")
        plugin = f'"{path.name}"'  # named as a file, in a recipe
        ways = (f"-m {module}", f'"{module}"', f'"{module}:', plugin, *imports)
        others = [text for other, text in texts.items() if other != path]
        entered = any(way in text for way in ways for text in others)
        assert entered or name == "__init__", module

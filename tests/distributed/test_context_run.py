"""Whole runs whose processes share rows: started, killed, and gone on with on other degrees."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import ENV, command, losses, run, write_recipe

STEPS = (
    *("max_duration=8ba", "schedule.t_warmup=1ba", "schedule.t_max=8ba", "save_interval=2ba"),
    *("eval_interval=3ba", "device_train_microbatch_size=2"),
    "max_seq_len=61",  # which no number of processes divides
    "model.attn_config={alibi: true, rope: false}",
)
FOUR = ("parallel.context_parallel_degree=4", "parallel.context_parallel_method=all_gather")
TWO = ("parallel.context_parallel_degree=2", "parallel.data_parallel_shard_degree=2")
EXACT = 1e-6


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its run on one process."""
    folder = tmp_path_factory.mktemp("context-run")
    write_recipe(folder)
    run("train.py", "tiny.yaml", "run_name=alone", *STEPS, cwd=folder)
    return folder


def rows(run_folder: Path, key: str) -> dict[int, Any]:
    """A metric by batch."""
    every = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return {row["time/batch"]: row[key] for row in every if key in row}


def same_as_alone(folder: Path, name: str) -> None:
    """Losses, norms, evaluations and counts of tokens are those of one process."""
    ours, theirs = folder / "runs" / name, folder / "runs" / "alone"
    assert losses(ours).keys() == set(range(1, 9))
    assert losses(ours) == pytest.approx(losses(theirs), rel=EXACT)
    for key in ("metrics/eval/LanguageCrossEntropy", "metrics/eval/bits_per_byte"):
        assert rows(ours, key).keys() == {3, 6, 8}
        assert rows(ours, key) == pytest.approx(rows(theirs, key), rel=EXACT)
    assert rows(ours, "l2_norm/grad/global") == pytest.approx(
        rows(theirs, "l2_norm/grad/global"), rel=1e-5
    )
    assert rows(ours, "time/token") == rows(theirs, "time/token")


def test_a_run_resumes_with_other_degrees_and_is_that_of_one_process(alone: Path) -> None:
    named = ("tiny.yaml", "run_name=moved", *STEPS)
    gathered = ("parallel.context_parallel_degree=2", FOUR[1])
    run("train.py", *named, *gathered, "max_duration=3ba", cwd=alone, processes=2)
    rates = (alone / "runs" / "moved", "throughput/{}tokens_per_sec")
    total, device = (rows(rates[0], rates[1].format(part)) for part in ("", "device/"))
    assert total == pytest.approx({batch: 2 * rate for batch, rate in device.items()})
    run("train.py", *named, *TWO, "max_duration=6ba", cwd=alone, processes=4)
    run("train.py", *named, cwd=alone)
    same_as_alone(alone, "moved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "then", "processes"), [(FOUR, TWO, 4), (TWO, FOUR, 4), (TWO, (TWO[0],), 2)]
)
def test_after_a_kill_another_degree_repeats_what_was_lost(
    alone: Path, killed: tuple[str, ...], then: tuple[str, ...], processes: int
) -> None:
    name = f"killed-{'-'.join(killed + then)}".replace("=", "").replace(".", "")[:60]
    name += str(processes)
    named = ("tiny.yaml", f"run_name={name}", *STEPS)
    agent = subprocess.Popen(
        command("train.py", *named, *killed, processes=4),
        cwd=alone,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = alone / "runs" / name
    deadline = time.monotonic() + 200
    while not (folder / "checkpoints" / "ba0000002" / "COMMIT").exists():
        assert agent.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    psutil.Process(agent.pid).children()[1].kill()
    agent.communicate(timeout=200)
    done = run("train.py", *named, *then, cwd=alone, processes=processes)
    assert "resuming from" in done.stdout
    same_as_alone(alone, name)


@pytest.mark.slow
def test_generated_text_and_the_gauntlet_are_those_of_one_process(alone: Path) -> None:
    """Processes that share rows in training have whole prompts, each its own, in evaluation."""
    words = (
        *("max_duration=2ba", "eval=generated_easy", "eval.icl_rows=4", "eval.validation_rows=3"),
        "data.validation_fraction=0.6",
        *("callbacks.generate.prompts=[line 1]", "callbacks.generate.interval=1ba"),
        *("callbacks.generate.max_new_tokens=5", "max_seq_len=256", "save_interval=0ba"),
    )
    found = {}
    for name, degrees, processes in (("asked", (), 1), ("asked-4", FOUR, 4)):
        named = ("tiny.yaml", f"run_name={name}", *STEPS, *words, *degrees)
        run("train.py", *named, cwd=alone, processes=processes)
        folder = alone / "runs" / name
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        measured = {
            key: value for line in lines for key, value in line.items() if "metrics/" in key
        }
        texts = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        found[name] = measured, [text["text"] for text in texts]
    assert len(found["asked"][0]) > 5
    assert found["asked-4"][1] == found["asked"][1]
    assert found["asked-4"][0] == pytest.approx(found["asked"][0], rel=1e-5)

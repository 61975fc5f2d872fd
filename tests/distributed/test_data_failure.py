"""A shard that one process cannot read ends the run on all of them, and nothing is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.shards import write_tokens
from tests.tiny import losses, run, write_recipe
from tests.warm_scripts import run_script

SHARDS = (
    "data={name: shards, local: shards, paths: [], shuffle: false}",
    "eval=off",
    "max_duration=60ba",
    "save_interval=2ba",
)


def test_all_processes_stop_at_the_step_that_lacks_its_shard(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    write_tokens(tmp_path / "shards", "web", documents=60)
    index = json.loads((tmp_path / "shards/index.json").read_text())
    # Rows of a step lie side by side: the 7th step's are in the shard that is taken away.
    per_step, ends = 4 * 64, 0
    for shard in index["shards"]:
        ends += shard["n_tokens"]
        if ends > 6 * per_step + 8:
            break
    (tmp_path / "shards" / shard["file"]).rename(tmp_path / "away")
    started = time.monotonic()
    failed = run_script("train.py", ["tiny.yaml", *SHARDS], cwd=tmp_path, processes=2)
    assert failed.returncode == 1
    assert time.monotonic() - started < 200  # the group's own timeout is ten minutes
    where = f"{shard['file']}: cannot be read"
    lines = [line for line in failed.stderr.splitlines() if where in line]
    assert len(lines) >= 2 and any("on rank" in line for line in lines), failed.stderr[-2000:]
    done = losses(tmp_path / "runs/tiny")
    (tmp_path / "away").rename(tmp_path / "shards" / shard["file"])
    run("train.py", "tiny.yaml", *SHARDS, "max_duration=10ba", cwd=tmp_path, processes=2)
    whole = losses(tmp_path / "runs/tiny")
    assert max(done) <= 7 and {n: whole[n] for n in done} == done and max(whole) == 10

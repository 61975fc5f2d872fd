"""docs/evaluate.md: its own tasks, its file and its rows, run as they are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from llmfoundry.gauntlet.answer_metrics import wilson
from llmfoundry.gauntlet.task_types import TASK_TYPES
from llmfoundry.models.decoder import Decoder, Root
from tests.gauntlet.test_gauntlet import read, subject
from tests.models.test_decoder import make_config
from tests.tiny import ROOT

PAGE = (ROOT / "docs" / "evaluate.md").read_text()
FILE = re.findall(r"```yaml\n(icl_tasks:\n  - \{.*?)```", PAGE, re.DOTALL)
ROWS = dict(re.findall(r"^\| `(\w+)` \| `(\{.*?\})` \|", PAGE, re.MULTILINE))


def written(folder: Path) -> Path:
    """The file and the rows of the page."""
    (shown,) = FILE
    for task in yaml.safe_load(shown)["icl_tasks"]:
        (folder / task["dataset_uri"]).write_text(ROWS[task["icl_task_type"]] + "\n")
    (folder / "gauntlet.yaml").write_text(shown)
    return folder / "gauntlet.yaml"


def test_every_task_type_is_shown_and_runs(tmp_path: Path) -> None:
    assert {*ROWS} == {*TASK_TYPES}
    model = Decoder(make_config(vocab_size=257, max_seq_len=128)).eval()
    model.init_weights(3)
    result, answers = read(written(tmp_path)).run(subject(Root(model)))
    assert [(task.label, task.n, task.failure) for task in result.tasks] == [
        (label, 1, None) for label in ("cats", "sums", "jugs", "twos")
    ]
    assert result.problems == [] and result.categories["choosing"] is not None
    rows = [json.loads(line) for part in answers for line in part.lines()]
    assert len(rows) == 1 + 2 + 2 + 1
    assert {task.interval for task in result.tasks} <= {wilson(0, 1), wilson(1, 1)}


@pytest.mark.slow
def test_the_command_runs_with_the_files_shown(tmp_path: Path) -> None:
    from tests.tiny import run, write_recipe

    run("train.py", write_recipe(tmp_path), "max_duration=1ba", "run_name=quickstart", cwd=tmp_path)
    (tmp_path / "my").mkdir()
    written(tmp_path / "my")
    (line,) = re.findall(r"^python scripts/eval.py (.* eval.gauntlet=my/.*)$", PAGE, re.MULTILINE)
    done = run("eval.py", *line.split(), cwd=tmp_path)
    for label in ("cats", "sums", "jugs", "twos", "choosing"):
        assert re.search(rf"^ *{label} .*\[", done.stdout, re.MULTILINE), done.stdout

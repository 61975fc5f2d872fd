"""Plugins: what a user's file adds is a choice like ours, and no untrusted file is ever run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from llmfoundry.cli.script import run
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.engines import local_engine
from llmfoundry.data.preparation.readers import is_readable
from llmfoundry.errors import UserError
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.memory import estimate
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.plugin_tables import tables_as_before
from tests.tiny import ROOT, write_recipe

PLUGIN = """
import csv
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from llmfoundry.data.preparation.readers import FILE_TYPES, FileType
from llmfoundry.gauntlet.questions import TaskRow
from llmfoundry.gauntlet.task_types import TASK_TYPES
from llmfoundry.recipe.attention import NORMS, NormType
from llmfoundry.recipe.logger import CALLBACKS, LOGGERS, CallbackType, LoggerType
from llmfoundry.recipe.optimizer import OPTIMIZERS, OptimizerType
from llmfoundry.recipe.schedule import SCHEDULES, ScheduleType
from llmfoundry.loggers.background_queue import LogTarget
from llmfoundry.train.trainer import Callback

Path("imported").touch()


class ScaleNorm(nn.Module):
    def __init__(self, width, *, eps, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x):
        return self.weight * nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class Count(Callback):
    def __init__(self, job, *, every, file):
        self.every, self.file = every, file

    def on_step(self, trainer):
        if trainer.batch % self.every == 0:
            with open(self.file, "a") as file:
                print(trainer.batch, file=file)


class Table:
    max_points = 1000

    def __init__(self, path):
        self.path = path

    def steps(self, name):
        return ()

    def send(self, points):
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows([p.batch, p.name, p.value] for p in points)

    def samples(self, samples): ...
    def upload(self, path): ...
    def end(self, status): ...


def table(config, folder, *, name):
    return LogTarget("a table", lambda facts, say: Table(folder / name))


def triangle(config, clock, since):
    return 1 - abs(2 * since / clock.total - 1) * config.kwargs["depth"]


def tsv(source, text_column):
    for number, line in enumerate(source.lines(), start=1):
        yield number, line.decode().split("\\t")[1]


def last_word(row, place):
    text, _, word = row["text"].rpartition(" ")
    return TaskRow((text,), (word,), 0, place)


OPTIMIZERS["sgd"] = OptimizerType(
    torch.optim.SGD, keys={"momentum": 0.5, "nesterov": False}, moments=1, meaning="Plain and old."
)
SCHEDULES["triangle"] = ScheduleType(triangle, keys={"depth": 0.5})
CALLBACKS["count"] = CallbackType(Count, keys={"every": 2, "file": "counted"})
LOGGERS["table"] = LoggerType(table, keys={"name": "table.csv"})
NORMS["scale_norm"] = NormType(ScaleNorm)
FILE_TYPES[".tsv"] = FileType(tsv)
TASK_TYPES["last_word"] = replace(
    TASK_TYPES["language_modeling"], fields=("text",), read=last_word
)
"""
GAUNTLET = """
icl_tasks:
  - {label: words, dataset_uri: words.jsonl, icl_task_type: last_word, num_fewshot: [1]}
"""
CHOSEN = (
    "plugins=[my_file.py]",
    "optimizer.name=sgd",
    "optimizer.kwargs.nesterov=true",
    "schedule={name: triangle, t_warmup: 0ba, kwargs: {depth: 0.25}}",
    "callbacks.plugins.count={every: 3}",
    "logger.plugins.table={}",
    "model.norm_type=scale_norm",
)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """As in a new process: what plugins have added is gone."""
    with tables_as_before() as undo:
        yield undo


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml, my_file.py and a corpus that only the plugin can read."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("plugins")
        write_recipe(folder)
        for file in (folder / "corpus").iterdir():
            lines = file.read_text().splitlines()
            file.with_suffix(".tsv").write_text("".join(f"{len(x)}\t{x}\n" for x in lines))
            file.unlink()
        (folder / "my_file.py").write_text(PLUGIN)
        (folder / "words.yaml").write_text(GAUNTLET)
        texts = [json.dumps({"text": f"this is number {n}"}) for n in range(9)]
        (folder / "words.jsonl").write_text("\n".join(texts))
        patch.chdir(folder)
        yield folder


def call(recipe: type, target: str, *argv: str) -> int:
    """The status with which a script ends."""
    try:
        run(recipe, f"llmfoundry.cli.commands.{target}", argv)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def train(*argv: str) -> int:
    return call(TrainRecipe, "train:train", *argv)


def test_a_run_uses_one_of_each_and_resumes_by_its_own_recipe(
    place: Path, forget: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run_name=all", "max_duration=8ba", "eval=off", "eval.gauntlet=words.yaml")
    assert train("tiny.yaml", *CHOSEN, *words) == 0, capsys.readouterr().err
    found = [json.loads(line) for line in Path("runs/all/metrics.jsonl").read_text().splitlines()]
    rates = [row["lr-sgd/group0"] for row in found if "lr-sgd/group0" in row]
    depths = [1 - abs(2 * b / 8 - 1) / 4 for b in range(1, 9)]
    assert rates == pytest.approx([3e-3 * factor for factor in depths])
    assert Path("counted").read_text().split() == ["3", "6"]
    sent = Path("runs/all/table.csv").read_text()
    assert all(f"{r['time/batch']},lr-sgd/group0,{r['lr-sgd/group0']}" in sent for r in found[:1])
    (asked,) = json.loads(Path("runs/all/eval/ba0000008.json").read_text())["tasks"]
    assert (asked["label"], asked["n"]) == ("words", 9)
    newest = sorted(Path("runs/all/checkpoints").iterdir())[-1]
    assert yaml.safe_load((newest / "recipe.yaml").read_text())["plugins"] == ["my_file.py"]
    forget()
    assert train("runs/all/recipe.yaml", "max_duration=9ba") == 0, capsys.readouterr().err
    assert Path("counted").read_text().split() == ["3", "6", "9"]
    forget()
    Path("my_file.py").rename("elsewhere.py")
    capsys.readouterr()
    assert train("runs/all/recipe.yaml", "max_duration=10ba") == 2
    assert capsys.readouterr().err == "plugins: nothing at my_file.py\n"
    Path("elsewhere.py").rename("my_file.py")


def test_the_readmes_file_is_a_plugin(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "llmfoundry" / "README.md").read_text()
    (file,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (line,) = re.findall(r"```sh\npython scripts/train.py (.*)\n```", readme)
    Path("readme").mkdir()
    Path("readme/my_file.py").write_text(file)
    recipe, *words = line.replace("my_file.py", "readme/my_file.py").split()
    assert train(recipe, *words, "--cfg", "job") == 0
    words += ["run_name=readme", "max_duration=2ba", "callbacks.plugins.notify.every=1", "eval=off"]
    capsys.readouterr()
    assert train("tiny.yaml", *words, "plugins=[readme/my_file.py, my_file.py]") == 0
    reported = capsys.readouterr().out
    assert "1 of 2 steps" in reported and "2 of 2 steps" in reported
    assert "scripts/eval.py runs/readme plugins='[readme/my_file.py,my_file.py]'" in reported
    assert "lr-nadam/group0" in Path("runs/readme/metrics.jsonl").read_text()


def test_a_sweep_and_a_dry_run_know_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("tiny.yaml", *CHOSEN, "--dry-run", "-m", "optimizer.lr=1e-3,2e-3") == 0
    assert "2 runs were checked" in capsys.readouterr().out
    assert train("tiny.yaml", *CHOSEN, "run_name=dry", "--dry-run") == 0
    assert not Path("runs/dry").exists()


def test_the_estimate_knows_what_a_plugins_optimizer_keeps(place: Path) -> None:
    recipe = checked(TrainRecipe, "tiny.yaml", [*CHOSEN])
    recipe = recipe.resolve()
    need = estimate(with_guessed_vocabulary(recipe), 1)
    assert need.weights == 4 * (1 + 1 + 1) * need.parameters  # weight, gradient, SGD's momentum


def test_processes_that_prepare_have_it_and_a_changed_reader_prepares_anew(
    place: Path, forget: Callable[[], None]
) -> None:
    reader = """
from llmfoundry.data.preparation.readers import FILE_TYPES, FileType

FILE_TYPES[".tsv"] = FileType(lambda source, column: enumerate(source.whole().decode().split()))
"""
    Path("reader.py").write_text(reader)
    recipe = checked(TrainRecipe, "tiny.yaml", ["plugins=[reader.py]"])
    with local_engine(2) as work:
        found = list(work(partial(is_readable, text_column="text"), ["a.tsv", "b.tsv"]))
    assert found == [True, True]
    before = Corpus(recipe.data).fingerprint()
    forget()
    Path("reader.py").write_text(reader.replace("split", "splitlines"))
    checked(TrainRecipe, "tiny.yaml", ["plugins=[reader.py]"])
    assert Corpus(recipe.data).fingerprint() != before


def test_help_lists_it_and_a_typo_names_it(
    place: Path, forget: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--help", "optimizer", "plugins=[my_file.py]") == 0
    reported = capsys.readouterr().out
    assert "sgd: Plain and old.\n" in reported and "muon, sgd\n" in reported
    forget()
    assert train("tiny.yaml", *CHOSEN, "optimizer.name=sdg", "callbacks.plugins.count.evry=1") == 2
    wrong = capsys.readouterr().err.splitlines()
    assert wrong[0].startswith("optimizer.name: 'sdg' is not a choice; did you mean 'sgd'?")
    assert wrong[1:] == ["unknown key 'callbacks.plugins.count.evry'; did you mean 'every'?"]


LINES = {
    "1 / 0": "plugins: wrong.py:1: ZeroDivisionError: division by zero",
    "def f(:": "plugins: wrong.py:1: SyntaxError: invalid syntax (wrong.py, line 1)",
    "raise SystemExit(0)": "plugins: wrong.py:1: SystemExit: 0",
    "from llmfoundry.recipe.schedule import SCHEDULES\nSCHEDULES['x'] = print": "plugins: wrong.py:"
    "2: schedule.name: 'x' is of type builtin_function_or_method; entries of this table are of type"
    " ScheduleType",
    "from llmfoundry.recipe.optimizer import OPTIMIZERS as O, OptimizerType\n"
    "O['adamw'] = OptimizerType(print)": "plugins: wrong.py:2: optimizer.name: 'adamw' is there"
    " already, from llmfoundry itself; write another name in wrong.py",
    "from llmfoundry.recipe.optimizer import OPTIMIZERS as O, OptimizerType\n\n"
    "O['sgd'] = OptimizerType(print)": "plugins: wrong.py:3: optimizer.name: 'sgd' is there"
    " already, from my_file.py; write another name in wrong.py",
}


@pytest.mark.parametrize("text", LINES)
def test_a_plugin_that_fails_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("wrong.py").write_text(text)
    assert train("tiny.yaml", "plugins=[my_file.py, wrong.py]") == 2
    assert capsys.readouterr().err == LINES[text] + "\n"


def test_a_name_that_is_neither_file_nor_module_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("tiny.yaml", "plugins=[my_fil.py]") == train("tiny.yaml", "plugins=[my_file]") == 2
    assert capsys.readouterr().err.splitlines() == [
        "plugins: nothing at my_fil.py; did you mean my_file.py?",
        "plugins: no module 'my_file' is installed; a file is written my_file.py",
    ]


def test_an_untrusted_run_imports_nothing(
    place: Path, forget: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("copied").mkdir()
    shutil.copy("my_file.py", "copied/evil.py")
    words = ("model.norm_type=scale_norm", "save_folder=copied", "max_duration=1ba", "eval=off")
    assert train("tiny.yaml", "plugins=[copied/evil.py]", *words) == 0
    forget()
    Path("imported").unlink()
    capsys.readouterr()
    assert call(EvalRecipe, "evaluate:evaluate", "copied", "eval.validation_rows=2") == 2
    reported = capsys.readouterr().err
    assert "model.norm_type: 'scale_norm' is not a choice (choices: layernorm, rmsnorm," in reported
    assert "names, write plugins=[copied/evil.py]" in reported
    assert train("copied/recipe.yaml", "max_duration=2ba") == 2
    reported = capsys.readouterr().err
    assert (
        reported.startswith("plugins: copied/evil.py lies in a run's folder")
        and reported.count("\n") == 1
    )
    assert not Path("imported").exists()
    said = "plugins=[my_file.py]"
    assert call(EvalRecipe, "evaluate:evaluate", "copied", "eval.validation_rows=2", said) == 0


def test_settings_have_the_type_of_their_defaults(place: Path) -> None:
    with pytest.raises(UserError) as caught:
        checked(TrainRecipe, "tiny.yaml", [*CHOSEN, "callbacks.plugins.count.every=often"])
    assert caught.value.problems == (
        "callbacks.plugins.count.every: 'often' is not like its default, 2; write such a value",
    )

"""`lf.train`: the command line's losses, twice, in a thread, stopped, on ranks; `lf.data`."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

import llmfoundry as lf
from tests.tiny import losses, run
from tests.warm_scripts import on_ranks

LOGGED = ("loss/train/total", "l2_norm/grad/global", "metrics/eval/LanguageCrossEntropy")


def recipe(name: str, **values: object) -> lf.recipe:
    return lf.recipe("tiny.yaml", {"run_name": name, "max_duration": "4ba", **values})


def test_training_and_data_are_those_of_the_command_line(here: Path) -> None:
    run("train.py", "tiny.yaml", "run_name=line", "max_duration=4ba", cwd=here)
    command, program = lf.Run("runs/line"), lf.Run("runs/quickstart")
    for metric in LOGGED:
        assert program.metric(metric) == command.metric(metric) != [], metric
    assert program.status == command.status == "finished"
    assert program.metrics.to_pandas()["time/batch"].max() == program.batch == 4


def test_scores_and_texts_are_those_of_the_command_line(here: Path) -> None:
    run("eval.py", "runs/quickstart", "eval=generated_easy", "eval.icl_rows=5", cwd=here)
    (written,) = Path("runs/quickstart/eval").glob("*/results.json")
    results = json.loads(written.read_text())
    model = lf.load("runs/quickstart")
    for given in (model, "runs/quickstart", lf.Run("runs/quickstart")):
        scores = lf.evaluate(given, "generated_easy", rows=5)
        assert scores.metrics == results["metrics"]
        tasks = results["gauntlet"]["tasks"]
        assert [(s.value, list(s.interval or ()), s.n) for s in scores] == [
            (task["accuracy"], task["interval"], task["n"]) for task in tasks
        ]
    lines = written.with_name("rows.jsonl").read_text().splitlines()
    assert scores.rows == [json.loads(line) for line in lines]
    settings = {"max_new_tokens": 8, "seed": 3, "temperature": 0.7}
    words = [f"{key}={value}" for key, value in settings.items()]
    shown = run("generate.py", "runs/quickstart", "prompt=line 7", *words, cwd=here).stdout
    assert shown == model.generate("line 7", **settings) + "\n"
    ids = model.tokenizer("line 7")
    assert shown.startswith("line 7") and ids.shape == (1, 7)
    assert model.tokenizer.decode(model.generate(ids, **settings)[:, 1:]).strip() == shown.strip()


def test_batches_are_those_of_the_run(here: Path) -> None:
    seen = []

    def remember(model, batch):  # type: ignore[no-untyped-def]
        seen.append((batch.tokens.clone(), batch.labels.clone()))
        return -model.log_probs()

    wanted = recipe("batches", max_duration="3ba", device_train_microbatch_size=2)
    lf.train(wanted, loss=remember, show="nothing")
    batches = lf.data(wanted)
    assert len(batches) == 3 and len(seen) == 6
    for step, batch in enumerate(batches):
        for n, found in enumerate((batch.tokens, batch.labels)):
            parts = [seen[2 * step][n], seen[2 * step + 1][n]]
            assert torch.equal(torch.cat(parts), found)
    assert torch.equal(batches[-1].tokens, batch.tokens)


def test_a_built_model_is_what_a_run_begins_with(here: Path) -> None:
    begun = lf.build(recipe("begun"))
    lf.train(recipe("begun", **{"max_duration": "1ba", "optimizer.lr": 1e-30}), show="nothing")
    trained = lf.load("runs/begun").state_dict()
    for name, value in begun.state_dict().items():
        assert torch.allclose(value, trained[name], rtol=0, atol=1e-28), name


def test_two_trainings_one_in_a_thread_leave_the_process_as_it_was(here: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    runs: list[lf.Run] = [lf.train(recipe("first"), show="nothing")]
    thread = threading.Thread(
        target=lambda: runs.append(lf.train(recipe("second", deterministic=True), show="nothing"))
    )
    thread.start()
    thread.join()
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert losses(runs[0].folder) == losses(runs[1].folder) == losses(Path("runs/quickstart"))


class Interrupt(lf.Callback):
    """Presses Ctrl-C in the second step."""

    def on_step(self, trainer):  # type: ignore[no-untyped-def]
        if trainer.batch == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_is_returned_and_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    half = lf.train(recipe("half"), callbacks=[Interrupt()], show="nothing")
    assert (half.stopped, half.status, half.batch) == ("SIGINT", "killed", 2)
    monkeypatch.chdir(tmp_path)
    assert half.model().tokenizer("line").shape == (1, 5)
    monkeypatch.chdir(here)
    whole = lf.train(recipe("half"), show="nothing")
    assert whole.stopped == "" and losses(whole.folder) == losses(Path("runs/quickstart"))


def test_one_training_at_a_time(here: Path) -> None:
    problems = []

    class Again(lf.Callback):
        def on_start(self, trainer):  # type: ignore[no-untyped-def]
            with pytest.raises(lf.UserError) as error:
                lf.train(recipe("inner"), show="nothing")
            problems.extend(error.value.problems)

    lf.train(recipe("outer", max_duration="1ba"), callbacks=[Again()], show="nothing")
    assert problems == ["train: this process trains already; wait for its end"]


def train_on_ranks(rank: int, folder: str) -> None:
    os.chdir(folder)
    random.seed(rank)
    for name in ("ranks", "again"):
        settings = {"device_train_microbatch_size": 1, "parallel.dist_timeout": 60}
        own = None if name == "ranks" else lambda model, batch: -model.log_probs()
        done = lf.train(recipe(name, **settings), loss=own, show="nothing")
        assert done.status == "finished"
    scores = lf.evaluate("runs/again", "generated_easy", rows=3)
    assert len(scores) and not torch.distributed.is_initialized()


def test_two_trainings_and_an_evaluation_on_two_ranks(here: Path) -> None:
    on_ranks(train_on_ranks, [str(here)], 2)
    whole = losses(Path("runs/quickstart"))
    for name in ("ranks", "again"):
        assert losses(Path("runs") / name) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"parallel.nproc_per_node": 2}, "start it by torchrun --nproc-per-node 2"),
        ({"supervise.enabled": True}, "a supervisor starts scripts"),
        ({"health_check.before_run": "quick"}, "ends processes on bad machines"),
    ],
)
def test_what_needs_other_processes_is_refused(
    here: Path, values: dict[str, object], line: str
) -> None:
    with pytest.raises(lf.UserError, match=line):
        lf.train(recipe("refused", **values))
    assert not Path("runs/refused").exists()


def test_callbacks_are_objects(here: Path) -> None:
    with pytest.raises(lf.UserError, match=r"write Interrupt\(\)"):
        lf.train(recipe("refused"), callbacks=[Interrupt])  # type: ignore[list-item]
    with pytest.raises(lf.UserError, match="int is no callback"):
        lf.train(recipe("refused"), callbacks=[3])  # type: ignore[list-item]

"""The gauntlet in a run and after it, by the scripts, as a user would."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.cli.dry_run import print_plan
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ChatRecipe, EvalRecipe, GenerateRecipe, ServeRecipe
from llmfoundry.recipe.load import checked
from tests.tiny import losses, run, write_recipe

TASKS = [
    {
        "label": "times",
        "icl_task_type": "multiple_choice",
        "num_fewshot": [1],
        "dataset_uri": "times.jsonl",
    },
    {
        "label": "lines",
        "icl_task_type": "language_modeling",
        "num_fewshot": [0],
        "dataset_uri": "lines.jsonl",
    },
    {
        "label": "say",
        "icl_task_type": "generation_task_with_answers",
        "num_fewshot": [0],
        "dataset_uri": "say.jsonl",
        "max_new_tokens": 4,
    },
]
ROWS = {
    "times": [
        {"query": f"{i} times 3 is", "choices": [str(3 * i), str(2 * i), str(i)], "gold": 0}
        for i in range(1, 41)
    ],
    "lines": [{"context": f"line {i} of", "continuation": "document"} for i in range(30)],
    "say": [{"context": f"say {i}:", "answer": str(i)} for i in range(6)],
}
BENCHMARKS = [{"name": t["label"], "num_fewshot": t["num_fewshot"][0]} for t in TASKS]  # type: ignore[index]
GAUNTLET = {
    "icl_tasks": TASKS,
    "eval_gauntlet": {"categories": [{"name": "all", "benchmarks": BENCHMARKS}]},
}
ICL = ("eval.gauntlet=gauntlet.yaml", "eval_interval=256tok", "eval.validation_rows=1")
SHORT = "max_duration=4ba"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gauntlet was asked every 256 tokens, which is each step, and its exports."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_recipe(folder)
    (folder / "gauntlet.yaml").write_text(yaml.safe_dump(GAUNTLET))
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("train.py", "tiny.yaml", "run_name=asked", *ICL, SHORT, cwd=folder)
    run("convert.py", "checkpoint=runs/asked", "to=hf", "output=hf", cwd=folder)
    run("convert.py", "checkpoint=hf", "from=hf", "output=runs/back", cwd=folder)
    shutil.copytree(folder / "hf", folder / "others")  # as if it were not ours
    config = json.loads((folder / "others/config.json").read_text())
    assert config.pop("llmfoundry_document_start") == [256]
    (folder / "others/config.json").write_text(json.dumps(config))
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def assert_close(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """The same rows, choices and verdicts; log-probabilities to 1e-4."""
    for a, b in zip(ours, others, strict=True):
        for name in ("logprob", "best_logprob"):
            assert a[name] == pytest.approx(b[name], abs=1e-4)
        assert {**a, "logprob": 0, "best_logprob": 0} == {**b, "logprob": 0, "best_logprob": 0}


@pytest.mark.slow
def test_a_run_is_asked_in_tokens_and_trains_as_without(folder: Path) -> None:
    metrics = [
        json.loads(line) for line in (folder / "runs/asked/metrics.jsonl").read_text().splitlines()
    ]
    asked = [m["time/batch"] for m in metrics if "icl/metrics/eval_gauntlet/all" in m]
    assert asked == list(range(1, 5))
    assert "icl/metrics/eval_gauntlet/all" in (folder / "runs/asked/report.html").read_text()
    run("train.py", "tiny.yaml", "run_name=quiet", SHORT, cwd=folder)
    assert losses(folder / "runs/asked") == losses(folder / "runs/quiet"), "to the last bit"


def test_a_run_and_its_export_have_the_same_rows_side_by_side(folder: Path) -> None:
    models = "models=[runs/asked,hf,runs/back,others]"
    arguments = (models, "eval.gauntlet=gauntlet.yaml", "output=both", "precision=fp32")
    done = run("eval.py", *arguments, cwd=folder)
    assert "side by side" in done.stdout
    pairs = json.loads((folder / "both/differences.json").read_text())
    assert [len(pair["tasks"]) for pair in pairs] == [3, 3, 3] and not pairs[0]["notes"]
    assert [task["n"] for task in pairs[0]["tasks"]] == [40, 30, 6]
    assert all(task["value"] == 0 for task in pairs[1]["tasks"]), "the same model"
    assert "hf minus asked ba0000004, on the rows that both answered:" in done.stdout
    first, second = lines(folder / "both/1"), lines(folder / "both/2")
    assert len(first) == 40 * 3 + 30 + 6
    page = (folder / "both/gauntlet.html").read_text()
    assert "asked ba0000004" in page and "</b> hf <" in page
    asked = [json.loads((folder / f"both/{n}/results.json").read_text()) for n in (1, 2, 3, 4)]
    ways = ["native prompts, <|endoftext|> before each text"] * 3
    assert [result["gauntlet"]["asked"] for result in asked] == [
        *ways,
        "harness prompts, nothing before each text",
    ]
    assert done.stdout.count(f"asked: {ways[0]}") == 3 and "Prompt format" in page
    assert "comparable" not in page, "the same texts"
    assert 'href="../runs/asked/report.html"' in page and 'href="2/gauntlet.html"' in page
    assert_close(first, lines(folder / "both/3"))  # exported, and imported again
    differing = zip(first, lines(folder / "both/4"), strict=True)
    assert max(abs(a["logprob"] - b["logprob"]) for a, b in differing) > 0.01
    run("eval.py", "checkpoint=runs/asked", "device_eval_batch_size=1", "output=one", cwd=folder)
    single = lines(folder / "one")
    run("eval.py", "checkpoint=runs/asked", "output=two", cwd=folder, processes=2)
    ranks = lines(folder / "two")
    for others in (second, single, ranks):
        assert_close(first, others)


def test_results_name_what_was_asked_and_what_it_took(folder: Path) -> None:
    few = ("eval.gauntlet=gauntlet.yaml", "eval.icl_rows=5", "output=few")
    run("eval.py", "checkpoint=runs/asked", *few, cwd=folder)
    results = json.loads((folder / "few/results.json").read_text())["gauntlet"]
    assert [(task["n"], task["rows_total"]) for task in results["tasks"]] == [
        (5, 40), (5, 30), (5, 6),
    ]  # fmt: skip
    assert all(task["rows_hash"] and task["mode"] == "native" for task in results["tasks"])
    assert results["cost"]["tokens_computed"] > 0 and results["cost"]["seconds"] > 0


def test_a_dry_run_makes_the_questions_of_models_here_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    words = ["models=[runs/asked, others]", "eval.gauntlet=gauntlet.yaml"]
    print_plan("evaluate", checked(EvalRecipe, None, words))
    out = " ".join(capsys.readouterr().out.split())
    assert "models on this machine and their prompts not checked held-out text" in out
    with pytest.raises(UserError, match="rows of reverse are conversations, and the model has no"):
        print_plan("evaluate", checked(EvalRecipe, None, [words[0], "eval=instructions"]))
    for command, recipe in (
        ("chat", checked(ChatRecipe, None, ["checkpoint=runs/asked"])),
        ("generate", checked(GenerateRecipe, None, ["checkpoint=runs/asked", "message=hello"])),
        (
            "serve",
            checked(ServeRecipe, None, ["checkpoint=runs/asked", "chat_template=none.jinja"]),
        ),
    ):
        with pytest.raises(UserError, match="chat_template: "):
            print_plan(command, recipe)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_budget_chooses_the_rows_once_for_a_run(folder: Path) -> None:
    name, tight = "run_name=tight", "eval.icl_max_fraction=0.0001"
    done = run("train.py", "tiny.yaml", name, *ICL, tight, "max_duration=6ba", cwd=folder)
    assert "eval.icl_max_fraction: 0.0001: each evaluation asks" in done.stdout
    share = json.loads((folder / "runs/tight/icl_share.json").read_text())["share"]
    assert share < 0.5
    asked = [json.loads(f.read_text()) for f in sorted((folder / "runs/tight/eval").glob("*.json"))]
    counts = [[task["n"] for task in result["tasks"]] for result in asked]
    assert len(counts) == 6 and counts[0][0] < 40 and all(c == counts[0] for c in counts)
    done = run("train.py", "tiny.yaml", name, *ICL, tight, "max_duration=8ba", cwd=folder)
    assert "each evaluation asks" not in done.stdout, "decided before"
    last = json.loads((folder / "runs/tight/eval/ba0000008.json").read_text())
    assert [task["n"] for task in last["tasks"]] == counts[0]


CHAT = [
    {
        "label": "asked",
        "icl_task_type": "generation_task_with_answers",
        "num_fewshot": [0],
        "dataset_uri": "instructions://sort",
    },
    {**TASKS[0], "label": "chosen", "num_fewshot": [2]},
    {**TASKS[2], "label": "answered", "num_fewshot": [1]},
]


@pytest.mark.slow
def test_two_processes_ask_by_a_chat_template_as_one_does(folder: Path) -> None:
    """Conversations, choices and written answers: the same rows, verdicts and scores."""
    names = [{"name": t["label"], "num_fewshot": t["num_fewshot"][0]} for t in CHAT]  # type: ignore[index]
    categories = {"categories": [{"name": "all", "benchmarks": names}]}
    file = {"icl_tasks": CHAT, "eval_gauntlet": categories}
    (folder / "chat.yaml").write_text(yaml.safe_dump(file))
    words = ["checkpoint=runs/asked", "eval.gauntlet=chat.yaml", "eval.icl_chat_template=zephyr"]
    words += ["eval.icl_rows=9", "eval.icl_system_instruction=Be brief."]
    found = []
    for processes in (1, 2):
        output = f"chat-{processes}"
        run("eval.py", *words, f"output={output}", cwd=folder, processes=processes)
        found.append(json.loads((folder / output / "results.json").read_text())["gauntlet"])
    one, two = (lines(folder / f"chat-{n}") for n in (1, 2))
    assert len(one) == len(two) > 9 * 3
    for a, b in zip(one, two, strict=True):
        for name in ("logprob", "best_logprob"):
            assert a.get(name) == pytest.approx(b.get(name), abs=1e-4)
        assert {**a, "logprob": 0, "best_logprob": 0} == {**b, "logprob": 0, "best_logprob": 0}
    how = "every question by the chat template, worked examples as turns, a system message"
    assert all(how in each["asked"] for each in found)
    scores = [[(t["label"], t["n"], t["accuracy"]) for t in each["tasks"]] for each in found]
    assert scores[0] == scores[1] and len(scores[0]) == 3


@pytest.mark.slow
def test_metrics_go_to_mlflow_as_a_run_of_their_own(folder: Path) -> None:
    where = ("eval.gauntlet=gauntlet.yaml", "logger.tracking_uri=sqlite:///eval.db")
    run("eval.py", "checkpoint=runs/asked", *where, "output=logged", cwd=folder)
    results = json.loads((folder / "logged/results.json").read_text())["metrics"]
    with sqlite3.connect(folder / "eval.db") as database:
        found = dict(database.execute("select key, value from latest_metrics"))
        (name,) = database.execute("select name from runs").fetchone()
    assert name == "eval asked ba0000004"
    assert found == pytest.approx(results)


def test_a_task_of_the_harness_is_a_member_of_a_gauntlet(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval, lm-evaluation-harness, is not installed")
    harness = {
        "task": "times_there",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "times.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "times_there.yaml").write_text(yaml.safe_dump(harness))
    there = {"label": "there", "dataset_uri": f"lm_eval:{folder}/times_there.yaml"}
    here = {**TASKS[0], "label": "here", "choice_by": "sum"}
    tasks = [{**task, "num_fewshot": [0]} for task in (here, there)]
    members = [{"name": n, "num_fewshot": 0, "random_baseline": 0.25} for n in ("here", "there")]
    categories = {"categories": [{"name": "both", "benchmarks": members}]}
    file = {"icl_tasks": tasks, "eval_gauntlet": categories}
    (folder / "both.yaml").write_text(yaml.safe_dump(file))
    run("eval.py", "checkpoint=runs/asked", "eval.gauntlet=both.yaml", "output=h", cwd=folder)
    found = json.loads((folder / "h/results.json").read_text())["gauntlet"]
    ours, theirs = found["tasks"]
    assert (ours["n"], theirs["n"], theirs["mode"]) == (40, 40, "lm_eval")
    assert found["categories"]["both"] is not None
    assert 0 <= theirs["accuracy"] <= 1 and theirs["metric"].split(",")[0] == "acc"


HELDOUT = {
    "label": "next",
    "icl_task_type": "multiple_choice",
    "num_fewshot": [0],
    "dataset_uri": "heldout://continuations?rows=8&context_chars=40&piece_chars=12",
}


def test_a_model_without_a_run_is_asked_about_the_held_out_text_of_the_run_beside_it(
    folder: Path,
) -> None:
    (folder / "next.yaml").write_text(yaml.safe_dump({"icl_tasks": [HELDOUT]}))
    kept = ("run_name=kept", "eval.gauntlet=next.yaml", "max_duration=2ba")
    run("train.py", "tiny.yaml", *kept, cwd=folder)
    models = "models=[hf,runs/kept]"  # without a gauntlet: the run's
    run("eval.py", models, "output=next", "precision=fp32", cwd=folder)
    first, second = (json.loads((folder / f"next/{n}/results.json").read_text()) for n in (1, 2))
    ours, theirs = second["gauntlet"]["tasks"][0], first["gauntlet"]["tasks"][0]
    assert ours["n"] == theirs["n"] > 0 and ours["rows_hash"] == theirs["rows_hash"]


def test_every_model_is_checked_before_the_first_is_asked(folder: Path) -> None:
    shutil.copytree(folder / "others", folder / "mute")
    (folder / "mute/tokenizer.json").unlink()
    shutil.copytree(folder / "others", folder / "empty")
    (folder / "empty/model.safetensors").unlink()
    models = "models=[runs/asked,mute,empty]"
    done = run("eval.py", models, "eval.gauntlet=gauntlet.yaml", cwd=folder, status=2)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["mute", "empty"]
    assert "accuracy" not in done.stdout and not (folder / "runs/asked/eval/ba0000004").exists()


@pytest.fixture
def server() -> Iterator[str]:
    """Completes "say 5:" with " 5", as an OpenAI-compatible server does."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = body["prompt"].rstrip(":").split()[-1]
            answer = json.dumps({"choices": [{"index": 0, "text": f" {number}"}]}).encode()
            self.send_response(200 if body["model"] == "tiny" else 400)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1"
    httpd.shutdown()


@pytest.mark.slow
def test_an_endpoint_writes_answers_and_scores_nothing(folder: Path, server: str) -> None:
    only = {"icl_tasks": [TASKS[2]]}
    (folder / "say.yaml").write_text(yaml.safe_dump(only))
    model = f"models=['{server}#tiny']"
    run("eval.py", model, "eval.gauntlet=say.yaml", "output=server", cwd=folder)
    found = json.loads((folder / "server/results.json").read_text())["gauntlet"]["tasks"][0]
    assert (found["n"], found["accuracy"]) == (6, 1.0)
    refusing = f"models=['{server}#strict']"
    done = run("eval.py", refusing, "eval.gauntlet=say.yaml", "output=n", cwd=folder, status=1)
    assert "say/0-shot: failed: every question was refused: 400" in done.stdout
    assert "no model has a score for any task" in done.stdout
    assert (folder / "n/results.json").is_file()
    done = run("eval.py", model, "eval.gauntlet=gauntlet.yaml", cwd=folder, status=2)
    assert "log-probabilities" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["models=[hf]"], "eval: hf has no run that says what to measure; write eval=v0.3"),
        (["models=[hf,hf]", "eval=generated"], "models: hf is there more than once"),
        ([], "checkpoint: is required"),
        (["models=[hf,runs/gone]", "eval=generated"], "models: nothing at runs/gone"),
        (["models=[hf,corpus]", "eval=generated"], "corpus: holds no checkpoint; write a run's"),
        (
            ["models=[runs/asked,hf]", "eval.gauntlet=gauntlet.yaml", "eval.icl_seq_len=65"],
            "eval.icl_seq_len: 65, but hf reads 64 tokens at most; write 64 or less, or remove it",
        ),
        (["models=['http://localhost:1/v1']", "eval=generated"], "names no model; write ADDRESS#"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, arguments: list[str], line: str) -> None:
    done = run("eval.py", *arguments, cwd=folder, status=2)
    assert line in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == "", "nothing was asked before"


def test_learned_positions_bound_the_length_of_questions(folder: Path) -> None:
    learned = ("model.attn_config.rope=false", "model.learned_pos_emb=true")
    far = ("run_name=far", *learned, *ICL, "eval.icl_seq_len=65")
    done = run("train.py", "tiny.yaml", *far, cwd=folder, status=2)
    assert "eval.icl_seq_len: 65, but the model's learned positions end at 64" in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""Runs side by side: what the page holds of each, which is best, what differs, what is refused."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.cli.commands import compare as command
from llmfoundry.cli.commands.compare import compare, is_held, page_path
from llmfoundry.errors import UserError
from llmfoundry.files import try_lock
from llmfoundry.loggers.pages.coordinates import key_axis
from llmfoundry.recipe.after_training import CompareRecipe
from llmfoundry.recipe.load import checked
from tests.gauntlet.answered_rows import answered, write
from tests.tiny import ROOT

LOSS, BITS, SCORE = "loss/train/total", "metrics/eval/bits_per_byte", "eval_gauntlet/average"
HOSTILE = "<script>alert(1)</script>"


def write_run(
    folder: Path, losses: list[float], *, status: str = "finished", lr: str = "1e-3", **more: Any
) -> Path:
    """A run's record: 1,000 tokens and 90 seconds a step; the last row has no time."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"time/batch": n, "time/token": 1000 * n, "time/train": 90.0 * n, LOSS: loss}
        for n, loss in enumerate(losses, 1)
    ]
    rows[-1] |= more
    del rows[-1]["time/train"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"summary": {"status": status}}))
    (folder / "recipe.yaml").write_text(
        f"run_name: {folder.name}\nseed: 1\noptimizer: {{name: adamw, lr: {lr}}}\n"
    )
    return folder


def evaluated(folder: Path, accuracy: float) -> None:
    """Add the last gauntlet of a run: a task, and the average of it."""
    task = {
        "label": "copa", "num_fewshot": 0, "metric": "m", "n": 100, "accuracy": accuracy,
        "stderr": 0.05, "interval": [accuracy - 0.1, accuracy + 0.1], "chance": 0.5,
        "majority": 0.55, "ties": 0, "truncated": 0, "failure": None, "category": "world",
    }  # fmt: skip
    result = {"time/batch": 3, "tasks": [task], "averages": {"average": accuracy}}
    result |= {"intervals": {"average": [accuracy - 0.1, accuracy + 0.1]}}
    (folder / "eval").mkdir()
    (folder / "eval" / "ba3.json").write_text(json.dumps(result))


def page_of(*words: str, output: Path) -> tuple[str, list[dict[str, Any]]]:
    """The page of a command line, and the data of its charts."""
    compare(checked(CompareRecipe, None, [*words, f"output={output}"]))
    html = output.read_text()
    found = re.findall(r'<script type="application/json">(.*?)</script>', html)
    return html, [json.loads(text) for text in found]


def test_curves_are_kept_by_tokens_steps_and_hours(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [3.0, 2.0, 1.5])
    write_run(tmp_path / "b", [3.0, 2.5])
    _, (chart,) = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    a, b = chart["lines"]
    assert (a["label"], a["x"], a["y"]) == ("a", [1000, 2000, 3000], [3, 2, 1.5])
    assert a["axes"]["steps"] == [1, 2, 3] and b["axes"]["tokens"] == b["x"] == [1000, 2000]
    assert a["axes"]["hours"] == [0.025, 0.05, 0.05]  # 90 s each; the last row has no time
    assert chart["ends"] == {"tokens": 3000, "steps": 3, "hours": 0.05} and chart["end"] == 3000


def test_hours_go_on_where_another_process_went_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [3.0, 2.0, 1.5])
    times = (1800, 3600, 900)  # of one process, of one, of the next
    rows = [
        {"time/batch": n, "time/token": n, "time/train": seconds, LOSS: 1.0}
        for n, seconds in enumerate(times, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, (chart,) = page_of(f"runs=[{run}]", output=tmp_path / "page.html")
    assert chart["lines"][0]["axes"]["hours"] == [0.5, 1, 1.25]


def test_a_long_run_is_stretched_alike_along_every_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0 + n % 7 for n in range(9000)])
    _, (chart,) = page_of(f"runs=[{tmp_path / 'a'}]", output=tmp_path / "page.html")
    (line,) = chart["lines"]
    assert len(line["x"]) == len(line["low"]) == 4000
    assert line["axes"]["tokens"] == line["x"] and line["x"][-1] == 9_000_000
    assert line["axes"]["steps"] == [x / 1000 for x in line["x"]]


def test_a_run_that_is_short_beside_another_is_in_the_frame(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [3.0] * 100)
    write_run(tmp_path / "b", [0.05])  # in the first twentieth of a, a sixtieth of its loss
    _, (chart,) = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert chart["log"]


def test_a_run_without_a_metric_keeps_its_color(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [3.0])
    write_run(tmp_path / "b", [3.0], **{BITS: 1.25})
    _, charts = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert [[line["label"] for line in chart["lines"]] for chart in charts] == [["a", "b"]] * 2
    assert [line["y"] for line in charts[1]["lines"]] == [[], [1.25]]


@pytest.mark.parametrize(
    ("of_a", "of_b", "best"),
    [
        ({BITS: 1.5}, {BITS: 1.25}, "b"),  # though its training loss is higher
        ({BITS: 1.5}, {}, "a"),  # not known of both, so the training loss decides
        ({BITS: float("nan")}, {BITS: 1.25}, "b"),  # whose end is finite
    ],
)
def test_the_best_has_the_least_of_what_all_have(
    tmp_path: Path, of_a: dict[str, float], of_b: dict[str, float], best: str
) -> None:
    write_run(tmp_path / "a", [3.0, 1.0], **{k: "NaN" if v != v else v for k, v in of_a.items()})
    write_run(tmp_path / "b", [3.0, 2.0], **of_b)
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    (row,) = [row for row in html.split("<tr>") if ">best<" in row]
    assert f"{best} <span" in row


def test_only_differing_keys_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0])
    write_run(tmp_path / "b", [1.0], lr=f"'{HOSTILE}'")
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    settings = html[html.index("Differing settings") :]
    assert "optimizer.lr" in settings and "seed" not in settings and "run_name" not in settings
    assert HOSTILE not in html and "&lt;script&gt;alert(1)" in settings


def test_the_last_gauntlets_stand_beside_one_another_with_intervals(tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.6), ("b", 0.7)):
        evaluated(write_run(tmp_path / name, [1.0]), accuracy)
    write_run(tmp_path / "c", [1.0])
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert "0.6000 [0.5000, 0.7000]" in html and "0.7000 [0.6000, 0.8000]" in html
    assert "copa" in html[html.index(">Evaluation<") :]


def test_runs_that_answered_the_same_rows_have_paired_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rights = {"a": [False] * 50, "b": [True, False] * 25, "c": [True] * 50}
    for name, of_run in rights.items():
        folder = write_run(tmp_path / name, [1.0]) / "eval"
        write(folder / "ba3", [answered("copa", [False] * 50)], batch=3)
        write(folder / "ba12", [answered("copa", of_run)], batch=12)
    write_run(tmp_path / "d", [1.0])
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    printed = capsys.readouterr().out
    for name, value in (("b", "+50.0%"), ("c", "+100.0%")):
        assert f"{name} ba12 minus a ba12" in printed and f"{value} [" in printed
        assert f"<b>{name} ba12</b> minus a ba12" in html and f"{value} [" in html
    # a damaged file is a warning, and the other runs are still compared
    rows = tmp_path / "b/eval/ba12/rows.jsonl"
    rows.write_text(rows.read_text()[:-30])
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    printed = capsys.readouterr()
    assert "rows.jsonl:100: the file ends within a line" in printed.err
    assert "c ba12 minus a ba12" in printed.out and "minus" in html and "b ba12" not in printed.out


def test_runs_that_kept_no_answers_have_a_hint(tmp_path: Path) -> None:
    for name in "ab":
        evaluated(write_run(tmp_path / name, [1.0]), 0.6)
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert "python scripts/eval.py &#34;models=[RUN1, RUN2]&#34;" in html


def test_a_run_keeps_its_color_and_number_where_others_have_no_gauntlet(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0])
    evaluated(write_run(tmp_path / "b", [1.0]), 0.6)
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    scores = html[html.index(">Evaluation<") :]
    assert "1 a" in scores and "2 b" in scores and "not asked" in scores
    assert re.findall(r'class="value" style="width:60.*?%;background:(.*?)"', scores) == [
        "var(--s1)"
    ]


@pytest.mark.parametrize("text", ["{", "[]", "null"])
@pytest.mark.parametrize("name", ["run.json", "eval/ba3.json"])
def test_a_record_that_is_none_is_named(tmp_path: Path, name: str, text: str) -> None:
    run = write_run(tmp_path / "a", [1.0])
    evaluated(run, 0.6)
    (run / name).write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{run / name}: ")):
        page_of(f"runs=[{run}]", output=tmp_path / "page.html")


def test_a_run_without_steps_of_its_own_has_an_axis(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1.0])
    row = {"time/batch": 0, "time/token": 0, LOSS: 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    _, (chart,) = page_of(f"runs=[{run}]", output=tmp_path / "page.html")
    assert chart["ends"] == {"tokens": 1, "steps": 1, "hours": 1}


def test_a_link_holds_any_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "lr=1%25#2?", [1.0])
    (run / "report.html").touch()
    html, _ = page_of(f"runs=['{run}']", output=tmp_path / "page.html")
    assert 'href="lr%3D1%2525%232%3F/report.html"' in html


def test_pipes_and_devices_are_neither_read_nor_replaced(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0])
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "metrics.jsonl")
    os.mkfifo(tmp_path / "pipe")
    _, (chart,) = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert [line["label"] for line in chart["lines"]] == ["a"]
    with pytest.raises(UserError, match="pipe: is not a file; write another path"):
        page_of(f"runs=[{tmp_path}]", output=tmp_path / "pipe")


def test_whether_a_run_is_under_way_is_known_by_its_lock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1.0], status="running")
    assert not is_held(run)
    lock = try_lock(run / "run.lock", mode=0o644)
    assert lock is not None and is_held(run)
    html, _ = page_of(f"runs=[{run}]", output=tmp_path / "page.html")
    assert ">running: 1<" in html and "data-written" not in html
    lock.release()
    html, _ = page_of(f"runs=[{run}]", output=tmp_path / "page.html")
    assert ">not finished<" in html


def test_a_followed_page_is_written_until_no_run_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pages = write_run(tmp_path / "a", [1.0], status="running"), []
    lock = try_lock(run / "run.lock", mode=0o644)
    assert lock is not None

    def wait(seconds: float) -> None:
        pages.append((tmp_path / "page.html").read_text())
        if len(pages) == 2:
            lock.release()

    monkeypatch.setattr(command.time, "sleep", wait)
    last, _ = page_of(f"runs=[{run}]", "follow=true", output=tmp_path / "page.html")
    assert [">running: 1<" in page and "data-written" in page for page in pages] == [True, True]
    assert ">not finished<" in last and "data-written" not in last


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x/run", "y/run"):
        write_run(tmp_path / folder, [1.0])
    words = ", ".join(str(tmp_path / name) for name in ("x", "y", "x/run"))
    _, (chart,) = page_of(f"runs=[{words}]", output=tmp_path / "page.html")
    assert [line["label"] for line in chart["lines"]] == ["x/run", "y/run"]


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    torn = write_run(tmp_path / "torn", [1.0, 2.0])
    (torn / "metrics.jsonl").write_text("no JSON\n" * 2)
    words = [tmp_path / "empty", tmp_path / "nowhere", torn, torn / "run.json"]
    recipe = CompareRecipe([str(word) for word in words], str(tmp_path / "page.html"))
    with pytest.raises(UserError) as caught:
        compare(recipe)
    lines = caught.value.lines()
    assert len(lines) == 4 and "has no metrics.jsonl, nor has a folder in it" in lines[0]
    assert "nowhere is not there" in lines[1] and "run.json is not a folder" in lines[2]
    assert "metrics.jsonl:1" in lines[3]
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(UserError, match="runs: is empty"):
        checked(CompareRecipe, None, [])


def test_where_the_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", [1.0])
    assert page_path(CompareRecipe(["runs"])) == Path("runs/index.html")
    assert page_path(CompareRecipe(["runs/a"])) == Path("compare.html")
    assert page_path(CompareRecipe(["runs", "runs"])) == Path("compare.html")


def test_folders_stand_behind_the_command_as_they_are_called(tmp_path: Path) -> None:
    names = ["lr=1e-3,seed=1", "it's [odd]"]  # a sweep's, and one that only quotes hold
    for name in names:
        write_run(tmp_path / name, [1.0])
    script, began = ROOT / "scripts" / "compare.py", time.time()
    words = [sys.executable, str(script), *names]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "compare.html").stat().st_mtime >= began - 1
    assert all(name in done.stdout for name in names) and "compare.html" in done.stdout
    words = [sys.executable, str(script), "mine.yaml", names[0]]  # a recipe has no folders behind
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "two recipes, mine.yaml and" in done.stderr


def test_a_run_that_cannot_be_read_is_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", [1.0])
    torn = write_run(tmp_path / "b", [1.0, 2.0])
    (torn / "metrics.jsonl").write_text("no JSON\n" * 2)
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    line = f"left out: {torn / 'metrics.jsonl'}:1"
    assert line in capsys.readouterr().err and line in html and "</i>b<" not in html
    assert "<title>1 run<" in html


def test_a_page_that_is_not_ours_is_never_overwritten(tmp_path: Path) -> None:
    run, theirs = write_run(tmp_path / "a", [1.0]), tmp_path / "index.html"
    for text in ("<html>mine</html>", ""):
        theirs.write_text(text)
        with pytest.raises(UserError, match=r"index\.html: is not a page that this command wrote"):
            compare(CompareRecipe([str(tmp_path)]))
        assert theirs.read_text() == text
    page_of(f"runs=[{run}]", output=tmp_path / "page.html")
    page_of(f"runs=[{run}]", output=tmp_path / "page.html")  # ours, written again


def test_a_followed_page_goes_on_between_two_runs_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", [1.0])
    lock, pages = try_lock(tmp_path / "sweep.lock", mode=0o644), []
    assert lock is not None

    def wait(seconds: float) -> None:
        pages.append((tmp_path / "page.html").read_text())
        lock.release()

    monkeypatch.setattr(command.time, "sleep", wait)
    last, _ = page_of(f"runs=[{tmp_path}]", "follow=true", output=tmp_path / "page.html")
    assert len(pages) == 1 and "data-written" in pages[0] and "data-written" not in last


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((2.0, 1.5, 1.5), "best: a tie of b, c, by the least loss, training"),
        ((2.0, 1.5, math.nan), "best: b, by the least loss, training at the end of each run: 1.5"),
        ((math.nan, math.inf, math.nan), "not finite at the end: a, b, c"),
    ],
)
def test_who_is_best_is_said_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: tuple[float, ...], said: str
) -> None:
    for name, loss in zip("abc", losses, strict=True):
        write_run(tmp_path / name, [3.0, loss])
    write_run(tmp_path / "d", [0.1], status="failed")
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert said in html and said in capsys.readouterr().out
    assert "not compared, failed: d" in html
    assert ("best:" in html) == any(map(math.isfinite, losses))


def test_keys_are_drawn_against_the_result(tmp_path: Path) -> None:
    for seed, lr, loss in ((1, "1e-4", 3.0), (2, "1e-3", 2.0), (3, "1e-2", math.nan)):
        write_run(tmp_path / f"optimizer.lr={lr},seed={seed}", [loss], lr=lr)
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    drawn = re.findall(r'<g class="one (\w*)" data-words="(.*?)".*?points="(.*?)"', html, re.DOTALL)
    assert [kind for kind, _, _ in drawn] == ["lost", "", "best"], "the best lies above"
    places = {words.split("\n")[0]: points for _, words, points in drawn}
    assert places == {  # a logarithmic axis: 1e-3 is in the middle; the least loss is at the bottom
        "optimizer.lr=1e-4,seed=1": "0.00,94.00 50.00,94.00 100.00,6.00",
        "optimizer.lr=1e-3,seed=2, best": "0.00,50.00 50.00,50.00 100.00,94.00",
        # above all that ended with a number
        "optimizer.lr=1e-2,seed=3": "0.00,6.00 50.00,6.00 100.00,-2.00",
    }
    assert ">not finite</span>" in html
    assert "optimizer.lr: 1e-3\nseed: 2\nloss, training: 2.0000\nfinished" in drawn[2][1]


def test_axes_leave_no_empty_room_and_what_was_swept_is_drawn(tmp_path: Path) -> None:
    """The last axis has labels to its right alone; a key that follows from another has no axis."""
    for seed, value, loss in ((1, "1e-3", 3.0), (2, "1e-2", 2.0)):
        name = f"optimizer.lr={value},model=a,seed={seed}"
        folder = write_run(tmp_path / name, [loss], lr=value)
        with (folder / "recipe.yaml").open("a") as file:
            file.write(f"scheduler: {{warmup: {value}}}\n")
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    axes = re.findall(r'<div class="axis" style="left:(.*?)%;width:(.*?)%"><b>(.*?)</b>', html)
    names = [re.sub(r"<.*?>", "", name) for *_, name in axes]
    assert names == ["optimizer.lr", "seed", "loss, training"]
    assert [width for _, width, _ in axes] == ["50.0", "50.0", "0"]
    assert "more keys below" in html


def test_one_swept_key_needs_no_axes(tmp_path: Path) -> None:
    for value, loss in (("1e-3", 3.0), ("1e-2", 2.0)):
        write_run(tmp_path / f"optimizer.lr={value},model=a", [loss], lr=value)
    html, _ = page_of(f"runs=[{tmp_path}]", output=tmp_path / "page.html")
    assert 'class="axis"' not in html and "best:" in html


@pytest.mark.parametrize(
    ("values", "places", "labels"),
    [
        (["1", "2", "5"], [94, 72, 6], ["5", "2", "1"]),
        (["100ba", "50ba"], [6, 94], ["100ba", "50ba"]),
        (["adamw", "", "muon"], [50, 6, 94], ["not set", "adamw", "muon"]),
        (["1", "two"], [6, 94], ["1", "two"]),
        (["0", "1000"], [94, 6], ["1000", "0"]),  # no logarithm of 0
    ],
)
def test_an_axis_places_numbers_by_size_and_words_apart(
    values: list[str], places: list[float], labels: list[str]
) -> None:
    axis = key_axis("key", values)
    assert (axis.places, [text for _, text in axis.labels]) == (places, labels)

"""report.html: well formed, loads nothing, holds the run's numbers, and can always be rewritten."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.loggers.metrics_file import JsonLines
from llmfoundry.loggers.pages import report
from llmfoundry.loggers.pages.report import write_report
from tests.disk import Disk

UPLOT = Path(report.__file__).parent / "vendor/uPlot.iife.min.js"
VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADS = {"src", "href", "srcset", "poster", "data", "action", "xlink:href"}
TASKS = [
    {"label": "copa", "num_fewshot": 2, "metric": "InContextLearningMultipleChoiceAccuracy",
     "n": 137, "accuracy": 0.5432, "stderr": 0.0426, "chance": 0.5, "majority": 0.55, "ties": 3,
     "truncated": 0, "failure": None, "category": "commonsense"},
    {"label": "svamp", "num_fewshot": 0, "metric": "InContextLearningLMAccuracy",
     "n": 41, "accuracy": None, "stderr": None, "chance": 0.0, "majority": 0.1, "ties": 0,
     "truncated": 0, "failure": "row 3 is <not> finite", "category": "symbolic"},
]  # fmt: skip


class Page(HTMLParser):
    """Collects text, tags and what would be loaded; checks that every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        loads = LOADS - {"href"} if tag == "a" else LOADS  # a link is only followed
        self.loaded += [f"{name}={value}" for name, value in attrs if name in loads]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)


def write_run(folder: Path, steps: int) -> None:
    metrics = JsonLines(folder / "metrics.jsonl", pytest.fail)
    metrics.start(0)
    for b in range(1, steps + 1):
        row = {"time/batch": b, "time/token": b * 4096}
        loss = 3 + 6 * math.exp(-b / 50) + 0.1 * math.sin(b * 12.9898)
        metrics.write(
            row
            | {
                "loss/train/total": loss,
                "metrics/train/bits_per_byte": loss / 2.7,
                "gpu/energy_kwh": 0.01 * (b if b <= 100 else b - 100),  # a restart at step 100
                "l2_norm/grad/global": 1 + abs(math.sin(b * 78.233)),
                "lr-DecoupledAdamW/group0": 6e-4 * b / steps,
                "throughput/tokens_per_sec": 54_300.0 + b % 7,
                "throughput/device/mfu": 0.3456,
                "memory/peak_allocated_mem": 2.5,
                "loss/train/lbl": 1.01,
                "throughput/batches_per_sec": 13.2,
                "time/unix_ms": 1_700_000_000_000 + 1000 * b,
                "time/train": 0.9 * b,
                "time/val": 0.0 if b < steps else 30.0,
                "mine/own": 1.0,
            }
        )
    metrics.write(row | {"metrics/eval/LanguageCrossEntropy": 3.14159})
    metrics.write(row | {"metrics/eval/bits_per_byte": 1.16354})
    metrics.write(row | {"metrics/copa/2-shot/InContextLearningMultipleChoiceAccuracy": 0.5432})
    metrics.write(row | {"icl/metrics/eval_gauntlet/commonsense": 0.0864})
    metrics.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path, 300)
    (tmp_path / "recipe.yaml").write_text("run_name: x # <script>alert(1)</script>\n")
    samples = JsonLines(tmp_path / "samples.jsonl", pytest.fail)
    samples.start(0)
    samples.write({"time/batch": 100, "prompt": "def f(", "text": "x): <b>\x1b[2J\n"})
    samples.close()
    (tmp_path / "eval").mkdir()
    old = {"time/batch": 100, "tasks": [{**TASKS[0], "n": 999}], "categories": {}, "average": None}
    new = {
        "time/batch": 300,
        "tasks": TASKS,
        "categories": {"commonsense": 0.0864, "symbolic": None},
        "average": None,
        "problems": ["symbolic: n/a, and so is the average: no svamp/0-shot"],
    }
    (tmp_path / "eval" / "ba0000100.json").write_text(json.dumps(old))
    (tmp_path / "eval" / "ba0000300.json").write_text(json.dumps(new))
    facts = {
        "name": "tiny <1>",
        "facts": [["model", "dbrx 28M"], ["device", "1 x CPU, fp32"]],
        "environment": {"torch": "2.9", "processor": "AMD EPYC 9R14", "cores": "4"},
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    return tmp_path


def test_the_page_is_well_formed_and_loads_nothing(run: Path) -> None:
    html = write_report(run, summary={"status": "finished"}).read_text()
    page = Page(html)
    assert page.loaded == []
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert html.count(UPLOT.read_text()) == 1
    ours = html.replace(UPLOT.read_text(), "")  # whose first line is a comment with its address
    assert not re.search(r"https?:|//[a-z]|@import|url\(", ours)
    assert "prefers-color-scheme:dark" in html


def test_the_vendored_library_is_the_one_that_notice_names_and_loads_nothing() -> None:
    text = UPLOT.read_text()
    assert re.match(r"/\*! https://github.com/leeoniya/uPlot \(v1\.6\.32\) \*/", text)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|eval\(|</script|innerHTML", text)
    notice = (UPLOT.parents[4] / "NOTICE").read_text()
    assert "uPlot 1.6.32" in notice and "llmfoundry/loggers/pages/vendor/" in notice
    assert UPLOT.stat().st_size < 55_000


def test_the_page_holds_the_runs_numbers(run: Path) -> None:
    page = Page(write_report(run, summary={"status": "finished", "wall time": "3m12s"}).read_text())
    for text in (
        "tiny <1>",
        "finished · 300 batches, 1.23M tokens",  # 300 * 4096
        "3.1416 validation loss",
        "1.1635 validation bits per byte",
        "1.23M tokens 300 batches",
        "5m00s duration 30s of it evaluation",  # 0.9 * 300 + 30
        "14 Nov 2023 date (UTC) 22:13 to 22:18",
        "AMD EPYC 9R14 hardware 4 cores",
        "n/a average",
        "54.3k median tokens per second",
        "34.6% median MFU",
        "2.5 GiB peak memory",
        "3 kWh energy of the GPUs",
        "copa 2 137 54.3% ± 4.3 50.0% 55.0%",
        "svamp 0 41 n/a 0.0% 10.0% failed: row 3 is <not> finite",
        "commonsense 0.0864 symbolic n/a average n/a",
        "symbolic: n/a, and so is the average",
        "after 300 batches",
        "def f( x): <b>\\x1b[2J",
        "<script>alert(1)</script>",
        "model dbrx 28M",
        "torch 2.9",
        "wall time 3m12s",
        "batches per second 13.2",
        "copa, 2-shot",
    ):
        assert text in page.text, text
    assert "copa 2 999" not in page.text  # the older evaluation is not the final table


def test_charts_draw_each_metric_once(run: Path) -> None:
    html = write_report(run).read_text()
    titles = re.findall(r"<figcaption><b[^>]*>(.*?)</b>", html)
    assert titles == [
        "Loss",
        "Bits per byte",
        "Training loss that balances experts",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Peak memory",
        "Energy in kilowatt-hours",
        "Mine/own",
        "Gauntlet",
        "Tasks",
    ]


def test_ten_thousand_points_make_a_small_page_that_shows_its_spike(tmp_path: Path) -> None:
    write_run(tmp_path, 10_000)
    plain = write_report(tmp_path).read_text()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[6000])
    row["l2_norm/grad/global"] = 29.0
    lines[6000] = json.dumps(row)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    html = write_report(tmp_path).read_text()
    assert len(html.encode()) < 500_000
    (line,), (before,) = (numbers(figure(t, "Gradient norm"))["lines"] for t in (html, plain))
    assert max(line["high"]) == 29.0 and max(before["high"]) <= 2.0
    changed = [i for i in range(800) if line["high"][i] != before["high"][i]]
    assert len(changed) == 1 and line["low"] == before["low"]


def figure(html: str, title: str) -> str:
    return next(f for f in html.split("<figure>") if re.search(rf"<b[^>]*>{title}</b>", f))


def numbers(figure: str) -> dict[str, Any]:
    """What charts.js draws a figure from."""
    found = re.search(r'<script type="application/json">(.*?)</script>', figure)
    assert found is not None
    return json.loads(found[1])


def test_a_long_run_keeps_means_and_peaks_for_the_reader(tmp_path: Path) -> None:
    values = [math.sin(i * 12.9898) + 2 for i in range(10_000)]
    values[6000] = 29.0
    rows = [
        {"time/batch": i + 1, "time/token": 10 * (i + 1), "l2_norm/grad/global": value}
        for i, value in enumerate(values)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_report(tmp_path).read_text()
    (line,) = numbers(figure(html, "Gradient norm"))["lines"]
    assert len(line["x"]) == 800 and line["x"][-1] == 100_000
    assert max(line["high"]) == 29.0 and min(line["low"]) == pytest.approx(min(values), rel=1e-5)
    # Stretches are as long as one another, so that their mean is the run's.
    assert sum(line["y"]) / 800 == pytest.approx(sum(values) / 10_000, rel=1e-3)


def test_a_metric_is_named_in_words_and_its_own_name_is_the_tooltip(run: Path) -> None:
    summary = {"metrics/copa/2-shot/gold_bits_per_byte": 1.25, "status": "finished"}
    html = write_report(run, summary=summary).read_text()
    name = "metrics/copa/2-shot/gold_bits_per_byte"
    assert f'<span title="{name}">copa, 2-shot: bits per byte of the right answer</span>' in html
    assert name not in Page(html).text
    assert 'title="loss/train/lbl"' in html and 'title="mine/own"' in html
    groups = re.findall(r'<details class="group"( open)?><summary>([^<]*?)(?: <|</summary>)', html)
    assert groups == [
        (" open", "Loss"), (" open", "Optimizer"), (" open", "Speed and memory"),
        ("", "Other metrics"),
    ]  # fmt: skip


def test_nothing_that_a_run_holds_can_end_a_script(run: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = {**json.loads(lines[-1]), evil: 2.0}
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    (run / "run.json").write_text(json.dumps({"name": evil, "facts": [["device", evil]]}))
    (run / "samples.jsonl").write_text(
        json.dumps({"time/batch": 1, "prompt": evil, "text": evil}) + "\n"
    )
    html = write_report(run, summary={evil: evil}).read_text()
    assert "<script>alert" not in html
    page = Page(html)  # as many scripts as charts, the library and ours
    assert page.tags.count("script") == page.tags.count("figure") + 2


def test_a_run_that_was_killed_has_its_report(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"time/batch": 301, "time/to')
    page = Page(write_report(run).read_text())
    assert "not finished · 300 batches" in page.text


def test_a_report_is_on_the_disk_before_it_replaces_the_last(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(run)
    disk = Disk(monkeypatch)
    write_report(run)
    (_, written), *rest = disk.events
    assert written.name.startswith("report.html.") and written.suffix == ".partial"
    assert rest == [("named", run / "report.html"), ("synced", run)]


def test_an_empty_folder_has_a_report_that_says_so(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text())
    assert "not finished" in page.text and "No step was logged." in page.text


def test_the_page_of_a_run_under_way_reloads_itself_and_no_other_does(run: Path) -> None:
    assert 'data-written="' in write_report(run, summary={"status": "running"}).read_text()
    for status in ("finished", "failed", "killed"):
        assert (
            "data-written" not in write_report(run, summary={"status": status}).read_text()[:9000]
        )


def test_norms_of_single_parameters_are_not_drawn(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl", pytest.fail)
    metrics.start(0)
    for batch in range(1, 4):
        row = {"time/batch": batch, "time/token": batch * 8, "loss/train/total": 1 / batch}
        for kind in ("grad", "param", "moment"):
            row[f"l2_norm/{kind}/global"] = batch / 3
            row |= {f"l2_norm/{kind}/blocks.{i}.weight": batch / 5 for i in range(300)}
        metrics.write(row)
    metrics.close()
    html = write_report(tmp_path).read_text()
    titles = re.findall(r"<figcaption><b[^>]*>(.*?)</b>", html)
    norms = ["Norm of the weights", "Norm of the first moment"]
    assert titles == ["Loss", "Gradient norm", *norms]
    assert "blocks.0" not in html


def test_the_learning_rate_of_every_group_is_a_line(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl", pytest.fail)
    metrics.start(0)
    for batch in (1, 2):
        rates = {f"lr-DecoupledAdamW/group{i}": (i + 1) * batch / 1000 for i in range(3)}
        metrics.write({"time/batch": batch, "time/token": batch * 8, **rates})
    metrics.close()
    drawn = figure(write_report(tmp_path).read_text(), "Learning rate")
    assert drawn.count('<i class="key" style') == 3
    lines = numbers(drawn)["lines"]
    assert [line["label"] for line in lines] == [f"DecoupledAdamW, group {i}" for i in range(3)]
    assert [line["y"][-1] for line in lines] == [0.002, 0.004, 0.006]
    assert 'title="lr-DecoupledAdamW/group2"' in drawn


def test_learning_rates_that_are_the_same_are_one_line(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl", pytest.fail)
    metrics.start(0)
    for batch in (1, 2, 3):
        rates = {f"lr-Muon/group{i}": 0.0008 * batch for i in range(3)}
        metrics.write({"time/batch": batch, "time/token": batch * 8, **rates})
    metrics.close()
    drawn = figure(write_report(tmp_path).read_text(), "Learning rate")
    assert len(numbers(drawn)["lines"]) == 1 and "Muon, group" not in drawn
    assert 'class="legend"' not in drawn


def test_a_password_in_the_recipe_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("logger: {tracking_uri: 'http://me:secret@host:5000'}\n")
    html = write_report(tmp_path).read_text()
    assert "http://me:***@host:5000" in html and "secret" not in html

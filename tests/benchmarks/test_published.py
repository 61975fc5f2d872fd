"""Published runs: what is known of their sources, and how near the plan's seconds are."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest
import yaml

from benchmarks.published import FOLDER, Row, others, runs
from llmfoundry.plan.seconds import CAST
from llmfoundry.recipe.hardware import GPUS

SOURCES = yaml.safe_load((FOLDER / "sources.yaml").read_text())


def run(source: str, name: str) -> Row:
    return next(row for row in runs() if (row.source, row.name) == (source, name))


def is_scored(row: Row) -> bool:
    return not row.is_whole_run and not row.is_fitted


def ratio(row: Row) -> float:
    return row.predict().total / row.seconds


def test_every_row_names_a_source_with_an_address() -> None:
    rows = [*runs(), *others()]
    assert {row.source for row in rows} <= set(SOURCES)
    pages = [known["page"] for known in SOURCES.values() if not known.get("fitted")]
    assert all(page.startswith("https://") for page in pages)


def test_facts_of_a_source_apply_to_its_rows() -> None:
    limited = run("torchtitan llama3_h100_202412 tables 2-6", "8B FSDP FP8 128").reached
    assert limited.gpu.power == 0.714 and limited.gpu.memory_gb_s == 2400
    assert limited.products < 0.9 * GPUS["H100"].sustained * GPUS["H100"].reached * 989.5e12
    engine = run("NeMo 24.12 performance summary (FP8)", "Llama2 7B").reached
    assert engine.cast < CAST == limited.cast
    halved = run("fms-fsdp README", "7B HSDP")
    assert halved.halves_gradients
    assert halved.seconds == pytest.approx(2 * 4096 / 4550)


def test_a_file_of_further_runs_is_predicted_with_what_is_known_of_its_source(
    tmp_path: Path,
) -> None:
    """The columns of runs.csv; an unknown source has no facts."""
    with (FOLDER / "runs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "7B HSDP"][:1]
    written = tmp_path / "more.csv"
    with written.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([rows[0], {**rows[0], "source": "elsewhere"}])
    known, unknown = runs(written)
    assert known.halves_gradients and not unknown.halves_gradients
    assert ratio(known) < ratio(unknown)


def test_deepep_sends_a_token_once_to_a_rank() -> None:
    """32 experts on 8 ranks, 4 a token: a token meets 8 (1 - (7/8)^4) = 3.3 ranks, not 4."""
    row = run("NeMo AutoModel performance-summary.mdx", "GPT-OSS 20B EP8")
    plain = Row(**{**vars(row), "has_deepep": False})
    waits = [one.predict().waiting["tokens"] for one in (row, plain)]
    assert waits[0] / waits[1] == pytest.approx(8 * (1 - (7 / 8) ** 4) / 4, rel=0.05)


@pytest.mark.slow
def test_seconds_of_published_runs_are_predicted() -> None:
    """What was reached; GPU-hours of whole runs are no steps."""
    ratios = [ratio(row) for row in [*runs(), *others()] if is_scored(row)]
    near = sum(1 / 1.15 <= one <= 1.15 for one in ratios)
    off = sorted(abs(math.log(one)) for one in ratios)
    assert near >= 0.8 * len(ratios)
    assert off[-2] <= math.log(1.35)  # the worst is a ring over eight ranks, at 262,144 tokens
    assert 0.93 <= statistics.median(ratios) <= 1.05

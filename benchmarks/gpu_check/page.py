"""What the numbers of a GPU check mean, and the page that shows them, which needs nothing else.

`check.py` calls `judge` after each item, which adds ratios to its rows. What leaves its bounds in
`BOUNDS` is wrong or below its target, and stands first on the page; then comes a table for each
step, last what did not run. Targets are for GPUs alone: on a CPU the numbers show that the check
works, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.gpu_check.plan import (
    CUDA,
    DEVICE,
    DONE,
    FAILED,
    NO_TIME,
    OK,
    WAITING,
    Item,
    Results,
    Row,
    Step,
)
from llmfoundry.loggers.console import duration, number, percent, short_count
from llmfoundry.loggers.pages.page import Tile, page, pairs, table

BOUNDS = {  # smallest and largest of a ratio, and whether what is outside is wrong on any device
    "of products": (0.6, math.inf, False),  # the measured rate of matrix products
    "of bare loop": (0.95, math.inf, False),
    "of best chunk": (0.0, 1.1, False),
    "data wait of step": (0.0, 0.01, False),
    "estimate of peak": (0.95, 1.5, False),  # below, a run would have ended: wrong
    "fp32 off by": (0.0, 1e-3, True),  # the share by which a loss differs from the CPU's
    "amp_bf16 off by": (0.0, 2e-2, True),
}
RATED = ("mfu", "experts")  # steps for which the rate of products is the target
SHARES = ("of products", "of peak", "of bare loop", "data wait of step", "share")


def judge(results: Results, step: Step, item: Item) -> None:
    """Add to an item's rows their ratios to what was measured before."""
    rate, peak = product_rate(results), results.facts.get("peak TFLOP/s")
    other = {one.name: one.rows[0] for one in step.items if one.rows}
    for row in item.rows:
        if step.name in RATED and "TFLOP/s" in row:
            row |= {"of products": row["TFLOP/s"] / rate} if rate else {}
            row |= {"of peak": row["TFLOP/s"] / peak} if peak else {}
        if row.get("peak GiB"):
            row["estimate of peak"] = row["estimate GiB"] / row["peak GiB"]
        if row.get("plan ms"):
            row["plan of step"] = row["plan ms"] / row["step ms"]
        if row.get("data wait, ms") is not None:
            row["data wait of step"] = row["data wait, ms"] / row["step ms"]
        if step.name == "bare" and (bare := other.get(item.name.replace("ours", "bare loop"))):
            row["of bare loop"] = row["tokens/s"] / bare["tokens/s"]
        right = other.get(f"{item.name.partition(',')[0]}, fp32, CPU")
        if step.name == "losses" and right and not item.device:
            both = zip(map(float, row["losses"]), map(float, right["losses"]), strict=False)
            off = max(abs(a - b) / abs(b) for a, b in both)
            row[f"{row['precision']} off by"] = off


def product_rate(results: Results) -> float | None:
    """TFLOP/s of the best of the large matrix products; None: not measured."""
    rates = (row["TFLOP/s"] for *_, row in results.rows(DEVICE) if "TFLOP/s" in row)
    return max(rates, default=None)


def status(results: Results) -> int:
    """The exit status: 0 where all ran and is right, else 1."""
    missing = any(item.state in (NO_TIME, WAITING) for _, item in results.items())
    return int(missing or bool(wrong(results)) or results.status != "finished")


def wrong(results: Results) -> list[str]:
    """What is not right, a line each."""
    failed = [
        f"{step.title}: {item.name}: {item.reason}"
        for step, item in results.items()
        if item.state == FAILED
    ]
    return failed + [": ".join(cells) for cells, is_wrong in _outside(results) if is_wrong]


def below(results: Results) -> list[tuple[str, str, str]]:
    """What misses its target: what, what was found, the bound; nothing on a CPU."""
    return [cells for cells, is_wrong in _outside(results) if not is_wrong]


def _outside(results: Results) -> Iterator[tuple[tuple[str, str, str], bool]]:
    for step, item, row in results.rows():
        for key, (least, most, is_wrong) in BOUNDS.items():
            value = row.get(key, least)
            if least <= value <= most:
                continue
            is_wrong |= key == "estimate of peak" and value < least
            bound = f"at least {_text(key, least)}" if value < least else f"at most {most:g}"
            which = row.get("contender") or row.get("chunk") or ""
            name = " ".join(f"{step.title}: {item.name} {which}".split())
            if results.device == CUDA or BOUNDS[key][2]:
                yield (name, f"{_text(key, value)} {key}", bound), is_wrong


def not_run(results: Results) -> list[tuple[str, str, str]]:
    """Every item or row without a result: step and item, its state, the reason."""
    items = [
        (f"{step.name}: {item.name}", item.state, item.reason)
        for step, item in results.items()
        if item.state not in DONE
    ]
    return items + [
        (f"{step.name}: {item.name}: {row.get('chunk', row.get('test', ''))}", "", why)
        for step, item, row in results.rows()
        if (why := row.get("not run", row.get("reason")))
    ]


def headline(item: Item) -> str:
    """An item in a line of the console, with the number that matters most."""
    if item.state != OK:
        return f"{item.name}: {item.state}" + (f": {item.reason}" if item.reason else "")
    found = OK
    if outcomes := [row["outcome"] for row in item.rows if "outcome" in row]:
        found = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "skipped"))
    for key in ("tokens/s", "TFLOP/s", "of products"):
        if values := [row[key] for row in item.rows if key in row]:
            found = f"{_text(key, max(values))} {key}"
    return f"{item.name}: {found} ({duration(item.seconds)})"


def as_html(results: Results) -> str:
    """The document."""
    facts = results.facts
    machine = [
        (name, _text(name, value))
        for name, value in [*facts.items(), *facts.get("libraries", {}).items()]
        if name != "libraries" and value not in (None, [])
    ]
    sections = [
        ("Wrong", _wrong(results)),
        ("Below target", table(("what", "found", "target"), below(results))),
        *((step.title, _step(results, step)) for step in results.steps),
        ("Not run", table(("what", "state", "why"), not_run(results))),
        ("Machine", pairs(machine)),
    ]
    return page(
        title=f"GPU check: {facts.get('gpu') or facts.get('processor') or results.device}",
        status="not finished: running" if results.status == "running" else results.status,
        reached=f"{duration(results.seconds)} of {results.minutes:g} minutes, {results.started}",
        tiles=list(_tiles(results)),
        sections=[(name, html) for name, html in sections if html],
    )


def _tiles(results: Results) -> Iterator[Tile]:
    rate, peak = product_rate(results), results.facts.get("peak TFLOP/s")
    if rate:
        detail = f"{percent(rate / peak)} of the table's {number(peak)}" if peak else "bf16"
        yield Tile("TFLOP/s of matrix products", number(rate, digits=3), detail)
    runs = [
        (row["of products"], item.name)
        for _, item, row in results.rows("mfu")
        if "of products" in row
    ]
    if runs:
        yield Tile("of products, best run", percent(max(runs)[0]), max(runs)[1])
    if tests := [row["outcome"] for *_, row in results.rows() if "outcome" in row]:
        detail = f"{tests.count('failed')} failed, {tests.count('skipped')} skipped"
        yield Tile("tests passed", str(tests.count("passed")), detail)
    yield Tile("wrong", str(len(wrong(results))))
    yield Tile("below target", str(len(below(results))), "on GPUs alone")
    states = [item.state for _, item in results.items()]
    done = sum(state in DONE for state in states)
    yield Tile("items run", f"{done} of {len(states)}", "the others are listed below")


def _wrong(results: Results) -> str:
    listed = "".join(f"<li>{escape(line)}</li>" for line in wrong(results))
    logs = "".join(
        f"<details><summary>{escape(f'{step.title}: {item.name}')}</summary>"
        f"<pre>{escape(item.log)}</pre></details>"
        for step, item in results.items()
        if item.log
    )
    return (f'<ul class="problems">{listed}</ul><p></p>' if listed else "") + logs


def _step(results: Results, step: Step) -> str:
    """A table of the step's rows; of memory and data, of all timed runs."""
    shown = (step.name, "mfu") if step.name in ("memory", "data") else (step.name,)
    rows: list[tuple[str, Row]] = [(item.name, row) for _, item, row in results.rows(*shown)]
    keys = step.columns or tuple(dict.fromkeys(key for _, row in rows for key in row))
    keys = tuple(key for key in keys if any(row.get(key) is not None for _, row in rows))
    cells = [(name, *(_text(key, row.get(key)) for key in keys)) for name, row in rows]
    right = [n for n, k in enumerate(keys, 1) if any(type(r.get(k)) is float for _, r in rows)]
    body = table(("item", *keys), cells, right=right, is_wide=True) if keys else ""
    return f'<p class="hint">{escape(step.hint)}</p>{body}' if body else ""


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(_text(key, one) for one in value)
    if key in SHARES:
        return percent(value)
    if key == "tokens/s":
        return short_count(value)
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else number(value, digits=4)
    return str(value)

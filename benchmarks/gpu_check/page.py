"""What a GPU check found, what its numbers mean, and the page that shows them.

`check.py` fills `Results` (gpu-check.json) and calls `judge` after each item, which adds shares to
its rows. The page, gpu-check.html, needs nothing but itself: first what is wrong or below its
target, then a table for each step, last what did not run. Targets are for GPUs alone: on a CPU the
numbers show that the check works, and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from benchmarks.gpu_check.plan import CUDA
from llmfoundry.loggers.console import duration, number, percent, short_count
from llmfoundry.loggers.pages.page import Tile, page, pairs, table

JSON_NAME, PAGE_NAME = "gpu-check.json", "gpu-check.html"
OK, WRONG, FAILED, MEMORY, TOO_LONG = "ok", "wrong", "failed", "out of memory", "too long"
NO_TIME, NOT_HERE, NOT_CHOSEN, WAITING = "no time", "not here", "not chosen", "waiting"
DEFECTS = (WRONG, FAILED, MEMORY, TOO_LONG)  # states of an item that something is wrong with

TARGET = 0.6  # of the measured rate of matrix products
AS_FAST = 0.95  # of a bare loop's speed
WAIT = 0.01  # of a step, for data
CHUNK = 1.1  # of the best chunk's time
ESTIMATE = (0.95, 1.5)  # of the peak: below, a run would have ended; above, memory is left unused
LOSSES = {"fp32": 1e-3, "amp_bf16": 2e-2}  # largest share by which a loss may differ from the CPU's

HINTS = {
    "device": "bf16 matrix products for two seconds each; shares of products refer to the best.",
    "tests": "pytest -m gpu, a process for each file.",
    "layouts": "Largest relative differences of a loss and of a gradient norm from a plain loop.",
    "kernels": "pytest -m gpu: largest errors against float64, as shares of the largest value.",
    "experts": "Forward and backward in bf16, interleaved with a dense layer of as many FLOPs.",
    "mfu": "Steps of shipped recipes by scripts/train.py in amp_bf16: the median after the first"
    " ones. FLOPs: two a multiply-add, backward twice forward, no recomputation.",
    "memory": "Peak of tensors and what the run had estimated in advance, of every timed run.",
    "loss": "Output head and cross-entropy with gradients, by tokens whose logits are in memory.",
    "losses": "The same rows and weights on both devices.",
    "bare": "mpt-125m's shape without biases on full rows; the loop is the shortest one.",
    "data": "How long the loop waited for rows in each run above.",
    "save": "What the steps after a save took more than others.",
    "profile": "One step by torch.profiler: its largest kernels, and kinds of kernels.",
}
RUN = "rows,row tokens,microbatch"
COLUMNS = {  # of each step, where not all keys of its rows
    "mfu": f"{RUN},attention,step ms,tokens/s,TFLOP/s,of products,of peak,peak GiB,first step, s",
    "memory": "microbatch,estimate GiB,peak GiB,reserved GiB,estimate of peak",
    "losses": "losses",
    "bare": "step ms,tokens/s,TFLOP/s",
    "data": "data wait, ms,step ms,data wait of step",
    "save": "checkpoint GiB,step ms,blocked s,waited at the end, s",
    "profile": "kernel,kind,calls,ms,share",
}
SHARES = ("of products", "of peak", "data wait of step", "share")

Row = dict[str, Any]
"""What an item measured; under `wrong` what is not right about it."""


@dataclass
class ItemResult:
    """One process's result.

    Attributes:
        name: within its step.
        state: one of the words above.
        reason: why it is not `ok`.
        seconds: of wall time.
        rows: what it measured, also where it was ended before its time.
        log: the last lines that it printed, where it failed.
    """

    name: str
    state: str = WAITING
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    log: str = ""


@dataclass
class StepResult:
    """A step's items, in the order in which they run."""

    name: str
    title: str
    items: list[ItemResult] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every row, with its item's name."""
        yield from ((item.name, row) for item in self.items for row in item.rows)


@dataclass
class Results:
    """All of a check.

    Attributes:
        device: `cuda` or `cpu`.
        minutes: the budget.
        started: date and time.
        status: running, finished or stopped.
        seconds: so far.
        facts: of device and libraries, as the first item found them.
        steps: in order of importance.
    """

    device: str
    minutes: float
    started: str
    status: str = "running"
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)

    def step(self, name: str) -> StepResult:
        """The step of a name; an empty one where there is none."""
        return next((step for step in self.steps if step.name == name), StepResult(name, name))

    def items(self) -> Iterator[tuple[StepResult, ItemResult]]:
        """Every item with its step."""
        yield from ((step, item) for step in self.steps for item in step.items)


def judge(results: Results, step: str, item: ItemResult) -> None:
    """Add to an item's rows the shares of the measured rate and of the peak in the table."""
    rate, peak = product_rate(results), results.facts.get("peak TFLOP/s")
    for row in item.rows if step != "device" else ():
        if "TFLOP/s" in row and rate:
            row["of products"] = row["TFLOP/s"] / rate
        if "TFLOP/s" in row and peak:
            row["of peak"] = row["TFLOP/s"] / peak
        if row.get("peak GiB"):
            row["estimate of peak"] = row["estimate GiB"] / row["peak GiB"]
        if row.get("data wait, ms") is not None:
            row["data wait of step"] = row["data wait, ms"] / row["step ms"]


def product_rate(results: Results) -> float | None:
    """TFLOP/s of the best of the large matrix products; None: not measured."""
    rows = [row for _, row in results.step("device").rows()]
    return max((row["TFLOP/s"] for row in rows if "TFLOP/s" in row), default=None)


def status(results: Results) -> int:
    """The exit status: 0 where all ran and is right, else 1."""
    missing = any(item.state in (NO_TIME, WAITING) for _, item in results.items())
    return int(missing or bool(wrong(results)) or results.status != "finished")


def wrong(results: Results) -> list[str]:
    """What is not right, a line each."""
    lines = [
        f"{step.title}: {item.name}: {item.state}: {item.reason}"
        for step, item in results.items()
        if item.state in DEFECTS
    ]
    for precision, model, apart in loss_differences(results):
        if not apart <= LOSSES[precision]:
            most = f"{apart:.1e}, more than {LOSSES[precision]:.0e}"
            lines.append(f"Losses against the CPU's: {model} in {precision} is off by {most}")
    for step_name, name, row in trained(results) if results.device == CUDA else ():
        if row.get("estimate of peak", 1) < ESTIMATE[0]:
            gib = f"{row['estimate GiB']:.1f} GiB were estimated and {row['peak GiB']:.1f} taken"
            lines.append(f"Memory against its estimate: {step_name}, {name}: {gib}")
    return lines


def below(results: Results) -> list[tuple[str, str, str]]:
    """What misses its target: what, what was found, the target; nothing on a CPU."""
    return list(_below(results)) if results.device == CUDA else []


def _below(results: Results) -> Iterator[tuple[str, str, str]]:
    for step in ("mfu", "experts"):
        for name, row in results.step(step).rows():
            what = name if step == "mfu" else f"experts of {name}, {row.get('contender')}"
            if row.get("of products", 1) < TARGET:
                yield what, f"{percent(row['of products'])} of products", percent(TARGET)
    for name, share in bare_ratios(results):
        if share < AS_FAST:
            yield f"against a bare loop, {name}", percent(share), percent(AS_FAST)
    for item in results.step("loss").items:
        times = {row["chunk"]: row["ms"] for row in item.rows if "ms" in row}
        slower = times.get("as it is", 0) / min(times.values(), default=1)
        if slower > CHUNK:
            target = f"{CHUNK} of the best chunk"
            yield f"the loss of {item.name}", f"{slower:.2f} of the best chunk's time", target
    for step, name, row in trained(results):
        wait, estimate = row.get("data wait of step", 0), row.get("estimate of peak", 1)
        if wait > WAIT:
            yield f"{step}: {name}, waits for data", percent(wait), percent(WAIT)
        if estimate > ESTIMATE[1]:
            target = f"{ESTIMATE[1]} of the peak"
            yield f"{step}: {name}, memory's estimate", f"{estimate:.2f} of peak", target


def not_run(results: Results) -> list[tuple[str, str, str]]:
    """Every item or row without a result: step and item, its state, the reason."""
    found = []
    for step, item in results.items():
        name = f"{step.name}: {item.name}"
        if item.state != OK and item.state not in DEFECTS:
            found.append((name, item.state, item.reason))
        rows = [row for row in item.rows if "not run" in row]
        found += [
            (f"{name}: {r.get('contender', r.get('chunk', ''))}", "", r["not run"]) for r in rows
        ]
    return found


def trained(results: Results) -> Iterator[tuple[str, str, Row]]:
    """Step, item and row of every training run that was timed."""
    for step in results.steps:
        yield from ((step.name, name, row) for name, row in step.rows() if "peak GiB" in row)


def loss_differences(results: Results) -> Iterator[tuple[str, str, float]]:
    """Precision, model, and the largest difference of a step's loss from the CPU's in fp32."""
    rows = {name: row["losses"] for name, row in results.step("losses").rows()}
    models = dict.fromkeys(name.split(",")[0] for name in rows)
    for model, precision in itertools.product(models, LOSSES):
        right, mine = rows.get(f"{model}, fp32, CPU"), rows.get(f"{model}, {precision}, device")
        if right and mine:
            both = zip(map(float, mine), map(float, right), strict=False)
            yield precision, model, max(abs(a - b) / abs(b) for a, b in both)


def bare_ratios(results: Results) -> Iterator[tuple[str, float]]:
    """Our tokens a second over those of the bare loop."""
    rows: dict[str, Any] = dict(results.step("bare").rows())
    for way in ("not compiled", "compiled"):
        ours, bare = rows.get(f"ours, {way}"), rows.get(f"bare loop, {way}")
        if ours and bare:
            yield way, ours["tokens/s"] / bare["tokens/s"]


def time_by_kind(results: Results) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Of each profiled run the kinds of kernels with their share of the step; the rest is idle."""
    for item in results.step("profile").items:
        if kinds := [row for row in item.rows if "kind" in row]:
            step = max(kinds[0]["step ms"], sum(row["ms"] for row in kinds))
            shares = [(row["kind"], row["ms"] / step) for row in kinds]
            yield item.name, [*shares, ("no kernel", 1 - sum(share for _, share in shares))]


def headline(item: ItemResult) -> str:
    """An item in a line of the console, with the number that matters most."""
    if item.state != OK:
        return f"{item.name}: {item.state}" + (f": {item.reason}" if item.reason else "")
    rows, found = item.rows, OK
    if rows and "outcome" in rows[0]:
        outcomes = [row["outcome"] for row in rows]
        found = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "skipped"))
    for key, shown in (("of products", percent), ("TFLOP/s", number), ("tokens/s", number)):
        if found == OK and any(key in row for row in rows):
            best = shown(max(row.get(key, 0) for row in rows))
            found = f"{best} {key}"
    return f"{item.name}: {found} ({duration(item.seconds)})"


def as_html(results: Results) -> str:
    """The document."""
    facts = results.facts
    machine = ((k, v) for key, value in facts.items() for k, v in
               (value.items() if isinstance(value, dict) else [(key, value)]))  # fmt: skip
    losses = [
        (f"{m} in {p}", f"{x:.1e}", f"{LOSSES[p]:.0e}") for p, m, x in loss_differences(results)
    ]
    bare = [(f"ours of the bare loop, {way}", percent(x), percent(AS_FAST))
            for way, x in bare_ratios(results)]  # fmt: skip
    sections = [
        ("Wrong", _wrong(results)),
        ("Below target", table(("what", "found", "target"), below(results))),
        ("Where the time went", _time(results)),
        *((step.title, _step(results, step)) for step in results.steps),
        ("Compared", table(("what", "largest difference or ratio", "bound"), [*losses, *bare])),
        ("Not run", table(("what", "state", "why"), not_run(results))),
        ("Machine", pairs((k, _text(k, v)) for k, v in machine if v not in (None, []))),
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
    runs = [(name, row) for name, row in results.step("mfu").rows() if "of products" in row]
    if runs:
        name, best = max(runs, key=lambda run: run[1]["of products"])
        yield Tile("of products, best run", percent(best["of products"]), name)
    tests = [row["outcome"] for step in results.steps for _, row in step.rows() if "outcome" in row]
    if tests:
        detail = f"{tests.count('failed')} failed, {tests.count('skipped')} skipped"
        yield Tile("tests passed", str(tests.count("passed")), detail)
    yield Tile("wrong", str(len(wrong(results))))
    if results.facts.get("gpu"):
        yield Tile("below target", str(len(below(results))), f"{percent(TARGET)} of products")
    states = [item.state for _, item in results.items()]
    done = sum(state in (OK, *DEFECTS) for state in states)
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


def _time(results: Results) -> str:
    """Each profiled run's step by kinds of kernels."""
    runs = [(name, dict(shares)) for name, shares in time_by_kind(results)]
    kinds = dict.fromkeys(kind for _, shares in runs for kind in shares)
    rows = [(k, *(percent(s[k]) if k in s else "" for _, s in runs)) for k in kinds]
    head = ("share of a step", *(name for name, _ in runs))
    return table(head, rows, right=range(1, len(head)), is_wide=True)


def _step(results: Results, step: StepResult) -> str:
    """A table of the step's rows; of memory and data, of all timed runs."""
    rows = list(step.rows())
    if step.name in ("memory", "data"):
        rows = [(name, row) for at, name, row in trained(results) if at in ("mfu", step.name)]
    keys = COLUMNS[step.name].split(",") if step.name in COLUMNS else None
    keys = _joined(keys) if keys else list(dict.fromkeys(k for _, row in rows for k in row))
    keys = [key for key in keys if any(row.get(key) is not None for _, row in rows)]
    cells = [(name, *(_text(key, row.get(key)) for key in keys)) for name, row in rows]
    right = [
        n for n, key in enumerate(keys, 1) if any(isinstance(r.get(key), float) for _, r in rows)
    ]
    body = table(("item", *keys), cells, right=right, is_wide=True) if keys else ""
    return f'<p class="hint">{escape(HINTS.get(step.name, ""))}</p>{body}' if body else ""


def _joined(keys: list[str]) -> list[str]:
    """Keys such as `first step, s`, whose unit stands behind a comma."""
    found = list[str]()
    for key in keys:
        if key.startswith(" "):
            found[-1] += f",{key}"
        else:
            found.append(key)
    return found


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(_text(key, one) for one in value)
    if key in SHARES and isinstance(value, float | int):
        return percent(value)
    if key == "tokens/s":
        return short_count(value)
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else number(value, digits=4)
    return str(value)

"""gpu-check.html: a check on one page that needs nothing but itself, in the reports' style.

`runner` writes it anew after every item, from the same results as the JSON. It says first what is
wrong and what is below its target; then a section for each step, and last what did not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import verdict
from benchmarks.gpu_check.charts import share_bar, share_chart
from benchmarks.gpu_check.results import DEFECTS, OK, PAGE_NAME, Results, Row, StepResult
from benchmarks.gpu_check.verdict import TARGET, product_rate
from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import duration, number, percent, short_count
from llmfoundry.loggers.pages.page import Tile, page, pairs, table

STATUS = {"running": "not finished: running", "finished": "finished", "stopped": "stopped"}
MEANING = {  # of each step, in a sentence
    "device": "Products of bf16 matrices for two seconds each; the best rate is what all shares of"
    " products below refer to.",
    "tests": "pytest -m gpu, a process for each file.",
    "layouts": "Three steps of a small model by each kind of layout, two processes on one GPU over"
    " gloo and a GPU for each over NCCL: largest relative differences of a loss and of a gradient"
    " norm from a plain loop on whole batches there.",
    "kernels": "Largest errors beside float64, as shares of the largest value; the bounds are those"
    " of the tests.",
    "experts": "Forward and backward of the experts in bf16, by turns with a dense layer of as many"
    " active FLOPs.",
    "mfu": "Steps of shipped recipes as scripts/train.py takes them in amp_bf16: the median after"
    " the first ones, by the device's clock. FLOPs: two a multiply-add, backward twice forward,"
    " attention over whole rows, no recomputation.",
    "memory": "What tensors took at their peak beside what the run had estimated beforehand.",
    "loss": "Output head and cross-entropy with their gradients, by tokens whose logits are held.",
    "losses": "The same rows and weights on both devices; the largest difference of some steps.",
    "bare": "mpt-125m's shape without biases on whole rows, beside the shortest loop that one would"
    " write.",
    "data": "How long the loop waited for rows in each run above.",
    "save": "What the steps after a save took more than others.",
    "profile": "One step after the others by torch.profiler.",
}
SPEED = {
    "": "item",
    "batch": "batch",
    "attention": "attention",
    "ms a step": "step ms",
    "tokens/s": "tokens/s",
    "TFLOP/s": "TFLOP/s",
    "of products": "of products",
    "of peak": "of peak",
    "peak GiB": "peak GiB",
    "first step, s": "first step, s",
}
COLUMNS: dict[str, dict[str, str]] = {  # heading: key of a row
    "device": {"": "product", "ms": "ms", "TFLOP/s": "TFLOP/s", "GB/s": "GB/s"},
    "layouts": {
        "": "item",
        "layout": "test",
        "outcome": "outcome",
        "loss": "loss",
        "gradient norm": "grad norm",
        "reason": "reason",
    },
    "experts": {
        "layer": "item",
        "by": "contender",
        "tokens": "tokens",
        "ms": "ms",
        "of dense": "of dense",
        "TFLOP/s": "TFLOP/s",
        "of products": "of products",
        "saved a token, d": "saved a token, d",
        "not run": "not run",
    },
    "mfu": SPEED,
    "memory": {
        "": "item",
        "microbatch": "microbatch",
        "estimate GiB": "estimate GiB",
        "peak GiB": "peak GiB",
        "reserved GiB": "reserved GiB",
        "estimate of peak": "estimate of peak",
    },
    "loss": {
        "": "item",
        "chunk": "chunk",
        "ms": "ms",
        "TFLOP/s": "TFLOP/s",
        "of products": "of products",
        "GiB": "GiB",
        "not run": "not run",
    },
    "bare": {"": "item", "ms a step": "step ms", "tokens/s": "tokens/s", "TFLOP/s": "TFLOP/s"},
    "data": {
        "": "item",
        "waits, ms": "data wait, ms",
        "ms a step": "step ms",
        "share": "data wait of step",
    },
    "save": {
        "": "item",
        "GiB": "checkpoint GiB",
        "ms a step": "step ms",
        "blocked s": "blocked s",
        "until whole, s": "waited at the end, s",
    },
}
WORDS = (
    *("item", "product", "contender", "batch", "attention", "chunk", "not run"),
    *("test", "outcome", "reason"),
)
SHARES = ("of products", "of peak", "data wait of step", "share")


def write_page(results: Results, folder: Path) -> Path:
    """Write the page whole and return its path."""
    path = folder / PAGE_NAME
    atomic_write(path, as_html(results))
    return path


def as_html(results: Results) -> str:
    """The document."""
    facts = results.facts
    sections = [
        ("Wrong", _wrong(results)),
        ("Below target", table(("what", "found", "target"), verdict.below(results))),
        ("Where the time went", _time(results)),
        *((step.title, _step(results, step)) for step in results.steps),
        ("Not run", _not_run(results)),
        ("Machine", pairs((k, _text(k, v)) for k, v in _environment(facts))),
    ]
    return page(
        title=f"GPU check: {facts.get('gpu') or facts.get('processor') or results.device}",
        status=STATUS[results.status],
        reached=f"{duration(results.seconds)} of {results.minutes:g} minutes, {results.started}",
        tiles=list(_tiles(results)),
        sections=[(name, html) for name, html in sections if html],
    )


def _tiles(results: Results) -> Iterator[Tile]:
    facts, rate = results.facts, product_rate(results)
    peak = facts.get("peak TFLOP/s")
    if rate:
        detail = (
            f"{percent(rate / peak)} of the table's {number(peak)}" if peak else "measured, bf16"
        )
        yield Tile("TFLOP/s of matrix products", number(rate, digits=3), detail)
    runs = [(name, row) for name, row in results.step("mfu").rows() if "of products" in row]
    if runs:
        name, best = max(runs, key=lambda run: run[1]["of products"])
        yield Tile("of products, best run", percent(best["of products"]), name)
    outcomes = [row["outcome"] for _, row in results.step("tests").rows()]
    if outcomes:
        passed, failed = outcomes.count("passed"), outcomes.count("failed")
        detail = f"{failed} failed, {outcomes.count('skipped')} skipped"
        yield Tile("tests passed", str(passed), detail)
    cases = [row for _, row in results.step("kernels").rows() if "bounds" in row]
    if cases:
        bad = sum("wrong" in row for row in cases)
        yield Tile("kernel cases within bounds", f"{len(cases) - bad} of {len(cases)}")
    states = [item.state for _, item in results.items()]
    yield Tile("wrong", str(len(verdict.wrong(results))))
    if results.facts.get("gpu"):
        yield Tile(
            "below target", str(len(verdict.below(results))), f"{percent(TARGET)} of products"
        )
    done = sum(state == OK or state in DEFECTS for state in states)
    yield Tile("items run", f"{done} of {len(states)}", "the others are listed below")


def _wrong(results: Results) -> str:
    lines = verdict.wrong(results)
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    logs = "".join(
        f"<details><summary>{escape(f'{step.title}: {item.name}')}</summary>"
        f"<pre>{escape(item.log)}</pre></details>"
        for step, item in results.items()
        if item.log
    )
    return (f'<ul class="problems">{listed}</ul><p></p>' if listed else "") + logs


def _time(results: Results) -> str:
    """Each profiled run's step by kinds of kernels."""
    runs = list(verdict.time_by_kind(results))
    kinds = list(dict.fromkeys(kind for _, shares in runs for kind, _ in shares))
    rows = [
        (kind, *(percent(dict(shares)[kind]) if kind in dict(shares) else "" for _, shares in runs))
        for kind in kinds
    ]
    head = ("share of a step", *(name for name, _ in runs))
    return table(head, rows, right=range(1, len(head)), is_wide=True)


def _step(results: Results, step: StepResult) -> str:
    body = _DRAWN.get(step.name, _plain)(results, step)
    if not body:
        return ""
    chart = share_chart(results) if step.name == "mfu" else ""
    hint = f'<p class="hint">{escape(MEANING.get(step.name, ""))}</p>'
    return hint + chart + body


def _plain(results: Results, step: StepResult) -> str:
    """A table of the step's rows, by its columns."""
    columns = COLUMNS[step.name]
    rows = [(name, row) for name, row in _rows_of(results, step) if set(row) & {*columns.values()}]
    keys = [key for key in columns.values() if key == "item" or any(_has(key, r) for _, r in rows)]
    head = [name for name, key in columns.items() if key in keys]
    cells = [[_cell(key, name, row) for key in keys] for name, row in rows]
    raw = [i for i, key in enumerate(keys) if key in SHARES]
    right = [i for i, key in enumerate(keys) if key not in WORDS]
    return table(head, cells, right=right, raw=raw, is_wide=True)


def _rows_of(results: Results, step: StepResult) -> list[tuple[str, Row]]:
    if step.name in ("memory", "data"):  # of all runs
        wanted = ("mfu", step.name)
        return [(name, row) for at, name, row in verdict.trained(results) if at in wanted]
    return list(step.rows())


def _has(key: str, row: Row) -> bool:
    return row.get(key) is not None or (key == "batch" and "microbatch" in row)


def _cell(key: str, item: str, row: Row) -> str:
    if key == "item":
        return item
    if key == "batch" and "microbatch" in row:
        micro = f", {row['microbatch']} at a time" if row["microbatch"] != row["rows"] else ""
        return f"{row['rows']} x {row['row tokens']}{micro}"
    if key in SHARES and isinstance(row.get(key), float | int):
        return share_bar(row[key], TARGET if key == "of products" else None)
    return _text(key, row.get(key))


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(_text(key, one) for one in value)
    if key == "tokens/s":
        return short_count(value)
    return number(value, digits=4) if isinstance(value, float) else str(value)


def _tests(results: Results, step: StepResult) -> str:
    """Counts of each file, and every test that did not pass."""
    counts, others = [], []
    for item in step.items:
        outcomes = [row["outcome"] for row in item.rows]
        if outcomes:
            kinds = [str(outcomes.count(kind)) for kind in ("passed", "failed", "skipped")]
            counts.append((item.name, *kinds, duration(item.seconds)))
        others += [
            (item.name, row["test"], row["outcome"], row.get("wrong") or row.get("reason", ""))
            for row in item.rows
            if row["outcome"] != "passed"
        ]
    listed = table(("file", "passed", "failed", "skipped", "time"), counts, right=range(1, 5))
    details = table(("file", "test", "outcome", "reason"), others)
    folded = f"<p></p><details><summary>Not passed</summary>{details}</details>" if details else ""
    return listed + folded


def _kernels(results: Results, step: StepResult) -> str:
    """The largest errors by item and dtype; every case, folded."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for name, row in step.rows():
        groups.setdefault((name, row["dtype"]), []).append(row)
    summary = []
    for (name, dtype), rows in groups.items():
        found = [row for row in rows if "bounds" in row]
        worst = [_largest(found, key) for key in ("output error", "gradient error")]
        unserved = sum("not served" in row for row in rows)
        good = f"{sum('wrong' not in row for row in found)} of {len(found)}" if found else ""
        bounds = ", ".join(f"{b:.1e}" for b in found[-1]["bounds"]) if found else ""
        summary.append((name, dtype, good, *worst, bounds, str(unserved or "")))
    head = ("kernel", "dtype", "right", "output", "gradients", "bounds", "not served")
    listed = table(head, summary, right=range(2, 7), is_wide=True)
    return listed + "".join(_cases(name, dtype, rows) for (name, dtype), rows in groups.items())


def _cases(name: str, dtype: str, rows: Sequence[Row]) -> str:
    cells = [
        (row["case"], *(_error(row.get(k)) for k in ("output error", "gradient error")), _said(row))
        for row in rows
    ]
    body = table(("case", "output", "gradients", ""), cells, right=(1, 2))
    opened = " open" if any("wrong" in row for row in rows) else ""
    title = escape(f"{name}, {dtype}")
    return f'<details class="group"{opened}><summary>{title}</summary>{body}</details>'


def _said(row: Row) -> str:
    return row.get("wrong") or row.get("not served") or row.get("not run") or ""


def _largest(rows: Sequence[Row], key: str) -> str:
    return _error(max((row[key] for row in rows if key in row), default=None, key=float))


def _error(value: Any) -> str:
    return "" if value is None else f"{float(value):.1e}"


def _losses(results: Results, step: StepResult) -> str:
    rows = [(name, *(f"{float(x):.5f}" for x in row["losses"])) for name, row in step.rows()]
    width = max((len(row) for row in rows), default=1)
    rows = [row + ("",) * (width - len(row)) for row in rows]
    head = ("loss after", *(f"step {n}" for n in range(1, width)))
    differences = [
        (f"{model} in {precision}", *(_percent(x) for x in (apart, verdict.LOSSES[precision])))
        for precision, model, apart in verdict.loss_differences(results)
    ]
    apart = table(("", "largest difference", "bound"), differences, right=(1, 2))
    listed = table(head, rows, right=range(1, width), is_wide=True)
    return f'<div class="tables">{listed}{apart}</div>' if listed else ""


def _percent(share: float) -> str:
    """Of what is a small part of one per cent, too."""
    return f"{number(100 * share, digits=2)}%"


def _bare(results: Results, step: StepResult) -> str:
    ratios = [(way, percent(share)) for way, share in verdict.bare_ratios(results)]
    listed = _plain(results, step)
    beside = table(("", "ours of the bare loop"), ratios, right=(1,))
    return f'<div class="tables">{listed}{beside}</div>' if listed else ""


def _profile(results: Results, step: StepResult) -> str:
    """The largest kernels of each run."""
    parts = []
    for item in step.items:
        rows = [
            (row["kernel"], str(row["calls"]), number(row["ms"]), share_bar(row["share"], None))
            for row in item.rows
            if "kernel" in row
        ]
        head = ("kernel", "calls", "ms", "of all kernels")
        body = table(head, rows, right=(1, 2, 3), raw=(3,), is_wide=True)
        if body:
            parts.append(f'<p class="hint">{escape(item.name)}</p>{body}')
    return "".join(parts)


def _not_run(results: Results) -> str:
    return table(("what", "state", "why"), verdict.not_run(results))


def _environment(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from value.items()
        elif value not in (None, []):
            yield key, value


_DRAWN = {
    "tests": _tests,
    "kernels": _kernels,
    "losses": _losses,
    "bare": _bare,
    "profile": _profile,
}

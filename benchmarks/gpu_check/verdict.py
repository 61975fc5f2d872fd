"""What a check's numbers mean: what is wrong, what is below its target, where the time went.

`runner` calls `judge` after each item, which adds shares to its rows; console and page show the
rest. Targets are for GPUs alone: on a CPU the numbers show that the check works, and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_check.plan import CUDA
from benchmarks.gpu_check.results import DEFECTS, MISSING, OK, ItemResult, Results, Row
from llmfoundry.loggers.console import duration, number, percent

TARGET = 0.6  # of the measured rate of matrix products
AS_FAST = 0.95  # of a bare loop's speed
WAIT = 0.01  # of a step, for data
CHUNK = 1.1  # of the best chunk's time
ESTIMATE = (0.95, 1.5)  # of the peak: below, a run would have ended; above, memory is left unused
LOSSES = {"fp32": 1e-3, "amp_bf16": 2e-2}  # largest share by which a loss may differ from the CPU's


def product_rate(results: Results) -> float | None:
    """TFLOP/s of the best of the large matrix products; None where they were not measured."""
    rows = [row for _, row in results.step("device").rows()]
    return max((row["TFLOP/s"] for row in rows if "TFLOP/s" in row), default=None)


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


def wrong(results: Results) -> list[str]:
    """What is not right, a line each."""
    lines = [
        f"{step.title}: {item.name}: {item.state}: {item.reason}"
        for step, item in results.items()
        if item.state in DEFECTS
    ]
    lines += [line for model in models(results) for line in _losses_apart(results, model)]
    return [*lines, *_underestimates(results)]


def _losses_apart(results: Results, model: str) -> Iterator[str]:
    for precision, name, difference in loss_differences(results):
        if name == model and not difference <= LOSSES[precision]:
            yield (
                f"Losses beside the CPU's: {model} in {precision} is off by {difference:.1e},"
                f" more than {LOSSES[precision]:.0e}"
            )


def _underestimates(results: Results) -> Iterator[str]:
    for step, name, row in trained(results):
        share = row.get("estimate of peak")
        if results.device == CUDA and share is not None and share < ESTIMATE[0]:
            yield (
                f"Memory beside its estimate: {step}, {name}: {row['estimate GiB']:.1f} GiB were"
                f" estimated and {row['peak GiB']:.1f} taken"
            )


def below(results: Results) -> list[tuple[str, str, str]]:
    """What misses its target: what, what was found, the target; nothing on a CPU."""
    if results.device != CUDA:
        return []
    found = []
    for step in ("mfu", "experts"):
        for name, row in results.step(step).rows():
            share = row.get("of products")
            what = name if step == "mfu" else f"experts of {name}, {row.get('contender')}"
            if share is not None and share < TARGET:
                found.append((what, f"{percent(share)} of products", percent(TARGET)))
    for name, share in bare_ratios(results):
        if share < AS_FAST:
            found.append((f"beside a bare loop, {name}", percent(share), percent(AS_FAST)))
    for name, slower in loss_excess(results):
        if slower > CHUNK:
            target = f"{CHUNK} of the best chunk"
            found.append((f"the loss of {name}", f"{slower:.2f} of the best chunk's time", target))
    for step, name, row in trained(results):
        wait, estimate = row.get("data wait of step", 0), row.get("estimate of peak", 1)
        if wait > WAIT:
            found.append((f"{step}: {name}, waits for data", percent(wait), percent(WAIT)))
        if estimate > ESTIMATE[1]:
            target = f"{ESTIMATE[1]} of the peak"
            found.append((f"{step}: {name}, memory's estimate", f"{estimate:.2f} of peak", target))
    return found


def not_run(results: Results) -> list[tuple[str, str, str]]:
    """Every item without a result: step and item, its state, the reason."""
    return [
        (f"{step.name}: {item.name}", item.state, item.reason)
        for step, item in results.items()
        if item.state != OK and item.state not in DEFECTS
    ] + [
        (
            f"{step.name}: {item.name}: {row.get('case', row.get('contender', ''))}",
            "",
            row["not run"],
        )
        for step, item in results.items()
        for row in item.rows
        if "not run" in row
    ]


def trained(results: Results) -> Iterator[tuple[str, str, Row]]:
    """Step, item and row of every training run that was timed."""
    for step in results.steps:
        yield from ((step.name, name, row) for name, row in step.rows() if "peak GiB" in row)


def models(results: Results) -> list[str]:
    """Of the runs that are compared with a CPU's."""
    return list(dict.fromkeys(name.split(",")[0] for name, _ in results.step("losses").rows()))


def loss_differences(results: Results) -> Iterator[tuple[str, str, float]]:
    """Precision, model, and the largest difference of a step's loss from the CPU's in fp32."""
    rows = {name: row["losses"] for name, row in results.step("losses").rows()}
    for model, precision in itertools.product(models(results), LOSSES):
        right, mine = rows.get(f"{model}, fp32, CPU"), rows.get(f"{model}, {precision}, device")
        if right and mine:
            pairs = zip(map(float, mine), map(float, right), strict=False)
            yield precision, model, max(abs(a - b) / abs(b) for a, b in pairs)


def bare_ratios(results: Results) -> Iterator[tuple[str, float]]:
    """Our tokens a second over those of the bare loop."""
    rows: dict[str, Any] = dict(results.step("bare").rows())
    for way in ("not compiled", "compiled"):
        ours, bare = rows.get(f"ours, {way}"), rows.get(f"bare loop, {way}")
        if ours and bare:
            yield way, ours["tokens/s"] / bare["tokens/s"]


def loss_excess(results: Results) -> Iterator[tuple[str, float]]:
    """Of each shape, the time of the loss as it is over that of the best chunk."""
    for item in results.step("loss").items:
        times = {row["chunk"]: row["ms"] for row in item.rows if "ms" in row}
        if "as it is" in times and len(times) > 1:
            yield item.name, times["as it is"] / min(times.values())


def time_by_kind(results: Results) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Of each profiled run the kinds of kernels with their share of the step; the rest is idle."""
    for item in results.step("profile").items:
        kinds = [row for row in item.rows if "kind" in row]
        if not kinds:
            continue
        step = max(kinds[0]["step ms"], sum(row["ms"] for row in kinds))
        shares = [(row["kind"], row["ms"] / step) for row in kinds]
        yield item.name, [*shares, ("no kernel", 1 - sum(share for _, share in shares))]


def status(results: Results) -> int:
    """The exit status: 0 where all ran and is right, else 1."""
    missing = any(item.state in MISSING for _, item in results.items())
    cut = any("no time" in row["not run"] for _, _, row in _rows_not_run(results))
    return int(missing or cut or bool(wrong(results)) or results.status != "finished")


def _rows_not_run(results: Results) -> Iterator[tuple[str, str, Row]]:
    for step, item in results.items():
        yield from ((step.name, item.name, row) for row in item.rows if "not run" in row)


def headline(results: Results, item: ItemResult) -> str:
    """An item in a line of the console."""
    text = f"{item.name}: {item.state}" + (f": {item.reason}" if item.reason else "")
    if item.state != OK:
        return text
    return f"{item.name}: {_number(item) or OK} ({duration(item.seconds)})"


def _number(item: ItemResult) -> str:
    """The number that matters most."""
    rows, first = item.rows, item.rows[0] if item.rows else {}
    if "outcome" in first:
        outcomes = [row["outcome"] for row in rows]
        kinds = [f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "skipped")]
        return ", ".join(kinds)
    if "output error" in first or "not served" in first:
        errors = [max(r["output error"], r.get("gradient error", 0)) for r in rows if "bounds" in r]
        return (
            f"{len(errors)} cases, errors up to {max(errors):.1e}" if errors else "nothing served"
        )
    if "blocked s" in first:
        return "blocked " + ", ".join(f"{s:.2f} s" for s in first["blocked s"])
    if "of products" in first:
        best = max(row.get("of products", 0) for row in rows)
        return (
            f"{percent(best)} of products, {number(max(r.get('TFLOP/s', 0) for r in rows))} TFLOP/s"
        )
    if "TFLOP/s" in first:
        return f"{number(max(row.get('TFLOP/s', 0) for row in rows))} TFLOP/s"
    if "tokens/s" in first:
        return f"{number(first['tokens/s'])} tokens/s"
    return ""

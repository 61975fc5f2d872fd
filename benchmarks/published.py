"""The plan compared with training runs that others published: predicted over published time.

    python -m benchmarks.published [--only a100 llama] [--runs FILE.csv] [--layouts]

Rows are data: `published/llm_foundry.csv`, the MPT table of LLM Foundry's benchmarking page (A100
and H100, 125M to 70B parameters, 8 to 512 GPUs), `published/others.yaml` and `published/runs.csv`.
`--runs` predicts the rows of another file with the columns of `runs.csv` instead. The score leaves
out the rows of FITTED and those that FLASH_1 was fitted to. `published/sources.yaml` has what is
known of the machines and programs of a source: power limits, the dtype of communicated gradients,
kernels. Scores are per source.

`--layouts` searches the fastest layout for each row (of LLM Foundry's those of 2,048 tokens), and
says how much faster than the authors' it would have been.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import table
from benchmarks.layouts import GPU, spread
from llmfoundry.errors import UserError
from llmfoundry.models.counts import flops_per_token
from llmfoundry.plan.communication import CollectiveTraffic, communication
from llmfoundry.plan.layouts import Cluster, ParallelLayout, rank
from llmfoundry.plan.memory import estimate
from llmfoundry.plan.microbatch_sizes import memory_of_gpu, rooms
from llmfoundry.plan.search import ActivationChoice
from llmfoundry.plan.seconds import FLASH_3, FLEX, Speeds, StepSeconds, speeds, step_seconds
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.parallel import recomputation
from llmfoundry.recipe.train import ResolvedTrainRecipe

FOLDER = Path(__file__).parent / "published"
FITTED = {("mpt-1b", 8), ("mpt-7b", 8), ("mpt-30b", 8)}
"""Model and GPUs of the rows of 2,048 tokens, on H100 and A100-80GB, that fitted `sustained`."""
FLASH_1 = {"a100": 0.34, "h100": 0.21}
"""Share of tflops that FlashAttention 1 reaches forward and backward, with 128 numbers a head: 105
of 312 on A100 (Dao, 2023, figure 4); 210 of 989 on H100, which no paper has: fitted to the rows of
65,536 tokens of the same table, in which little else takes time. The score leaves these out too."""


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        source: key in `published/sources.yaml`.
        name: name of the run.
        recipe: resolved recipe, with the published layout.
        hardware: its GPUs.
        reached: achievable speeds of its GPU and its program.
        seconds: published seconds of a step.
        is_best: whether the plan's best layout is predicted, because the published one is unknown
            or has pipeline stages.
        is_fitted: whether a constant was fitted to it.
        halves_gradients: whether gradients were communicated in bfloat16.
        recomputed: share of the blocks' matmuls that are recomputed in addition.
        has_deepep: whether a token is sent once to a rank, and once to a node, that has any of its
            experts.
        is_whole_run: whether its time has failures, evaluation and long context.
        note: assumptions.
    """

    source: str
    name: str
    recipe: ResolvedTrainRecipe
    hardware: Hardware
    reached: Speeds
    seconds: float
    is_best: bool = False
    is_fitted: bool = False
    halves_gradients: bool = False
    recomputed: float = 0.0
    has_deepep: bool = False
    is_whole_run: bool = False
    note: str = ""

    @property
    def setting(self) -> Cluster:
        """Its GPUs, to look for layouts."""
        return Cluster(self.hardware.gpus, self.reached, memory_of_gpu(self.hardware))

    def predict(self) -> StepSeconds:
        """Return the seconds of a step in the published layout.

        Raises:
            UserError: the best layout is predicted, and none fits.
        """
        if self.is_best:
            ranking = rank(self.recipe, self.setting, 1)
            if not ranking.best:
                raise UserError(f"{self.name}: no layout fits")
            return ranking.best[0].step
        rows = self.recipe.device_train_microbatch_size
        assert isinstance(rows, int)
        gpus, node = self.hardware.gpus, self.reached.gpu.node
        traffic = map(self._sent, communication(self.recipe, gpus, rows, node))
        step = step_seconds(self.recipe, gpus, rows, self.reached, sent=traffic)
        return self._with_recomputation(step)

    def _sent(self, transfer: CollectiveTraffic) -> CollectiveTraffic:
        """Return the communication of the program of this run."""
        inside, between = 1.0, 1.0
        if self.halves_gradients and transfer.what == "gradients":
            inside = between = 0.5
        if self.has_deepep and transfer.what == "tokens":
            top_k = self.recipe.model.ffn_config.moe_top_k
            nodes = -(-transfer.processes // self.reached.gpu.node)
            inside = _distinct(transfer.processes, top_k) / top_k
            between = _distinct(nodes, top_k) / top_k
        leaving = transfer.between * between
        staying = (transfer.sent - transfer.between) * inside
        return transfer._replace(sent=round(staying + leaving), between=round(leaving))

    def _with_recomputation(self, step: StepSeconds) -> StepSeconds:
        """Add the matmuls that the selective checkpointing of this program recomputes."""
        checkpointing = recomputation(self.recipe.parallel.activation_checkpointing)
        if checkpointing != "selective" or not self.recomputed:
            return step
        model = self.recipe.model
        of_head = 2 * model.vocab_size * model.d_model
        flops = flops_per_token(model, 0) / 3  # of the forward pass, without attention
        forward = step.products / 3 * (1 - of_head / flops)
        return dataclasses.replace(step, again=step.again + self.recomputed * forward)


def _distinct(places: int, top_k: int) -> float:
    """Return the expected number of different places that hold a token's experts."""
    return float(places * (1 - (1 - 1 / places) ** top_k))


def llm_foundry(models: Sequence[str] = (), every: int = 1) -> Iterator[Row]:
    """MPT on A100 and H100 by LLM Foundry's table, FP8 left out.

    Args:
        models: those that are asked for; empty: all.
        every: one in so many of their rows.
    """
    with (FOLDER / "llm_foundry.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not models or row["model"] in models]
    yield from map(_foundry_row, rows[::every])


def _foundry_row(row: dict[str, str]) -> Row:
    gpus = int(row["gpus"])
    words = [
        f"max_seq_len={row['max_seq_len']}",
        f"global_train_batch_size={row['rows']}",
        f"device_train_microbatch_size={row['microbatch']}",
        f"parallel.activation_checkpointing={row['recomputation']}",
    ]
    if row["sharding"] == "grads":
        words.append("parallel.reshard_after_forward=false")
    recipe = spread(row["model"], words)
    hardware = _hardware(f"{gpus}x{row['gpu']}", {}, _sources()["LLM Foundry"])
    step = int(row["rows"]) * int(row["max_seq_len"])
    return Row(
        f"LLM Foundry, {row['gpu']}",
        f"{row['model']} {row['max_seq_len']} {row['recomputation']}",
        recipe,
        hardware,
        _with_attention(speeds(hardware.gpu, recipe), "1", row["gpu"]),
        step / float(row["tokens_s_gpu"]) / gpus,
        is_fitted=_is_fitted(row),
        halves_gradients=row["reduced_in"] == "bf16",
    )


def _is_fitted(row: dict[str, str]) -> bool:
    """Whether `sustained` or FLASH_1 was fitted to it."""
    if row["max_seq_len"] == "65536":
        return row["gpu"] == "h100"
    is_model = (row["model"], int(row["gpus"])) in FITTED
    return is_model and row["max_seq_len"] == "2048" and row["gpu"] != "a100-40gb"


def _with_attention(reached: Speeds, kernel: str, gpu: str) -> Speeds:
    """Return the speeds with another kernel than FlashAttention 2: 1, 3 or FlexAttention."""
    rates = {
        "1": FLASH_1.get(gpu.partition("-")[0], 0.0) * reached.gpu.tflops * 1e12,
        "2": reached.attention,
        "3": FLASH_3 * reached.attention,
        "FlexAttention": FLEX * reached.attention,
    }
    return dataclasses.replace(reached, attention=rates[kernel])


@cache
def _sources() -> dict[str, dict[str, Any]]:
    """Return what is known of each source."""
    sources: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "sources.yaml").read_text())
    return sources


def _hardware(text: str, changes: Mapping[str, Any], source: Mapping[str, Any]) -> Hardware:
    """Return the GPUs of a run: the data sheet, with what the run and its source change."""
    hardware = Hardware.parse(text, "gpus")
    gpu = hardware.gpu
    sustained = source.get("sustained", {}).get(hardware.name, gpu.sustained)
    power = source.get("power", 1.0)
    gpu = dataclasses.replace(gpu, sustained=sustained, power=power, **changes)
    return dataclasses.replace(hardware, gpu=gpu)


def _row(
    source: str,
    name: str,
    recipe: ResolvedTrainRecipe,
    hardware: Hardware,
    seconds: float,
    *,
    attention: str,
    **others: Any,
) -> Row:
    """Return a run with what is known of its source."""
    known = _sources().get(source, {})
    reached = _with_attention(speeds(hardware.gpu, recipe), attention, hardware.name)
    rate = reached.attention / known.get("documents", 1.0)
    cast = known.get("cast", reached.cast)
    reached = dataclasses.replace(reached, attention=rate, cast=cast)
    return Row(
        source,
        name,
        recipe,
        hardware,
        reached,
        seconds,
        is_fitted=known.get("fitted", False),
        halves_gradients=known.get("gradients") == "bf16",
        recomputed=known.get("recomputed", 0.0),
        has_deepep=known.get("dispatch") == "deepep",
        **others,
    )


def others() -> Iterator[Row]:
    """Yield the runs of `others.yaml`."""
    for row in yaml.safe_load((FOLDER / "others.yaml").read_text()):
        source = _sources()[row["source"]]
        hardware = _hardware(f"{row['gpus']}x{row['gpu']}", row.get("hardware", {}), source)
        recipe = spread(row["recipe"], row["set"])
        yield _row(
            row["source"],
            row["name"],
            recipe,
            hardware,
            _published_seconds(row, recipe, hardware),
            attention=str(row.get("attention", 2)),
            is_best=row["layout"] == "best",
            is_whole_run=row.get("whole_run", False),
            note=row["note"],
        )


def runs(file: Path = FOLDER / "runs.csv") -> Iterator[Row]:
    """Yield the runs of a file with the columns of `runs.csv`."""
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            source = _sources().get(row["source"], {})
            changes = [change.split("=") for change in row["hardware_changes"].split()]
            typed = {name: yaml.safe_load(value) for name, value in changes}
            hardware = _hardware(row["hardware"], typed, source)
            recipe = spread(row["base_recipe"], _OVERRIDE.findall(row["overrides"]))
            tokens = recipe.global_train_batch_size * recipe.max_seq_len
            yield _row(
                row["source"],
                row["name"],
                recipe,
                hardware,
                tokens / hardware.gpus / float(row["tokens_per_s_per_gpu"]),
                attention=row["attention"].split()[-1],
                is_best=row["plan_own_layout"] == "True",
                note=row["note"],
            )


_OVERRIDE = re.compile(r"(?:\{[^}]*\}|\S)+")  # key=value; a value in braces may have spaces


def _published_seconds(
    row: dict[str, Any], recipe: ResolvedTrainRecipe, hardware: Hardware
) -> float:
    """Of a step, from whatever was published."""
    step = recipe.global_train_batch_size * recipe.max_seq_len
    if "tokens_s_gpu" in row:
        return float(step / row["tokens_s_gpu"] / hardware.gpus)
    if "mfu" in row:
        flops = step * flops_per_token(recipe.model, recipe.max_seq_len) / hardware.gpus
        return float(flops / (row["mfu"] / 100 * hardware.gpu.tflops * 1e12))
    hours = row["gpu_hours"] if "gpu_hours" in row else row["days"] * 24 * hardware.gpus
    return float(hours * 3600 / hardware.gpus * step / row["tokens"])


@dataclass
class Score:
    """Predicted over published time.

    Attributes:
        ratios: of the rows that were not fitted.
    """

    ratios: list[float] = field(default_factory=list)

    def line(self, what: str) -> str:
        """Median, and how many are near."""
        off = sorted(max(ratio, 1 / ratio) for ratio in self.ratios)
        near = sum(one <= 1.15 for one in off)
        return (
            f"{what}: {len(off)} rows, median {statistics.median(self.ratios):.2f}, within 15 %"
            f" {near}, worst {min(self.ratios):.2f} and {max(self.ratios):.2f}"
        )


COLUMNS = {
    "run": "{}",
    "GPUs": "{}",
    "published s": "{:.2f}",
    "predicted s": "{:.2f}",
    "predicted / published": "{:.2f}",
    "MFU": "{:.1%}",
    "of it": "{}",
    "note": "{}",
}


def compare(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each row, and the score of those that were not fitted."""
    lines, scores = [], dict[str, Score]()
    for row in rows:
        step = row.predict()
        ratio = step.total / row.seconds
        print(f"{row.name}: {ratio:.2f}", file=sys.stderr, flush=True)
        if not row.is_fitted:
            source = WHOLE_RUNS if row.is_whole_run else row.source
            scores.setdefault(source, Score()).ratios.append(ratio)
        parts = sorted(step.split().items(), key=lambda one: -one[1])[:4]
        notes = ["fitted"] * row.is_fitted + ["best layout"] * row.is_best + [row.note]
        lines.append(
            {
                "run": row.name,
                "GPUs": f"{row.hardware.gpus} {row.hardware.name}",
                "published s": row.seconds,
                "predicted s": step.total,
                "predicted / published": ratio,
                "MFU": step.mfu(row.hardware.gpu),
                "of it": ", ".join(f"{what} {n / step.total:.0%}" for what, n in parts),
                "note": "; ".join(filter(None, notes)),
            }
        )
    yield from table(lines, COLUMNS)
    yield ""
    for name, score in scores.items():
        yield score.line(name)
    steps = [ratio for name in scores if name != WHOLE_RUNS for ratio in scores[name].ratios]
    if steps:
        yield Score(steps).line(f"all but {WHOLE_RUNS}")


WHOLE_RUNS = "GPU-hours of whole runs"


LAYOUT_COLUMNS = {
    "run": "{}",
    "GPUs": "{}",
    "authors'": "{}",
    "plan's": "{}",
    "faster by": "{:.1%}",
    "same": "{}",
}


def chosen(rows: Sequence[Row]) -> Iterator[str]:
    """Which layout the plan would have taken, beside the authors'."""
    found = []
    for row in rows:
        if row.is_best:
            continue
        own = _own(row)
        best = rank(row.recipe, row.setting, 1).best
        if not best:
            continue
        gain = own.step.total / best[0].step.total - 1
        found.append(
            {
                "run": row.name,
                "GPUs": f"{row.hardware.gpus} {row.hardware.name}",
                "authors'": own.name() + ("" if own.fits else f" ({own.bytes / 2**30:.0f} GiB)"),
                "plan's": best[0].name(),
                "faster by": gain,
                "same": "yes" if gain < 0.02 else "no",
            }
        )
    same = sum(one["same"] == "yes" for one in found)
    yield from table(found, LAYOUT_COLUMNS)
    yield f"{same} of {len(found)} authors' layouts are within 2 % of the plan's"


def _own(row: Row) -> ParallelLayout:
    """The authors'."""
    degrees = row.recipe.parallel.degrees(row.hardware.gpus)
    parallel = dataclasses.replace(
        row.recipe.parallel,
        data_parallel_replicate_degree=degrees.replicate,
        data_parallel_shard_degree=degrees.shard,
    )
    recipe = dataclasses.replace(row.recipe, parallel=parallel)
    need = estimate(recipe, row.hardware.gpus, device=GPU)
    room = rooms(row.setting.available, GPU)[-1]
    choice = ActivationChoice(str(parallel.activation_checkpointing))
    return ParallelLayout(recipe, row.predict(), need, room, choice)


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks.published")
    parser.add_argument("--only", nargs="+", default=[], help="words of the runs' names or GPUs")
    parser.add_argument("--layouts", action="store_true", help="search layouts as well")
    parser.add_argument("--every", type=int, default=1, help="one in so many rows of the table")
    parser.add_argument("--runs", type=Path, help="file with the columns of published/runs.csv")
    given = parser.parse_args()
    if given.runs is None:
        rows = [*llm_foundry(every=given.every), *others(), *runs()]
    else:
        rows = [*runs(given.runs)]
    rows = [
        row
        for row in rows
        if not given.only
        or any(w.lower() in f"{row.name} {row.hardware.name}".lower() for w in given.only)
    ]
    print("\n".join(compare(rows)), flush=True)
    if given.layouts:
        plain = [
            row for row in rows if " 2048 " in row.name or not row.source.startswith("LLM Foundry")
        ]
        print("\n".join(["", *chosen(plain)]))


if __name__ == "__main__":
    main()

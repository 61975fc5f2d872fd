"""The plan beside training runs that others published: predicted over published time.

    python -m benchmarks.published [--only a100 llama] [--layouts]

Rows are data: `published/llm_foundry.csv`, the MPT table of LLM Foundry's benchmarking page (A100
and H100, 125M to 70B parameters, 8 to 512 GPUs), and `published/others.yaml`. No constant is fitted
to a row that is scored: `Gpu.sustained` was fitted, once for Ampere and once for Hopper, to the
rows of FITTED, FLASH_1 of H100 to those of 65,536 tokens, and the score leaves them out. What is
known of the software is modeled: whether it was compiled, in what dtype gradients travelled, and
which FlashAttention it had.

`--layouts` searches the fastest layout for each row (of LLM Foundry's those of 2,048 tokens), and
says how much faster than the authors' it would have been.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import table
from benchmarks.layouts import GPU, spread
from llmfoundry.errors import UserError
from llmfoundry.models.counts import flops_per_token
from llmfoundry.plan.communication import communication
from llmfoundry.plan.layouts import Cluster, ParallelLayout, rank
from llmfoundry.plan.memory import estimate
from llmfoundry.plan.microbatch_sizes import memory_of_gpu, rooms
from llmfoundry.plan.search import ActivationChoice
from llmfoundry.plan.seconds import FLASH_3, Speeds, StepSeconds, speeds, step_seconds
from llmfoundry.recipe.hardware import Hardware
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
        name: of it.
        recipe: filled, with its layout where that is published.
        hardware: of it.
        reached: what its GPU and its software reach.
        seconds: of a step, as published.
        is_best: whether its layout is the plan's own best, as it is not published or not ours.
        is_fitted: whether a constant was fitted to it.
        halves_gradients: whether gradients travelled in bfloat16.
        note: what was assumed.
    """

    name: str
    recipe: ResolvedTrainRecipe
    hardware: Hardware
    reached: Speeds
    seconds: float
    is_best: bool = False
    is_fitted: bool = False
    halves_gradients: bool = False
    note: str = ""

    @property
    def setting(self) -> Cluster:
        """Its GPUs, to look for layouts."""
        return Cluster(self.hardware.gpus, self.reached, memory_of_gpu(self.hardware))

    def predict(self) -> StepSeconds:
        """A step's seconds in the published layout.

        Raises:
            UserError: the best layout is asked for, and none fits.
        """
        if self.is_best:
            found = rank(self.recipe, self.setting, 1).best
            if not found:
                raise UserError(f"{self.name}: no layout fits")
            return found[0].step
        rows = self.recipe.device_train_microbatch_size
        assert isinstance(rows, int)
        sent = communication(self.recipe, self.hardware.gpus, rows, self.reached.gpu.node)
        if self.halves_gradients:
            sent = [
                one._replace(sent=one.sent // 2, between=one.between // 2)
                if one.what == "gradients"
                else one
                for one in sent
            ]
        return step_seconds(self.recipe, self.hardware.gpus, rows, self.reached, sent=sent)


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
    recipe, hardware = spread(row["model"], words), Hardware.parse(f"{gpus}x{row['gpu']}", "gpus")
    step = int(row["rows"]) * int(row["max_seq_len"])
    return Row(
        f"{row['model']} {row['max_seq_len']} {row['recomputation']}",
        recipe,
        hardware,
        _with_attention(speeds(hardware.gpu, recipe), 1, row["gpu"]),
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


def _with_attention(reached: Speeds, version: int, gpu: str) -> Speeds:
    """Of another FlashAttention than 2."""
    peak = reached.gpu.tflops * 1e12
    if version == 1:
        return dataclasses.replace(reached, attention=FLASH_1[gpu.partition("-")[0]] * peak)
    if version == 3:
        return dataclasses.replace(reached, attention=FLASH_3 * reached.gpu.attention * peak)
    return reached


def others() -> Iterator[Row]:
    """All other runs."""
    for row in yaml.safe_load((FOLDER / "others.yaml").read_text()):
        hardware = Hardware.parse(f"{row['gpus']}x{row['gpu']}", "gpus")
        changed = dataclasses.replace(hardware.gpu, **row.get("hardware", {}))
        hardware = dataclasses.replace(hardware, gpu=changed)
        recipe = spread(row["recipe"], row["set"])
        reached = _with_attention(speeds(changed, recipe), row.get("attention", 2), row["gpu"])
        yield Row(
            row["name"],
            recipe,
            hardware,
            reached,
            _published_seconds(row, recipe, hardware),
            is_best=row["layout"] == "best",
            note=row["note"],
        )


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
    found, scores = [], dict[str, Score]()
    for row in rows:
        step = row.predict()
        print(f"{row.name}: {step.total / row.seconds:.2f}", file=sys.stderr, flush=True)
        ratio = step.total / row.seconds
        if not row.is_fitted:
            scores.setdefault(row.hardware.name, Score()).ratios.append(ratio)
        parts = sorted(step.split().items(), key=lambda one: -one[1])[:4]
        notes = ["fitted"] * row.is_fitted + ["best layout"] * row.is_best + [row.note]
        found.append(
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
    yield from table(found, COLUMNS)
    yield ""
    for name, score in scores.items():
        yield score.line(name)
    yield Score([ratio for score in scores.values() for ratio in score.ratios]).line("all")


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
    given = parser.parse_args()
    rows = [*llm_foundry(every=given.every), *others()]
    rows = [
        row
        for row in rows
        if not given.only
        or any(w.lower() in f"{row.name} {row.hardware.name}".lower() for w in given.only)
    ]
    print("\n".join(compare(rows)))
    if given.layouts:
        plain = [row for row in rows if " 2048 " in row.name or not row.name.startswith("mpt-")]
        print("\n".join(["", *chosen(plain)]))


if __name__ == "__main__":
    main()

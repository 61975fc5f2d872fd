"""The layouts of a recipe on thousands of ranks: built and listed; what they send, counted.

    python -m benchmarks.layouts build [dbrx] [--ranks 512 3072] [--only hsdp_ep fsdp_tp]
    python -m benchmarks.layouts sent [mpt-7b llama-8b dbrx] [--ranks 512] [--layers 2]

`build`: one process is in turn the first, a middle and the last of a group whose other ranks do not
exist (`memory.py`). The whole model is parallelized as in a run, and its optimizer makes the
moments. Of each layout: whether it fits a GPU of 80 GB and with which settings, bytes of parameters
and moments next to the estimate, what a step sends by the formulas of `plan/communication.py`, how
much of it between nodes of 8, how long nothing is computed meanwhile, seconds and MFU of a step by
`plan/seconds.py`, which ranks form groups, and which rows of a block's matrices each holds.

`sent`: a recipe at its own width, with fewer blocks, takes a step of two microbatches of one row on
fake tensors. What it sends is counted by `SentBytes` and computed by `plan/communication.py`. The
last column is of the kind of message and number of processes that differs most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import table
from benchmarks.memory import CPU, GPU, built, count, decide, local_bytes, spread
from llmfoundry.builders.model import matmul_dtype
from llmfoundry.distributed.mesh import Meshes
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops.shard_layout import local_blocks
from llmfoundry.plan.communication import CollectiveTraffic, communication, waited_for
from llmfoundry.plan.memory import GIB, estimate
from llmfoundry.plan.seconds import StepSeconds, speeds, step_seconds
from llmfoundry.recipe.hardware import GPUS
from llmfoundry.recipe.parallel import RECOMPUTED, Degrees, limits
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard

LAYOUTS = {  # by name: the degrees that are not 1; replicas are what is left
    "fsdp": "shard=-1",
    "hsdp": "shard=128",
    "hsdp_ep": "shard=64 expert=8",
    "hsdp_ep8": "shard=128 expert=8",
    "hsdp_ep16": "shard=128 expert=16",  # over two nodes of 8
    "fsdp_cp": "shard=64 context=8",
    "fsdp_tp": "shard=64 tensor=8",
    "hsdp_tp_ep": "shard=16 tensor=8 expert=8",
    "hsdp_cp_ep": "shard=32 context=4 expert=8",
    "all": "shard=16 context=2 tensor=4 expert=16",
}
H100 = GPUS["H100"]
ROWS = {512: 4096, 3072: 6144}  # of a step: as many for each process that reads its own
SHOWN = ("attn.Wqkv.weight", "attn.out_proj.weight", "ffn.experts.w1")


@dataclass(frozen=True)
class Built:
    """A layout on some ranks.

    Attributes:
        recipe: filled, auto decided; how much is computed again and rows at a time.
        fits: whether by the estimate it fits a GPU of 80 GB.
        need: GiB of it.
        parameters: bytes of the first rank's parameters.
        moments: of its optimizer.
        expected: the estimate of these two.
        places: lines, of each rank looked at, with its groups and its rows.
        seconds: that all of this took.
    """

    recipe: ResolvedTrainRecipe
    fits: bool
    need: float
    parameters: int
    moments: int
    expected: tuple[int, int]
    places: list[str]
    seconds: float

    @property
    def messages(self) -> list[CollectiveTraffic]:
        """What a process sends in a step."""
        rows = self.recipe.device_train_microbatch_size
        assert isinstance(rows, int)
        return communication(self.recipe, self.recipe.parallel.written_degrees.world, rows)

    @property
    def step(self) -> StepSeconds:
        """A step's seconds on H100 in nodes of 8."""
        rows = self.recipe.device_train_microbatch_size
        assert isinstance(rows, int)
        world = self.recipe.parallel.written_degrees.world
        return step_seconds(self.recipe, world, rows, speeds(H100, self.recipe))


def words(layout: str, ranks: int) -> list[str]:
    """Of a recipe on so many ranks."""
    given = dict(word.split("=") for word in LAYOUTS[layout].split())
    free = "1" if "-1" in given.values() else "-1"
    found = [f"parallel.data_parallel_replicate_degree={free}"]
    for name in ("shard", "context", "tensor", "expert"):
        prefix = "data_parallel_shard" if name == "shard" else f"{name}_parallel"
        found.append(f"parallel.{prefix}_degree={given.get(name, '1')}")
    return [*found, f"global_train_batch_size={ROWS.get(ranks, ranks)}"]


def build(name: str, layout: str, ranks: int, looked_at: Iterable[int] | None = None) -> Built:
    """Spread a recipe's model by a layout, as each of some ranks; None: three of them."""
    began, places, counted = time.perf_counter(), list[str](), list[tuple[int, int]]()
    recipe = spread(name, words(layout, ranks))
    degrees = recipe.parallel.degrees(ranks)
    recipe.parallel.data_parallel_replicate_degree = degrees.replicate
    recipe.parallel.data_parallel_shard_degree = degrees.shard
    try:
        decide(recipe, ranks)
        fits = True
    except UserError:
        recipe.parallel.activation_checkpointing = "whole"
        recipe.device_train_microbatch_size, fits = 1, False
    for rank in (0, ranks // 2 + 1, ranks - 1) if looked_at is None else looked_at:
        with built(recipe, ranks, rank=rank) as (root, meshes):
            counted.append(local_bytes(root, _moments(recipe, root)))
            places += [f"rank {rank}", *groups(meshes), *rows(root)]
    need, microbatch = estimate(recipe, ranks, device=GPU), recipe.device_train_microbatch_size
    assert isinstance(microbatch, int)
    most = max(counted)
    return Built(
        recipe,
        fits,
        need.total(microbatch) / GIB,
        *most,
        (need.parameter_bytes, need.moment_bytes),
        places,
        time.perf_counter() - began,
    )


def _moments(recipe: ResolvedTrainRecipe, root: Root) -> torch.optim.Optimizer:
    """The recipe's optimizer, behind a step."""
    dtype = matmul_dtype(recipe.precision)
    optimizer = build_optimizer(root.model, recipe.optimizer, matmul_dtype=dtype)
    for parameter in root.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.found_inf = Guard(CPU).found_inf  # type: ignore[attr-defined]
    optimizer.step()
    return optimizer


def groups(meshes: Meshes) -> Iterator[str]:
    """The ranks that this one works with, a line for each view of the mesh."""
    for name in (
        "weights",
        "data",
        "tokens",
        "context",
        "tensor",
        "expert",
        "expert_weights",
        "mixture_weights",
    ):
        view = getattr(meshes, name)
        if isinstance(view, DeviceMesh):
            assert view.mesh_dim_names is not None
            for axis in range(view.ndim):
                ranks = dist.get_process_group_ranks(view.get_group(axis))
                if len(ranks) > 1:
                    axis_name = f" {view.mesh_dim_names[axis]}" if view.ndim > 1 else ""
                    yield f"  {name}{axis_name}: {_ranks(ranks)}"


def _ranks(ranks: list[int]) -> str:
    """First, second and last of ranks that are as far apart, or all of a few."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"


def rows(root: Root) -> Iterator[str]:
    """What the rank holds of the first block's matrices."""
    stacked = all_stacked_rows(root.model)
    for name, parameter in root.model.named_parameters():
        if name.startswith("blocks.0.") and name.endswith(SHOWN):
            blocks = local_blocks(parameter, stacked.get(name, ()))
            shard = " and ".join(_place(block.full) for block in blocks) or "nothing"
            yield f"  {name} {tuple(parameter.shape)}: {shard}"


def _place(full: tuple[tuple[int, int], ...]) -> str:
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in full) + "]"


COLUMNS = {
    "layout": "{}",
    "degrees": "{}",
    "80 GB": "{}",
    "GiB": "{:.1f}",
    "parameters": "{:.3f}",
    "of counted, estimate": "{:.4f}",
    "moments": "{:.3f}",
    "of counted, its estimate": "{:.4f}",
    "sends GiB a step": "{:.1f}",
    "between nodes": "{:.1f}",
    "waits s": "{:.2f}",
    "step s": "{:.1f}",
    "MFU": "{:.0%}",
    "seconds": "{:.0f}",
}


def build_all(argv: list[str]) -> None:
    """Build each layout on each number of ranks, and print them."""
    parser = argparse.ArgumentParser(prog="benchmarks.layouts build")
    parser.add_argument("recipe", nargs="?", default="dbrx")
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 3072])
    parser.add_argument("--only", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    given = parser.parse_args(argv)
    for ranks in given.ranks:
        found, lines = [], list[str]()
        for layout in given.only:
            one = build(given.recipe, layout, ranks)
            found.append(_row(layout, ranks, one))
            lines += ["", f"{layout} on {ranks} ranks", *one.places, *_sent(one.messages)]
        print("\n".join([f"{given.recipe} on {ranks} ranks", *table(found, COLUMNS), *lines, ""]))


def _row(layout: str, ranks: int, one: Built) -> dict[str, object]:
    rows_, again = one.recipe.device_train_microbatch_size, one.recipe.parallel
    how = f"{rows_} rows, {again.activation_checkpointing}" if one.fits else "does not fit"
    return {
        "layout": layout,
        "degrees": _short(one.recipe.parallel.degrees(ranks)),
        "80 GB": how,
        "GiB": one.need,
        "parameters": one.parameters / GIB,
        "of counted, estimate": one.expected[0] / one.parameters,
        "moments": one.moments / GIB,
        "of counted, its estimate": one.expected[1] / one.moments,
        "sends GiB a step": sum(m.sent for m in one.messages) / GIB,
        "between nodes": sum(m.between for m in one.messages) / GIB,
        "waits s": waited_for(one.messages, H100),
        "step s": one.step.total,
        "MFU": one.step.mfu(H100),
        "seconds": one.seconds,
    }


def _short(degrees: Degrees) -> str:
    """Such as `s64 e8`."""
    return " ".join(f"{k[0]}{v}" for k, v in vars(degrees).items() if v > 1)


def _sent(messages: Iterable[CollectiveTraffic]) -> Iterator[str]:
    for each in messages:
        out = f", {each.between / GIB:.2f} of it to other nodes" if each.between else ""
        yield (
            f"  sends {each.what} by {each.kind} among {each.processes}: {each.sent / GIB:.2f} GiB"
            f" a step{out}"
        )


RECIPES = ("mpt-7b", "llama-8b", "dbrx")
MICROBATCHES = 2
SENT_COLUMNS = {
    "recipe": "{}",
    "layout": "{}",
    "degrees": "{}",
    "counted GiB": "{:.3f}",
    "formula GiB": "{:.3f}",
    "of counted, formula": "{:.5f}",
    "of counted, that of the worst kind": "{:.5f}",
    "collectives": "{:,}",
}


def formula(recipe: ResolvedTrainRecipe, ranks: int, microbatch: int) -> Counter[tuple[str, int]]:
    """Bytes by kind of collective and number of processes."""
    found: Counter[tuple[str, int]] = Counter()
    for messages in communication(recipe, ranks, microbatch):
        found[messages.kind, messages.processes] += messages.sent
    return found


def counted(name: str, layout: str, ranks: int, more: list[str]) -> dict[str, object]:
    """A recipe's row of the table; raises UserError where it cannot be spread so."""
    recipe = spread(name, [*words(layout, ranks), "device_train_microbatch_size=1", *more])
    degrees = recipe.parallel.degrees(ranks)
    refused = [*limits(recipe.model, recipe.parallel, degrees)]
    if refused:
        raise UserError(*refused)
    recipe.global_train_batch_size = MICROBATCHES * degrees.data
    _, seen = count(recipe, ranks, microbatches=MICROBATCHES)
    computed = formula(recipe, ranks, 1)
    ratios = [computed[key] / seen.sent[key] for key in seen.sent]
    assert computed.keys() == seen.sent.keys(), (
        f"only one of both: {computed.keys() ^ seen.sent.keys()}"
    )
    return {
        "recipe": name,
        "layout": layout,
        "degrees": _short(degrees),
        "counted GiB": seen.sent.total() / GIB,
        "formula GiB": computed.total() / GIB,
        "of counted, formula": computed.total() / seen.sent.total(),
        "of counted, that of the worst kind": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "collectives": seen.calls.total(),
    }


def sent_rows(names: list[str], ranks: int, more: list[str]) -> Iterator[dict[str, object]]:
    """Of each recipe and each layout that it may have."""
    for name in names:
        for layout in LAYOUTS:
            try:
                yield counted(name, layout, ranks, more)
            except UserError as error:  # such as experts of a model that has none
                print(f"{name} {layout}: {error}")


def sent(argv: list[str]) -> None:
    """Count each recipe on each layout, and print it beside the formulas."""
    parser = argparse.ArgumentParser(prog="benchmarks.layouts sent")
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--checkpointing", default="selective", choices=RECOMPUTED)
    given = parser.parse_args(argv)
    more = [
        f"model.n_layers={given.layers}",
        f"parallel.activation_checkpointing={given.checkpointing}",
    ]
    found = list(sent_rows(given.recipes, given.ranks, more))
    print("\n".join([f"sent by one of {given.ranks} ranks", *table(found, SENT_COLUMNS)]))


if __name__ == "__main__":
    {"build": build_all, "sent": sent}[sys.argv[1]](sys.argv[2:])

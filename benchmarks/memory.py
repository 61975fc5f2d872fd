"""Bytes on one of many ranks, by kind, next to the estimate: one training step on fake tensors.

    python -m benchmarks.memory [mpt-7b mpt-70b dbrx] [--ranks 512] [--layers 8]

One process is rank 0 of a group whose other ranks do not exist, and tensors have shapes but no
memory: a minute a recipe. The model is built and wrapped as in a run, and the step is the
trainer's; all that it allocates is counted while something holds it (`LiveBytes`), and all that it
sends (`SentBytes`). Tensors are on the CPU, for autograd knows no other device without a GPU build
of PyTorch; FSDP allocates the same there, and attention over rows of one document keeps the same.
Where our own code differs, the GPU's is taken. Not seen: temporaries within kernels and within the
experts' operator, for which the estimate has a term of its own; the allocator's gaps; NCCL's and
CUDA's own. `layouts.py` and the tests of parallel layouts use it too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import table
from llmfoundry.builders.model import build_autocast, build_root, matmul_dtype
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.context import token_sharding
from llmfoundry.distributed.mesh import Meshes, build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Root
from llmfoundry.ops.devices import PlannedDevice, planned_for
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.ops.torch_private import unwatched_shapes
from llmfoundry.plan.count import fill
from llmfoundry.plan.fit import choose_fit, with_guessed_vocabulary
from llmfoundry.plan.memory import GIB, MemoryEstimate, estimate
from llmfoundry.plan.meter import GpuKernels, LiveBytes
from llmfoundry.plan.microbatch_sizes import FRAMEWORK, memory_of_gpu
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.load import load
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from llmfoundry.train import step
from llmfoundry.train.objective import CrossEntropy
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepHooks, StepSettings, train_step

KINDS = {  # by the operator: those of FSDP and DDP, and the functional ones of all else
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
SMALL = 1 << 10
"""Bytes of a message under which it is left out: counts, losses, norms."""


class SentBytes(TorchDispatchMode):
    """Counts the bytes that collectives under it send.

    PyTorch's CommDebugMode sees as many calls (`tests/test_communication.py`), but counts no bytes
    and loses its way among blocks whose forward pass is replaced.

    An all_gather sends a process's part to the p - 1 others, a reduce_scatter all but its own part,
    an all_reduce is one behind the other, as a ring has them; an all_to_all sends all but what the
    process keeps.

    Attributes:
        calls: of every kind.
        sent: bytes by kind and number of processes.
        groups: kind, number of processes and the ranks from one to the next, where they are even.
        small: bytes of messages under SMALL, which `sent` leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[tuple[str, int]] = Counter()
        self.groups: set[tuple[str, int, int]] = set()
        self.small = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and note what it sends."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which becomes collectives of plain tensors
        name = func.name().partition(".")[0] if callable(getattr(func, "name", None)) else ""
        if name in KINDS:
            kind, group = KINDS[name], _group(args)
            self.calls[kind] += 1
            size = _sent(kind, group, _operand(args), _splits(args))
            if size < SMALL:
                self.small += size
            else:
                self.sent[kind, group.size()] += size
                self.groups.add((kind, group.size(), _apart(group)))
        return func(*args, **(kwargs or {}))


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """The group that an operator was given: an object, or behind all else its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return _resolve_process_group(args[-1])


def _apart(group: dist.ProcessGroup) -> int:
    """Ranks from one process of a group to the next; 0: not alike."""
    ranks = dist.get_process_group_ranks(group)
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else 0


def _operand(args: Sequence[Any]) -> int:
    """Bytes of what a process brings: the last tensor, in front of which some have their result."""
    alone = [arg for arg in args if isinstance(arg, Tensor)]
    if alone:
        return alone[-1].nbytes
    lists = [arg for arg in args if isinstance(arg, list) and isinstance(arg[0], Tensor)]
    return sum(tensor.nbytes for tensor in lists[-1])


def _splits(args: Sequence[Any]) -> Sequence[int]:
    """How many rows go to each process; empty: as many to each."""
    lists = [arg for arg in args if isinstance(arg, list) and isinstance((*arg, 0)[0], int)]
    return lists[-1] if lists else []


def _sent(kind: str, group: dist.ProcessGroup, operand: int, splits: Sequence[int]) -> int:
    others, all_, given = group.size() - 1, group.size(), sum(splits)
    if kind == "all_gather":
        return others * operand
    if kind == "all_reduce":
        return 2 * others * operand // all_
    if kind == "all_to_all" and given:
        return operand * (given - splits[group.rank()]) // given
    return others * operand // all_


RECIPES = ("mpt-7b", "mpt-70b", "dbrx")
MEMORY = memory_of_gpu(Hardware.parse("1x80gb", "gpu"))
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """On one rank: shards of the weights, their gradients, moments, and the most at once."""

    parameters: int
    gradients: int
    moments: int
    peak: int


def read(name: str, ranks: int, words: list[str]) -> ResolvedTrainRecipe:
    """A resolved recipe, in which auto is decided for GPUs of 80 GB."""
    recipe = spread(name, words)
    decide(recipe, ranks)
    return recipe


def decide(recipe: ResolvedTrainRecipe, ranks: int) -> None:
    """Write what auto stands for on GPUs of 80 GB; a UserError where it does not fit."""
    fit = choose_fit(recipe, world_size=ranks, available=MEMORY, device=GPU)
    recipe.parallel = fit.choice.apply(recipe).parallel
    recipe.device_train_microbatch_size = fit.microbatch


def spread(name: str, words: list[str]) -> ResolvedTrainRecipe:
    """A resolved recipe."""
    user_recipe = load(TrainRecipe, YAMLS / f"{name}.yaml", words)
    return with_guessed_vocabulary(user_recipe.resolve())


def estimated(recipe: ResolvedTrainRecipe, ranks: int) -> tuple[Bytes, MemoryEstimate]:
    """The estimate, without the framework."""
    need, rows = estimate(recipe, ranks, device=GPU), recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    peak = need.total(rows) - FRAMEWORK
    return Bytes(need.parameter_bytes, need.gradient_bytes, need.moment_bytes, peak), need


def count(
    recipe: ResolvedTrainRecipe, ranks: int, *, microbatches: int = 2
) -> tuple[Bytes, SentBytes]:
    """Take a step of `microbatches` on rank 0 of `ranks`, and count what it holds and sends."""
    live = LiveBytes(are_fake=True)
    with built(recipe, ranks, live) as (root, _):
        return _step(recipe, root, live, microbatches)


@contextmanager
def built(
    recipe: ResolvedTrainRecipe, ranks: int, live: LiveBytes | None = None, *, rank: int = 0
) -> Iterator[tuple[Root, Meshes]]:
    """The recipe's model on one of `ranks`, and its mesh; `live` counts from its shards on."""
    watched = nullcontext() if live is None else live
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        world = World(rank, ranks, 0, CPU)
        meshes, root = build_mesh(recipe.parallel, world), build_root(recipe)
        assert meshes is not None
        with mock.patch.object(root, "to_empty"):  # on the meta device a shard costs nothing
            parallelize(root, world, meshes, recipe.parallel, precision=recipe.precision)
        with _as_on_a_gpu(live), FakeTensorMode(allow_non_fake_inputs=True), watched:
            fill_shards(root, CPU)
            yield root, meshes
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it hands out meshes, which look alike on every rank


def _step(
    recipe: ResolvedTrainRecipe, root: Root, live: LiveBytes, microbatches: int
) -> tuple[Bytes, SentBytes]:
    rows = recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    dtype = matmul_dtype(recipe.precision)
    optimizer = build_optimizer(root.model, recipe.optimizer, matmul_dtype=dtype)
    parameters = list(root.parameters())
    tokens = torch.zeros(microbatches * rows, recipe.max_seq_len, dtype=torch.long)
    gradients, live.most = list[int](), 0

    def note() -> None:
        gradients.append(sum(_local(p.grad) for p in parameters if p.grad is not None))

    with SentBytes() as sent:
        train_step(
            root,
            optimizer,
            Batch(tokens, tokens, None),
            StepSettings(
                microbatch=rows,
                autocast=build_autocast(recipe.precision, CPU),
                clipping=recipe.gradient_clipping,
                shard_tokens=token_sharding(root),
                reduce_scatter_each=recipe.parallel.reduce_scatter_each_microbatch is not False,
                objective=_Labelled(),
            ),
            number=0,
            guard=Guard(CPU),
            hooks=StepHooks(on_gradients=note),
        )
    parameters_, moments = local_bytes(root, optimizer)
    peak = live.most + moments  # which are there in every step but the first
    return Bytes(parameters_, gradients[0], moments, peak), sent


def local_bytes(root: Root, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Of a process's parameters, and of their moments."""
    state = [t for kept in optimizer.state.values() for t in kept.values()]
    moments = sum(_local(t) for t in state if isinstance(t, torch.Tensor) and t.ndim)
    return sum(_local(p) for p in root.parameters()), moments


class _Labelled(CrossEntropy):
    """Every token has a label: fake ones cannot be counted."""

    def count(self, batch: Batch) -> torch.Tensor:
        return torch.ones((), dtype=torch.long)


def _local(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def fill_shards(root: Root, device: torch.device) -> None:
    """`fill`, of which FSDP is notified."""
    fill(root, device=device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (p for group in groups if group for p in group.fsdp_params):
                parameter.reset_sharded_param()


@contextmanager
def _as_on_a_gpu(live: LiveBytes | None) -> Iterator[None]:
    """The GPU's code where ours differs, and experts that have as many rows each."""
    clip = {
        "norm": lambda *given: torch._foreach_mul_(step._local_gradients(given[0]), torch.ones(()))
    }
    what = PlannedDevice("cuda", (live or LiveBytes(are_fake=True)).kernel, LOAD)
    with (
        planned_for(what),
        GpuKernels(),
        mock.patch.dict(step.CLIPPINGS, clip),  # which asks for the norm's value
        unwatched_shapes(),
    ):
        yield


LOAD = 1.0
"""Rows that the process's experts get, in means."""


COLUMNS = {
    "recipe": "{}",
    "kind": "{}",
    "counted GiB": "{:.3f}",
    "estimated GiB": "{:.3f}",
    "of counted, estimate": "{:.3f}",
}


def main() -> None:
    """Count each recipe, and print it beside the estimate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--layers", type=int, help="in place of the recipe's")
    given = parser.parse_args()
    rows = []
    for name in given.recipes:
        words = [] if given.layers is None else [f"model.n_layers={given.layers}"]
        recipe = read(name, given.ranks, words)
        (counted, _), (expected, _) = count(recipe, given.ranks), estimated(recipe, given.ranks)
        how = f"{name} ({recipe.parallel.activation_checkpointing})"
        for kind, found in vars(counted).items():
            believed = vars(expected)[kind]
            rows.append(
                {
                    "recipe": how,
                    "kind": kind,
                    "counted GiB": found / GIB,
                    "estimated GiB": believed / GIB,
                    "of counted, estimate": believed / found,
                }
            )
    print("\n".join([f"one of {given.ranks} ranks", *table(rows, COLUMNS)]))


if __name__ == "__main__":
    main()

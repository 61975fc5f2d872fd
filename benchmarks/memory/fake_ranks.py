"""Bytes on one of many ranks, by kind, beside the estimate: one training step on fake tensors.

    python -m benchmarks.memory.fake_ranks [mpt-7b mpt-70b dbrx] [--ranks 512] [--layers 8]

One process is rank 0 of a group whose other ranks do not exist, and tensors have shapes but no
memory: a minute a recipe. The model is built and wrapped as a run does it, and the step is the
trainer's; all that it allocates is counted while something holds it. Tensors are a CPU's, for
autograd knows no other device without a GPU's build of PyTorch; FSDP allocates the same there,
and attention over rows of whole blocks keeps the same. Where our own code differs, the GPU's is
taken.

What it cannot see: temporaries within kernels and within the experts' operator, for which the
estimate has a summand of its own; the allocator's gaps; what NCCL and CUDA take for themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.memory.live_bytes import LiveBytes
from benchmarks.memory.sent_bytes import SentBytes
from benchmarks.record import table
from llmfoundry.builders.job import build_autocast, build_root, product_dtype, with_defaults
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.context import token_cut
from llmfoundry.distributed.launch import World
from llmfoundry.distributed.mesh import Meshes, build_mesh
from llmfoundry.models.decoder import Root
from llmfoundry.ops import cross_entropy
from llmfoundry.ops.batch import Batch
from llmfoundry.ops.moe import dispatch, grouped
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.torch_private import scale
from llmfoundry.plan.activations import expert_rows, tokens_of_row
from llmfoundry.plan.fit import choose_fit, with_guessed_vocabulary
from llmfoundry.plan.memory import FRAMEWORK, GIB, MemoryEstimate, estimate
from llmfoundry.recipe.front.load import load
from llmfoundry.recipe.front.paths import YAMLS
from llmfoundry.recipe.parallel import Degrees
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.train import step
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import CrossEntropy, Guard, train_step

RECIPES = ("mpt-7b", "mpt-70b", "dbrx")
MEMORY = 77 * 10**9  # free of a GPU of 80 GB
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """On one rank: shards of the weights, their gradients, moments, and the most at once."""

    parameters: int
    gradients: int
    moments: int
    peak: int


def read(name: str, ranks: int, words: list[str]) -> TrainRecipe:
    """A filled recipe, in which auto is decided for GPUs of 80 GB."""
    recipe = spread(name, words)
    fit = choose_fit(recipe, world_size=ranks, available=MEMORY, device=GPU)
    recipe.parallel.activation_checkpointing = fit.checkpointing
    recipe.device_train_microbatch_size = fit.microbatch
    return recipe


def spread(name: str, words: list[str]) -> TrainRecipe:
    """A filled recipe."""
    written = load(TrainRecipe, YAMLS / f"{name}.yaml", words)
    return with_guessed_vocabulary(with_defaults(written))


def said(recipe: TrainRecipe, ranks: int) -> tuple[Bytes, MemoryEstimate]:
    """What the estimate says; of what is counted here alone."""
    need, rows = estimate(recipe, ranks, device=GPU), recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    degrees, low = recipe.parallel.degrees(ranks), 4 if recipe.precision == "fp32" else 2
    unseen = expert_rows(recipe.model, low) * tokens_of_row(recipe, degrees) // degrees.tensor
    logits = estimate(recipe, ranks, device=CPU)  # whose loss it is that is counted
    seen = dataclasses.replace(
        need,
        row_block=need.row_block - unseen,
        row_logits=logits.row_logits,
        chunk_logits=logits.chunk_logits,
    )
    peak = seen.total(rows) - FRAMEWORK - need.gradients(rows)
    parts = need.parameter_bytes, need.gradient_bytes, need.moment_bytes
    return Bytes(*parts, peak), need


def count(recipe: TrainRecipe, ranks: int, *, microbatches: int = 1) -> tuple[Bytes, SentBytes]:
    """Take one step on rank 0 of `ranks`, and count what it holds and what it sends."""
    live = LiveBytes()
    with built(recipe, ranks, live) as (root, _):
        return _step(recipe, root, live, microbatches)


@contextmanager
def built(
    recipe: TrainRecipe, ranks: int, live: LiveBytes | None = None, *, rank: int = 0
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
        with (
            _as_on_a_gpu(recipe, meshes.degrees),
            FakeTensorMode(allow_non_fake_inputs=True),
            watched,
        ):
            fill(root, CPU)
            yield root, meshes
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it hands out meshes, which look alike on every rank


def _step(
    recipe: TrainRecipe, root: Root, live: LiveBytes, microbatches: int
) -> tuple[Bytes, SentBytes]:
    rows = recipe.device_train_microbatch_size
    assert isinstance(rows, int)
    dtype = product_dtype(recipe.precision)
    optimizer = build_optimizer(root.model, recipe.optimizer, product_dtype=dtype)
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
            number=0,
            microbatch=rows,
            autocast=build_autocast(recipe.precision, CPU),
            clipping=recipe.gradient_clipping,
            guard=Guard(CPU),
            cut=token_cut(root),
            reduce_scatter_each=recipe.parallel.reduce_scatter_each_microbatch is not False,
            objective=_Labelled(),
            on_gradients=note,
        )
    held, moments = held_bytes(root, optimizer)
    # gradients and moments of the step before are there in every step but the first
    peak = live.most + gradients[0] + moments
    return Bytes(held, gradients[0], moments, peak), sent


def held_bytes(root: Root, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Of a process's parameters, and of their moments."""
    state = [t for held in optimizer.state.values() for t in held.values()]
    moments = sum(_local(t) for t in state if isinstance(t, torch.Tensor) and t.ndim)
    return sum(_local(p) for p in root.parameters()), moments


class _Labelled(CrossEntropy):
    """Every token has a label: fake ones cannot be counted."""

    def count(self, batch: Batch) -> torch.Tensor:
        return torch.ones((), dtype=torch.long)


def _local(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def fill(root: Root, device: torch.device) -> None:
    """`to_empty`, which cannot swap fake tensors: new ones in their place, and FSDP is told."""
    for module in root.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                empty = torch.empty_like(p, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=p.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (p for group in groups if group for p in group.fsdp_params):
                parameter.reset_sharded_param()


@contextmanager
def _as_on_a_gpu(recipe: TrainRecipe, degrees: Degrees) -> Iterator[None]:
    """The GPU's code where ours differs: what a CPU would ask of values is not asked."""
    whole = getattr(ShardingPropagator, _WHOLE)
    clip = {"norm": lambda *given: scale(step._gradients(given[0]), torch.ones(()))}
    with (
        mock.patch.object(dispatch, "_lengths", _even(recipe, degrees)),
        mock.patch.object(grouped, "_path", lambda device: moe_device),
        mock.patch.object(cross_entropy, "labelled_places", lambda labels: None),
        mock.patch.dict(step.CLIPPINGS, clip),
        mock.patch.object(ShardingPropagator, _WHOLE, _unwatched(whole)),
    ):
        yield


def _even(recipe: TrainRecipe, degrees: Degrees) -> Callable[..., tuple[list[int], list[int]]]:
    """Rows to each process and from it where experts have as many each: fake counts tell none."""
    rows, top_k = recipe.device_train_microbatch_size, recipe.model.ffn_config.moe_top_k or 0
    assert isinstance(rows, int)
    own = rows * -(-tokens_of_row(recipe, degrees) // degrees.tensor) * top_k
    each = [own // degrees.expert] * degrees.expert
    each[0] += own % degrees.expert
    return lambda *counts: (list(each), list(each))


_WHOLE = "_propagate_tensor_meta_non_cached"  # tries each operation on shapes of whole tensors


def _unwatched(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """The same where nobody counts what it makes: a run makes none of it."""

    def found(*args: Any) -> Any:
        with _disable_current_modes():
            return shapes(*args)

    return found


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
        (counted, _), (expected, _) = count(recipe, given.ranks), said(recipe, given.ranks)
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

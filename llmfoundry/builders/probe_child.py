"""`python -m llmfoundry.builders.probe_child`: a process of a probe, which `microbatch.py` starts.

It builds what the run will build, by the same functions, with numbers in place of weights and
tokens that are drawn: memory does not depend on their values. A size that fits is a line in the
request's file; the first that does not ends the process with status `SHORT`.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from itertools import chain
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry.builders.microbatch import SHORT, ProbeRequest
from llmfoundry.builders.trainer import build_model, make_optimizer, step_settings
from llmfoundry.distributed.fsdp import apply_ddp
from llmfoundry.distributed.mesh import build_mesh, with_mesh
from llmfoundry.distributed.process_group import World, join
from llmfoundry.errors import UserError, is_out_of_memory, requested_memory
from llmfoundry.models.decoder import Root
from llmfoundry.ops.packed_layout import Batch, PackedLayout
from llmfoundry.ops.shard_layout import local_shard
from llmfoundry.processes import end_with
from llmfoundry.recipe.plugins import import_plugins
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.train.callbacks import peak_memory
from llmfoundry.train.spikes import Guard
from llmfoundry.train.step import StepSettings, train_step

RUN_BYTES = 32 << 20
"""Of the host: what a run keeps that a probe does not (rows, tokenizer, log, report). With a model
of 5M parameters, cgroups of 200 and 260 MiB held 4 and 8 rows; peaks without this said 8 and 16."""


def main() -> None:
    """Take steps of each size, the smallest first.

    Raises:
        SystemExit: `SHORT`, as one did not fit.
    """
    end_with(int(sys.argv[1]))
    request: ProbeRequest = pickle.load(sys.stdin.buffer)  # of our parent's pipe
    import_plugins(request.plugins)
    try:
        with join(request.recipe.parallel) as world:
            _measure(request, world)
    except (MemoryError, RuntimeError, UserError) as error:
        if any(is_out_of_memory(e) for e in (error, error.__cause__) if e is not None):
            print(requested_memory(error), file=sys.stderr, flush=True)
            _exit(SHORT)
        raise


def _exit(status: int) -> None:
    """At once: Python would wait for messages that the others never send."""
    os._exit(status)


def _measure(request: ProbeRequest, world: World) -> None:
    recipe = request.recipe
    memory = _Peak(world)
    if world.device.type == "cpu":
        _limit_memory(request.available)
    meshes = build_mesh(recipe.parallel, world)
    world = with_mesh(world, meshes)
    root = build_model(recipe, world, meshes, lambda line: None)
    _fill(root)
    optimizer = make_optimizer(recipe, root)
    module = apply_ddp(root, meshes)
    guard = Guard(world.device, recipe.callbacks.watch)
    for number, rows in enumerate(request.sizes):
        settings = step_settings(recipe, world, root, rows)
        batch = draw_batch(recipe, min(request.rows, 2 * rows)).to(world.device)
        # The first step makes the optimizer's state: the next has it beside the activations.
        for step in range(1 if number else 2):
            seconds = _timed(module, optimizer, batch, settings, guard, 2 * number + step)
        row = {"rows": rows, "peak": memory.rise(), "seconds": seconds / len(batch.tokens)}
        with request.results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _timed(
    module: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    settings: StepSettings,
    guard: Guard,
    number: int,
) -> float:
    """Seconds of a step, to the end of the device's work."""
    began = time.perf_counter()
    train_step(module, optimizer, batch, settings, number=number, guard=guard)
    if batch.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def _fill(root: Root) -> None:
    """Small numbers for weights: those of 4 bits, and integers, are 0."""
    generator = torch.Generator(next(root.parameters()).device).manual_seed(1)
    for tensor in chain(root.parameters(), root.buffers()):
        own = local_shard(tensor)
        if own.is_floating_point():
            own.normal_(0.0, 0.02, generator=generator)
        else:
            own.zero_()


def draw_batch(recipe: ResolvedTrainRecipe, rows: int) -> Batch:
    """Rows of two documents of random tokens, each of them labeled."""
    length, vocabulary = recipe.max_seq_len, recipe.model.vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (rows, length), generator=generator)
    layout = None
    if not recipe.data.attend_across_documents:
        first = length // 3 or 1
        layout = PackedLayout.from_lengths([[first, length - first]] * rows)
    return Batch(tokens, tokens.roll(-1, 1), layout)


class _Peak:
    """How much more memory than at first a process, or its device, has had at any time."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._is_shared = world.machine is not None and world.machine.sharing > 1
        self._first = self._now()

    def _now(self) -> int:
        """Bytes: on a GPU of all that use it, as NCCL's buffers are not PyTorch's."""
        if self._device.type != "cuda":
            info = psutil.Process().memory_info()
            return info.rss - _of_files(info)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def rise(self) -> int:
        """Bytes, up to now."""
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_reserved(self._device)
            others = self._now() - self._first - torch.cuda.memory_reserved(self._device)
            return most + (0 if self._is_shared else max(0, others))
        most = peak_memory(self._device)
        return most - _of_files(psutil.Process().memory_info()) - self._first + RUN_BYTES


def _of_files(info: Any) -> int:
    """Bytes of libraries that were read, which are no memory that others lack (Linux)."""
    return getattr(info, "shared", 0)


def _limit_memory(available: int) -> None:
    """Let an allocation fail here before the kernel ends another process of the machine."""
    if sys.platform != "linux":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    own = psutil.Process().memory_info().data
    least = min(n for n in (own + available, soft, hard) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))


if __name__ == "__main__":
    main()

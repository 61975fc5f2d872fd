"""`python -m llmfoundry.builders.probe_child`: a process of a probe, started by `microbatch.py`.

It builds the same objects as the run, by the same functions, with small numbers as weights and
random tokens, because memory does not depend on values. Each size that fits is a line in the
request's file. At the first size that does not fit, the process exits with status `SHORT`.
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
from llmfoundry.train.distillation import with_any_teacher
from llmfoundry.train.spikes import Guard
from llmfoundry.train.step import StepSettings, train_step

RUN_BYTES = 32 << 20
"""Host memory that a run needs but no probe (examples, tokenizer, log, report). With a model
of 5M parameters, cgroups of 200 and 260 MiB fit 4 and 8 sequences; peaks without it gave 8, 16."""


def main() -> None:
    """Take steps of each size, the smallest first.

    Raises:
        SystemExit: `SHORT`: a size did not fit.
    """
    end_with(int(sys.argv[1]))
    request: ProbeRequest = pickle.load(sys.stdin.buffer)  # a pipe from the parent process
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
    """Exit at once: a normal exit would wait for collectives that other ranks never join."""
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
        # The first step allocates the optimizer state; the second needs it next to activations.
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
    """Return the seconds of a step, up to the end of the device's work."""
    began = time.perf_counter()
    train_step(module, optimizer, batch, settings, number=number, guard=guard)
    if batch.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def _fill(root: Root) -> None:
    """Fill the weights with small numbers; 4-bit weights and integers with 0."""
    generator = torch.Generator(next(root.parameters()).device).manual_seed(1)
    for tensor in chain(root.parameters(), root.buffers()):
        local = local_shard(tensor)
        if local.is_floating_point():
            local.normal_(0.0, 0.02, generator=generator)
        else:
            local.zero_()


def draw_batch(recipe: ResolvedTrainRecipe, rows: int) -> Batch:
    """Return sequences of two documents of random tokens, all labeled."""
    length, vocabulary = recipe.max_seq_len, recipe.model.vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (rows, length), generator=generator)
    layout = None
    if not recipe.data.attend_across_documents:
        first = length // 3 or 1
        layout = PackedLayout.from_lengths([[first, length - first]] * rows)
    return with_any_teacher(Batch(tokens, tokens.roll(-1, 1), layout), recipe.loss)


class _Peak:
    """Largest increase of the memory of a process, or of its device, since construction."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._is_shared = world.machine is not None and world.machine.sharing > 1
        self._first = self._now()

    def _now(self) -> int:
        """Return the bytes in use; on a GPU those of all processes, because of NCCL's buffers."""
        if self._device.type != "cuda":
            info = psutil.Process().memory_info()
            return info.rss - _of_files(info)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def rise(self) -> int:
        """Return the largest increase so far, in bytes."""
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_reserved(self._device)
            others = self._now() - self._first - torch.cuda.memory_reserved(self._device)
            return most + (0 if self._is_shared else max(0, others))
        most = peak_memory(self._device)
        return most - _of_files(psutil.Process().memory_info()) - self._first + RUN_BYTES


def _of_files(info: Any) -> int:
    """Return the bytes of mapped library files, which do not reduce others' memory (Linux)."""
    return getattr(info, "shared", 0)


def _limit_memory(available: int) -> None:
    """Limit the memory, so that allocations fail before the kernel kills another process."""
    if sys.platform != "linux":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    data_bytes = psutil.Process().memory_info().data
    least = min(n for n in (data_bytes + available, soft, hard) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))


if __name__ == "__main__":
    main()

"""A script: a step of each layout as its first process takes it on fake CUDA; what it prints.

`test_matrix_on_gpus.py` runs it by `tests.fake_cuda`, where tensors have a device and a shape
alone: whatever meets a tensor of another device, or asks for a value, ends it. The other processes
are a group of PyTorch's that sends nothing. Streams, which a build for CPUs has none of, are left
out, and so are Triton's kernels, in whose place PyTorch's own steps stand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory import fill_shards
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Root
from llmfoundry.ops.moe import dispatch
from llmfoundry.ops.moe import experts as moe_steps
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.train.step import StepSums
from tests.distributed import matrix
from tests.distributed.layouts import ROUTINE, Entry

GPU = torch.device("cuda", 0)


class Stream:
    """A stream or an event, which does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class OnMeta(TorchFunctionMode):
    """Puts what is made empty on a GPU, outside of fake mode, onto the meta device."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    yield


def step_of(entry: Entry, batch: Batch) -> dict[str, str]:
    """Devices of what the first step gives; of rows without room, where they are counted."""
    found: dict[str, str] = {}

    def overflow(sums: StepSums) -> int:
        """The step's only read of a value, which fake tensors do not have."""
        if sums._overflow is not None:
            found["overflow"] = str(sums._overflow.device)
        return 0

    class Taken(Exception): ...

    def first(*given: Any, **settings: Any) -> None:
        result = true_step(*given, **settings)
        devices = {"loss": result.loss.device, "norm": result.grad_norm.device}
        found.update({name: str(device) for name, device in devices.items()})
        raise Taken  # before values are asked for

    true_step, cuda = matrix.train_step, torch.cuda
    there = [mock.patch.object(cuda, "is_available", lambda: True)]
    there += [mock.patch.object(cuda, "is_initialized", lambda: True)]
    there += [mock.patch.object(cuda, "device_count", lambda: 1), OnMeta()]
    there += [mock.patch.object(Root, "to_empty")]
    rows = matrix.ROWS // (entry.replicate * entry.shard)
    sent = rows * matrix.LENGTH // (entry.context * entry.tensor) * 2 // entry.expert
    even = [sent] * entry.expert

    def lengths(*_: Any) -> tuple[list[int], list[int]]:
        assert entry.capacity is None, "with a capacity the host reads no lengths"
        return even, even

    world = World(0, entry.processes, 0, GPU)
    with contextlib.ExitStack() as stack:
        for patch in there:
            stack.enter_context(patch)
        root, world, mesh = matrix.spread(entry, world)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(matrix, "train_step", first),
        mock.patch.object(matrix, "global_batch", lambda *_, **__: batch),
        mock.patch.object(dispatch, "_lengths", lengths),
        mock.patch.object(StepSums, "overflow", overflow),
        mock.patch.object(dispatch, "steps_of", lambda _: moe_steps),
        mock.patch.object(moe_device, "steps_of", lambda _: moe_steps),
        contextlib.suppress(Taken),
    ):
        fill_shards(root, GPU)
        matrix.train(entry, root, matrix.wrap(root, mesh), world)
    return found


def main(names: Sequence[str]) -> None:
    """Print a line for each layout."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Stream
    cuda.stream, cuda.current_stream = on_stream, Stream
    cuda.current_device, cuda.set_device = lambda: 0, lambda _: None
    for name in names:
        entry = replace(ROUTINE[name], accumulated=False)
        batch = matrix.global_batch(0, entry.packed, taught=entry.taught)
        size = entry.processes
        if size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        print(name, *step_of(entry, batch).values())
        if size > 1:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()

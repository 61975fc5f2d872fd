"""The parts of PyTorch in use here that it does not promise to keep: this file alone names them.

`torch._foreach_*`, which its documentation lists, are called where they are needed.

Each function says which part it is and what happens where a version of PyTorch lacks it. What a
pickle names (`checkpoint/load.py`) is data and not called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.telemetry import span


def has_avx512_bf16() -> bool:
    """`torch.cpu._is_avx512_bf16_supported`; without it no, and bf16 products are not used."""
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def set_timeouts(group: dist.ProcessGroup, *, host: timedelta, device: timedelta) -> None:
    """How long a collective of `group` may take, through hosts (gloo) and between devices (NCCL).

    `ProcessGroup._device_types`, `._get_backend` and `Backend._set_default_timeout`, which
    `distributed_c10d._set_pg_timeout` calls for all devices alike; without them a group keeps
    PyTorch's own limits.
    """
    for kind in getattr(group, "_device_types", ()):
        backend = group._get_backend(kind)
        change = getattr(backend, "_set_default_timeout", None)
        if change is not None and backend.name() in ("gloo", "nccl"):
            change(device if backend.name() == "nccl" else host)


def newest_messages() -> bytes:
    """This process's last collectives, as its flight recorder has them, pickled; b"": it has none.

    `_dump_fr_trace` of torch.distributed, of gloo's and NCCL's, and `_dump_nccl_trace` of
    versions before. PyTorch records them by itself (TORCH_FR_BUFFER_SIZE) and has a program that
    compares those of all processes, torch.distributed.flight_recorder.fr_trace.
    """
    module = importlib.import_module("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if hasattr(module, name):
            return cast(bytes, getattr(module, name)())
    return b""


def default_store() -> dist.Store:
    """The store at which all processes met: `distributed_c10d._get_default_store`.

    PyTorch has it from 1.x on and names no other way; without it a run of several processes fails.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where a tensor of a checkpoint is: `torch.distributed.checkpoint.filesystem._StorageInfo`.

    A checkpoint's table is made of these; without it none can be loaded.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def small_group(
    store: dist.Store, rank: int, size: int, *, device: torch.device, limit: timedelta
) -> Any:
    """A few processes that reduce together, known to no other and to no registry of PyTorch's.

    `dist.ProcessGroupNCCL` and `dist.ProcessGroupGloo`, as torchft makes them: `new_group` is for
    all processes in one order, and one that hangs would stop the others. Without them a check of
    links fails.

    Args:
        store: where these processes meet, and no others.
        rank: among them.
        size: how many they are.
        device: of what is reduced.
        limit: how long gloo's collectives wait; NCCL's wait ten times longer, as its watchdog
            then ends the whole process: `leave_group` is to come before.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 10 * limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


def leave_group(group: Any, *, failed: bool) -> None:
    """Give back what a `small_group` holds.

    `abort` and `shutdown` of NCCL's, `abort` where a process is gone and would be waited for;
    without them its communicator stays until the process ends. gloo's is closed by itself.
    """
    end = getattr(group, "abort" if failed else "shutdown", None)
    if end is not None and isinstance(group, getattr(dist, "ProcessGroupNCCL", ())):
        end()


def start_all_gather(every: Tensor, own: Tensor) -> dist.Work | None:
    """Begin to put the `own` of all processes into the rows of `every`.

    `dist.all_gather_into_tensor`, which PyTorch 2.13 calls `all_gather_single`, and warns of.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(every, own, async_op=True)
    return work


def flattened(mesh: DeviceMesh, names: list[str], backend: str | None) -> DeviceMesh:
    """Some adjacent dimensions of a mesh as one, a view of the same mesh.

    `DeviceMesh._flatten`, as torchtitan calls it; without it only data_parallel_* degrees work.
    """
    part = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
    if part.size() == dist.get_world_size():
        backend = None  # the default group serves
    return part._flatten("_".join(names), backend_override=backend)


def unflattened(mesh: DeviceMesh, sizes: dict[str, int], backend: str | None) -> DeviceMesh:
    """A mesh of one dimension as several, a view of the same mesh.

    `DeviceMesh._unflatten`; without it no expert_parallel_degree works.
    """
    small = [name for name, size in sizes.items() if 1 < size < mesh.size()]
    override: Any = {name: backend for name in small} if backend and small else None
    return mesh._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=override)


def concatenated(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Two views of one mesh, of one dimension each, as one of two.

    `DeviceMesh._concatenate`, which FSDP calls for weights that are cut twice; without it none can
    be.
    """
    return DeviceMesh._concatenate([first, second])


def all_to_all(x: Tensor, group: str) -> Tensor:
    """x[i] (of as many as there are processes) goes to process i of the group with this name.

    Returns:
        What they sent here, in their order, in the shape of x.

    `torch.ops._c10d_functional`, as in `all_gather` and `reduce_scatter`: what the compiler and
    selective checkpointing know collectives by. Without it context parallelism does not work.
    """
    ops, sizes = torch.ops._c10d_functional, [1] * len(x)
    with _messages():
        return ops.wait_tensor(ops.all_to_all_single(x, sizes, sizes, group))


def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """The x of all `size` processes of a group along the first dimension, in their order."""
    ops = torch.ops._c10d_functional
    with _messages():
        return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    """This process's part, of `size`, of the first dimension of the sum of all x of a group."""
    ops = torch.ops._c10d_functional
    with _messages():
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))


def start_all_to_all(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Begin to send `sent[p]` rows to each process p of a group, in order; what `wait` is given.

    `torch.ops._c10d_functional.all_to_all_single`: none of the public functions both returns a
    tensor that recomputation can keep and waits later. Without it no expert_parallel_degree works.

    Returns:
        Not to be read yet: the rows that come, `received[p]` from each process.
    """
    name = group.group_name
    return torch.ops._c10d_functional.all_to_all_single(rows, received, sent, name)


def start_all_reduce(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin to add up `values` over a group; what `wait` is given.

    `torch.ops._c10d_functional.all_reduce`, for the same reason; without it routers' statistics are
    those of one process alone, and what shares a row's tokens does not work.
    """
    return torch.ops._c10d_functional.all_reduce(values, "sum", group.group_name)


def wait(values: Tensor) -> Tensor:
    """What a collective above gave, once it is there: `torch.ops._c10d_functional.wait_tensor`."""
    with _messages():
        return torch.ops._c10d_functional.wait_tensor(values)


def _messages() -> AbstractContextManager[None]:
    """The span of those who wait for others; graphs of the compiler have none."""
    return nullcontext() if torch.compiler.is_compiling() else span("messages")


def watch_fsdp(around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Have FSDP2 enter a context wherever it waits for shards and gradients, or packs them.

    `FSDPParamGroup.unshard`, `.wait_for_unshard`, `.post_backward` and `.finalize_backward`, for
    all models of the process; one that PyTorch lacks counts as the pass that it is in.

    Returns:
        What undoes it.
    """
    module = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    group = getattr(importlib.import_module(module), "FSDPParamGroup", None)
    names = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    before = {name: getattr(group, name) for name in names if hasattr(group, name)}

    def within(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*given: Any, **named: Any) -> Any:
            with around():
                return method(*given, **named)

        return watched

    def undo() -> None:
        for name, method in before.items():
            setattr(group, name, method)

    for name, method in before.items():
        setattr(group, name, within(method))
    return undo


def storage_reference(tensor: Tensor) -> Any:
    """The memory that a tensor lies in: equal for all tensors in it, and `expired()` once freed.

    `torch.multiprocessing.reductions.StorageWeakRef`, which keeps its address from being given
    away; without it activations cannot be compressed.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def set_activation_memory_budget(budget: float | None) -> None:
    """Share of the activations of a compiled graph that it keeps; None: what is fastest.

    `torch._functorch.config.activation_memory_budget`, without which a budget has no effect.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    config.activation_memory_budget = 1.0 if budget is None else budget


def _as_it_is(value: Any) -> Any:
    return value


def selective_contexts(
    is_kept: Callable[..., bool],
    compress: Callable[[Tensor], Any] = _as_it_is,
    restore: Callable[[Any], Any] = _as_it_is,
) -> tuple[Any, Any]:
    """As `create_selective_checkpoint_contexts`, where operators that are not kept may differ.

    FSDP's hooks around a module inside of what is computed again run other operators the second
    time, which PyTorch's own contexts refuse. `torch.utils._python_dispatch.TorchDispatchMode`, of
    which they are made; without it selective checkpointing does not work beside expert parallelism.

    Args:
        is_kept: of an operator and its arguments, alike both times.
        compress: what is kept of a result.
        restore: the result from that.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map, tree_map_only

    kept: dict[Any, list[Any]] = {}
    sent: dict[Any, tuple[list[Any], int]] = {}  # results that nobody may read yet, by their memory

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = op(*args, **(kwargs or {}))
            if op is torch.ops._c10d_functional.wait_tensor.default:
                there = sent.pop(storage_reference(result), None)
                if there is not None:
                    row, place = there
                    row[place] = compress(result.detach())
            if is_kept(op, *args):
                row = kept.setdefault(op, [])
                if op.namespace == "_c10d_functional":
                    sent[storage_reference(result)] = row, len(row)
                    row.append(result.detach())
                else:
                    row.append(tree_map_only(Tensor, lambda t: compress(t.detach()), result))
            return result

    class Give(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if is_kept(op, *args):
                return tree_map(restore, kept[op].pop(0))
            return op(*args, **(kwargs or {}))

    return Keep(), Give()


def disable_ddp_graph_splits() -> None:
    """Compiled graphs are not cut where DDP's buckets end.

    `torch._dynamo.config.optimize_ddp`; without it they may be cut, which is slower. Imported here:
    the compiler takes a second, and most runs do not compile.
    """
    config = importlib.import_module("torch._dynamo").config
    if hasattr(config, "optimize_ddp"):
        config.optimize_ddp = False


class Replicas(DistributedDataParallel):
    """DDP whose buckets stay as they are from the first step on.

    DDP sends the first step's gradients in one bucket, and then makes others in the order in which
    gradients were there. An all-reduce among more than two processes adds an element up in an order
    that depends on where in its bucket it is: a resumed run's first step would differ in the last
    bit from the same step of one that went on. Here buckets are in the reverse order of parameters,
    which is nearly that of their gradients, before the first step.

    `Reducer._push_all_rebuilt_params` and `._rebuild_buckets`, without which buckets change once
    as ever; `DistributedDataParallel._build_params_for_reducer`, without which they are filled in
    the order of parameters, and sent late.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        """Take what DDP takes; every process of its group calls it."""
        super().__init__(module, **settings)
        self._fix_buckets()
        self._sent_before = 0

    def _fix_buckets(self) -> None:
        own = cast(Any, self.reducer)
        if hasattr(own, "_push_all_rebuilt_params") and hasattr(own, "_rebuild_buckets"):
            own._push_all_rebuilt_params()
            own._rebuild_buckets()

    @property
    def can_go_on(self) -> bool:
        """Whether a pass that failed on one process can be made good; see `send_the_rest`."""
        needed = ("_reset_state", "_get_zeros_like_grad_buckets", "_run_comm_hook")
        return all(hasattr(self.reducer, name) for name in needed)

    def begin_passes(self) -> None:
        """From here on `send_the_rest` counts what was sent."""
        self._sent_before = self._sent()

    def send_the_rest(self) -> None:
        """After a pass that failed here alone: take part in the reductions that others wait for.

        With zeros, in the order of the buckets, from the first that this process had not sent;
        what all have then is no gradient, and `reset` comes next, on every process.

        `Reducer._get_zeros_like_grad_buckets` and `._run_comm_hook`, as DDP's own `join` calls
        them; which buckets were sent is the group's count of its collectives
        (`ProcessGroup._get_sequence_number_for_group`), as between two passes it has no others.
        """
        own = cast(Any, self.reducer)
        buckets = own._get_zeros_like_grad_buckets()
        sent = self._sent() - self._sent_before
        assert 0 <= sent <= len(buckets), (sent, len(buckets))
        for bucket in buckets[sent:]:
            own._run_comm_hook(bucket).wait()

    def reset(self) -> None:
        """Forget a pass that failed; every process calls it.

        `Reducer._reset_state`, which torchft calls for the same purpose.
        """
        cast(Any, self.reducer)._reset_state()
        self._fix_buckets()

    def _sent(self) -> int:
        return int(cast(Any, self.process_group)._get_sequence_number_for_group())

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises where it cannot build a kernel.

    `torch._dynamo.exc.TorchDynamoException`; without it RuntimeError, of which it is one.
    """
    try:
        return (importlib.import_module("torch._dynamo.exc").TorchDynamoException,)
    except (ImportError, AttributeError):
        return (RuntimeError,)


def activate_fa3() -> bool:
    """PyTorch's varlen attention runs FlashAttention 3, which must be installed; whether it does.

    `torch.nn.attention.activate_flash_attention_impl` is public. Its first versions had no backward
    pass, which `torch.nn.attention._fa3._FA3_CUDA_BWD` shows; without that nothing is activated.
    """
    attention = importlib.import_module("torch.nn.attention")
    activate = getattr(attention, "activate_flash_attention_impl", None)
    try:
        kernels = importlib.import_module("torch.nn.attention._fa3")
    except ImportError:
        return False
    if activate is None or not hasattr(kernels, "_FA3_CUDA_BWD"):
        return False
    activate("FA3")
    return True


def is_recomputing() -> bool:
    """Whether a checkpointed part's forward pass is computed again in a backward pass.

    `torch._C._autograd._top_saved_tensors_default_hooks`: such a pass runs under hooks of
    `torch.utils.checkpoint`, a backward pass under none; without it by whether gradients are on,
    which hand-written functions turn off.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return torch.is_grad_enabled() if top is None else top(True) is not None


@contextmanager
def imagined_meshes(sizes: dict[str, int]) -> Iterator[dict[str, DeviceMesh]]:
    """By name meshes of one dimension whose other processes do not exist; this one is the first.

    For fake tensors: nothing is sent, whatever group the process really has. `FakeProcessGroup`,
    `ProcessGroup._register_backend` and `._set_group_name`, `DeviceMesh(_init_backend, _rank)` and
    `._dim_group_names`, `distributed_c10d._world` and its register of names; without them no run
    with tensor, context or expert parallelism is counted. Ranks are beyond all real ones, so that
    what DTensor remembers of a mesh is never taken for a real one's.
    """
    from torch._C._distributed_c10d import FakeProcessGroup, _unregister_process_group
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    own, groups, meshes, first = dist.get_rank(), list[Any](), dict[str, DeviceMesh](), 2**30
    try:
        for name, size in sizes.items():
            group: Any = dist.ProcessGroup(FakeStore(), 0, size)
            backend: Any = FakeProcessGroup._create_internal(0, size)
            group._register_backend(torch.device("cpu"), group.BackendType.CUSTOM, backend)
            group._set_group_name(f"imagined {name}")
            c10d._world.pg_group_ranks[group] = {own: 0}
            c10d._register_process_group(group.group_name, group)
            groups.append(group)
            ranks = torch.arange(first, first + size)
            mesh: Any = DeviceMesh(
                "cpu", ranks, mesh_dim_names=(name,), _init_backend=False, _rank=first
            )
            mesh._dim_group_names = [group.group_name]
            meshes[name], first = mesh, first + size
        yield meshes
    finally:
        for group in groups:
            _unregister_process_group(group.group_name)
            del c10d._world.pg_group_ranks[group]
        if alone:
            dist.destroy_process_group()


@contextmanager
def unwatched_shapes() -> Iterator[None]:
    """DTensor tries operations on shapes of full tensors, which no dispatch mode is to see here.

    `ShardingPropagator._propagate_tensor_meta_non_cached` and `_disable_current_modes`; without
    them such tensors are counted as if they were there.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    full = getattr(ShardingPropagator, name, None)

    def found(*args: Any) -> Any:
        with _disable_current_modes():
            return cast(Any, full)(*args)

    if full is not None:
        setattr(ShardingPropagator, name, found)
    try:
        yield
    finally:
        if full is not None:
            setattr(ShardingPropagator, name, full)


def record_memory(entries: int | None) -> None:
    """Have the allocator of GPUs keep its newest allocations and frees, with the Python of each.

    `torch.cuda.memory._record_memory_history`, which PyTorch's guide to memory names; without it a
    snapshot has what is in use, and no history. None ends it.
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return
    if entries is None:
        record(enabled=None)
    else:
        record(max_entries=entries, stacks="python")


def memory_history() -> dict[str, Any]:
    """What the allocator of GPUs holds, and its history: `torch.cuda.memory._snapshot`."""
    return cast(dict[str, Any], torch.cuda.memory._snapshot())


def memory_of_profile(profiler: Any) -> dict[str, Any]:
    """The same, of the steps that a profiler has seen, of a CPU's memory too.

    `torch.cuda._memory_viz._profile_to_snapshot`, which PyTorch's viewer calls for profiles;
    without it there is none, and the snapshot is empty.
    """
    viewer = importlib.import_module("torch.cuda._memory_viz")
    convert = getattr(viewer, "_profile_to_snapshot", None)
    if convert is None:
        return {"segments": [], "device_traces": []}
    return cast(dict[str, Any], convert(profiler))


def on_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Have the allocator of GPUs call something before it raises; there is no way to undo it.

    `torch._C._cuda_attach_out_of_memory_observer`, which PyTorch's guide to memory names; without
    it nothing is called. The call gets device, bytes asked for, the device's limit and what is
    free.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(call)

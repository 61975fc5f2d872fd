"""Private APIs of PyTorch that this project uses; no other file uses any.

`torch._foreach_*`, which PyTorch documents, are used elsewhere too. Each function names the private
API, and the effect if a version of PyTorch lacks it. Names inside a pickle (`checkpoint/load.py`)
are data and not called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map, tree_map_only

from llmfoundry.telemetry import span


def has_avx512_bf16() -> bool:
    """Call `torch.cpu._is_avx512_bf16_supported`; without it return False: no bf16 matmuls."""
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return output (N, H, hd), log-sum-exp (H, N) and the state of dropout.

    `torch_attn::_varlen_attn`, the operator below `varlen_attn`, whose log-sum-exp has no gradient.
    Without it and `varlen_backward`, variable-length attention has no sinks.
    """
    importlib.import_module("torch.nn.attention.varlen")  # registers it
    return cast(tuple[Tensor, ...], torch.ops.torch_attn._varlen_attn(q, k, v, **options))


def varlen_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: `torch_attn::_varlen_attn_backward`.

    Args:
        tensors: gradient of the output, q, k, v, output and log-sum-exp.
        options: the others by name.
    """
    backward = torch.ops.torch_attn._varlen_attn_backward
    return cast(tuple[Tensor, Tensor, Tensor], backward(*tensors, **options))


def set_timeouts(group: dist.ProcessGroup, *, host: timedelta, device: timedelta) -> None:
    """Set the timeouts of collectives of a group, for gloo (host) and NCCL (device).

    `ProcessGroup._device_types`, `._get_backend` and `Backend._set_default_timeout`, which
    `distributed_c10d._set_pg_timeout` calls with one value for all devices; without them a group
    keeps PyTorch's defaults.
    """
    for kind in getattr(group, "_device_types", ()):
        backend = group._get_backend(kind)
        change = getattr(backend, "_set_default_timeout", None)
        if change is not None and backend.name() in ("gloo", "nccl"):
            change(device if backend.name() == "nccl" else host)


def newest_messages() -> bytes:
    """Return this process's last collectives from the flight recorder, pickled; b"": none.

    `_dump_fr_trace` of torch.distributed, for gloo and NCCL, and `_dump_nccl_trace` of earlier
    versions. PyTorch records collectives automatically (TORCH_FR_BUFFER_SIZE), and its program
    torch.distributed.flight_recorder.fr_trace compares the records of all ranks.
    """
    module = importlib.import_module("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if hasattr(module, name):
            return cast(bytes, getattr(module, name)())
    return b""


def default_store() -> dist.Store:
    """Return the store of the rendezvous: `distributed_c10d._get_default_store`.

    PyTorch has had it since 1.x and has no public alternative. Without it multi-process runs fail.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return the location of a checkpoint's tensor: `filesystem._StorageInfo` of DCP.

    The table of a checkpoint consists of these; without it no checkpoint can be loaded.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def small_group(
    store: dist.Store, rank: int, size: int, *, device: torch.device, limit: timedelta
) -> Any:
    """Create a process group of a few ranks that no registry of PyTorch knows.

    `dist.ProcessGroupNCCL` and `dist.ProcessGroupGloo`, as torchft uses them. All ranks must call
    `new_group` in the same order, and a hung rank would block the others. Without these classes a
    check of links fails.

    Args:
        store: store in which only these ranks meet.
        rank: rank in the group.
        size: number of ranks.
        device: device of the tensors.
        limit: timeout of gloo's collectives. That of NCCL is ten times longer, because its watchdog
            would then kill the process: call `leave_group` before.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    torch.cuda.set_device(device)  # of the current thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 10 * limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


def leave_group(group: Any, *, failed: bool) -> None:
    """Free the resources of a `small_group`.

    `shutdown` of NCCL, or `abort` if a rank is missing and would be waited for; without them the
    communicator stays until the process ends. gloo frees its resources itself.
    """
    end = getattr(group, "abort" if failed else "shutdown", None)
    if end is not None and isinstance(group, getattr(dist, "ProcessGroupNCCL", ())):
        end()


def start_all_gather(every: Tensor, own: Tensor) -> dist.Work | None:
    """Start an all-gather of `own` of all ranks into the rows of `every`.

    `dist.all_gather_into_tensor`, which PyTorch 2.13 renames to `all_gather_single`, with a
    warning.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(every, own, async_op=True)
    return work


def flattened(mesh: DeviceMesh, names: list[str], backend: str | None) -> DeviceMesh:
    """Return adjacent dimensions of a mesh as one dimension, a view of the same mesh.

    `DeviceMesh._flatten`, as torchtitan uses it; without it only data_parallel_* degrees work.
    """
    part = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
    if part.size() == dist.get_world_size():
        backend = None  # use the default group
    return part._flatten("_".join(names), backend_override=backend)


def unflattened(mesh: DeviceMesh, sizes: dict[str, int], backend: str | None) -> DeviceMesh:
    """Return a mesh of one dimension as several dimensions, a view of the same mesh.

    `DeviceMesh._unflatten`; without it expert_parallel_degree does not work.
    """
    # the backend of dimensions that need a new group
    new_groups = [name for name, size in sizes.items() if 1 < size < mesh.size()]
    override: Any = None
    if backend and new_groups:
        override = dict.fromkeys(new_groups, backend)
    return mesh._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=override)


def concatenated(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return two views of one mesh, of one dimension each, as a mesh of two dimensions.

    `DeviceMesh._concatenate`, which FSDP calls for weights that are sharded twice; without it
    weights cannot be.
    """
    return DeviceMesh._concatenate([first, second])


def all_to_all(x: Tensor, group: str) -> Tensor:
    """Send x[i] (one per rank) to rank i of the group with this name.

    `torch.ops._c10d_functional`, as in `all_gather` and `reduce_scatter`: the compiler and
    selective checkpointing recognize these operators. Without it context parallelism does not work.

    Returns:
        The received parts in rank order, in the shape of x.
    """
    ops, sizes = torch.ops._c10d_functional, [1] * len(x)
    with _messages():
        return ops.wait_tensor(ops.all_to_all_single(x, sizes, sizes, group))


def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Return the x of all `size` ranks of a group, concatenated along the first dimension."""
    ops = torch.ops._c10d_functional
    with _messages():
        return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    """Return this rank's part, one of `size`, of the first dimension of the sum over a group."""
    ops = torch.ops._c10d_functional
    with _messages():
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))


def start_all_to_all(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Start to send `sent[p]` rows to each rank p of a group, in order; pass the result to `wait`.

    `torch.ops._c10d_functional.all_to_all_single`: no public function both returns a tensor that
    recomputation can save and waits later. Without it expert_parallel_degree does not work.

    Returns:
        The rows to receive, `received[p]` from each rank; not to be read before `wait`.
    """
    name = group.group_name
    return torch.ops._c10d_functional.all_to_all_single(rows, received, sent, name)


def start_all_reduce(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Start an all-reduce of `values` over a group; pass the result to `wait`.

    `torch.ops._c10d_functional.all_reduce`, for the same reason. Without it the router's statistics
    are those of one rank, and parallelism that shares the tokens of a sequence does not work.
    """
    return torch.ops._c10d_functional.all_reduce(values, "sum", group.group_name)


def wait(values: Tensor) -> Tensor:
    """Wait for a collective above and return its result: `_c10d_functional.wait_tensor`."""
    with _messages():
        return torch.ops._c10d_functional.wait_tensor(values)


def _messages() -> AbstractContextManager[None]:
    """Context of the span for communication waits; compiled graphs have none."""
    return nullcontext() if torch.compiler.is_compiling() else span("messages")


def watch_fsdp(around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Make FSDP2 enter a context when it waits for shards or gradients, or copies them.

    `FSDPParamGroup.unshard`, `.wait_for_unshard`, `.post_backward` and `.finalize_backward`, for
    all models of the process. A method that PyTorch lacks counts as part of its pass.

    Returns:
        Function that undoes the change.
    """
    module = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    group = getattr(importlib.import_module(module), "FSDPParamGroup", None)
    names = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    originals = {name: getattr(group, name) for name in names if hasattr(group, name)}

    def within_context(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that enters the context and calls `method`."""

        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with around():
                return method(*args, **kwargs)

        return wrapper

    def undo() -> None:
        """Restore the original methods."""
        for name, method in originals.items():
            setattr(group, name, method)

    for name, method in originals.items():
        setattr(group, name, within_context(method))
    return undo


def storage_reference(tensor: Tensor) -> Any:
    """Return a key of a tensor's storage: equal for all its tensors, and `expired()` once freed.

    `torch.multiprocessing.reductions.StorageWeakRef`, which also prevents reuse of the address.
    Without it activations cannot be compressed.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def set_activation_memory_budget(budget: float | None) -> None:
    """Set the fraction of activations that a compiled graph saves; None: the fastest choice.

    `torch._functorch.config.activation_memory_budget`; without it a budget has no effect.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    config.activation_memory_budget = 1.0 if budget is None else budget


def _as_it_is(value: Any) -> Any:
    """Return the value: saved results are not compressed."""
    return value


def scaled_grouped_mm(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, ends: Tensor
) -> Tensor:
    """Call `torch._scaled_grouped_mm`, as torchao does; `ops/moe/fp8.py` states its requirements.

    Args:
        left: (N, K) float8_e4m3fn, row-major.
        right: (E, K, M) float8_e4m3fn, column-major.
        left_scales: (N,) fp32; for MXFP8 the result of `swizzle_scales` in `ops/moe/experts.py`.
        right_scales: (E, M) fp32; for MXFP8 (E, S), the same of each expert's M columns.
        ends: (E,) int32, end of each expert's rows.

    Returns:
        (N, M) in bfloat16.
    """
    is_mx = left_scales.dtype == torch.uint8
    if is_mx:
        left_scales = left_scales.view(torch.float8_e8m0fnu)
        right_scales = right_scales.view(torch.float8_e8m0fnu)
    return torch._scaled_grouped_mm(
        left, right, left_scales, right_scales, offs=ends, out_dtype=torch.bfloat16,
        use_fast_accum=not is_mx,  # of Hopper
    )  # fmt: skip


@dataclass(frozen=True)
class _Unread:
    """Shape of a result that is not saved."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> _Unread:
        return _Unread(tensor.shape, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class _SavedResults:
    """Saved results of operators, for `selective_contexts`, whose arguments the fields are.

    Attributes:
        by_operator: saved results of each operator in the order of its calls.
        pending: for each pending collective, by the storage of its result, the list and the index
            at which the result is saved.
        unread: storages of results that no backward pass reads.
    """

    compress: Callable[[Tensor], Any]
    restore: Callable[[Any], Any]
    has_unread: Callable[[Any], bool]
    by_operator: dict[Any, list[Any]] = field(default_factory=dict)
    pending: dict[Any, tuple[list[Any], int]] = field(default_factory=dict)
    unread: set[Any] = field(default_factory=set)

    def end_collective(self, waited: Tensor, result: Tensor) -> None:
        """Compress the result of a collective, which is valid only now that it was waited for."""
        # the storage of the argument, as the result on fake tensors has another
        entry = self.pending.pop(storage_reference(waited), None)
        if entry is not None:
            results, index = entry
            results[index] = self.compress(result.detach())

    def keep(self, op: Any, args: Any, result: Any) -> None:
        """Save the result of an operator."""
        results = self.by_operator.setdefault(op, [])
        is_collective = op.namespace == "_c10d_functional"
        if is_collective and storage_reference(args[0]) in self.unread:
            results.append(_Unread.of(result))
        elif self.has_unread(op):
            first, *others = result
            self.unread.add(storage_reference(first))
            results.append((_Unread.of(first), *self._compressed(others)))
        elif is_collective:
            self.pending[storage_reference(result)] = results, len(results)
            results.append(result.detach())
        else:
            results.append(self._compressed(result))

    def give(self, op: Any) -> Any:
        """Return the next saved result of an operator."""

        def given(entry: Any) -> Any:
            return entry.empty() if isinstance(entry, _Unread) else self.restore(entry)

        return tree_map(given, self.by_operator[op].pop(0))

    def _compressed(self, result: Any) -> Any:
        return tree_map_only(Tensor, lambda t: self.compress(t.detach()), result)


def selective_contexts(
    is_kept: Callable[..., bool],
    compress: Callable[[Tensor], Any] = _as_it_is,
    restore: Callable[[Any], Any] = _as_it_is,
    *,
    has_unread: Callable[[Any], bool] = lambda op: False,
) -> tuple[Any, Any]:
    """Return contexts like `create_selective_checkpoint_contexts` that tolerate other operators.

    The hooks of an FSDP unit inside a recomputed module run different operators during
    recomputation, which PyTorch's contexts reject. The contexts are subclasses of
    `torch.utils._python_dispatch.TorchDispatchMode`; without it selective checkpointing does not
    work with expert parallelism.

    Args:
        is_kept: whether the result of an operator with these arguments is saved; must be the same
            in both passes.
        compress: function from a result to what is saved.
        restore: function from what is saved to the result.
        has_unread: whether no backward pass reads the first result of an operator. That result, and
            the result of a collective that sends it, are saved as shapes. The recomputation gets
            uninitialized memory in their place.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    saved = _SavedResults(compress, restore, has_unread)

    class Keep(TorchDispatchMode):
        """Saves results in the forward pass."""

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = op(*args, **(kwargs or {}))
            if op is torch.ops._c10d_functional.wait_tensor.default:
                saved.end_collective(args[0], result)
            if is_kept(op, *args):
                saved.keep(op, args, result)
            return result

    class Give(TorchDispatchMode):
        """Returns saved results in the recomputation, in the same order."""

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return saved.give(op) if is_kept(op, *args) else op(*args, **(kwargs or {}))

    return Keep(), Give()


def disable_ddp_graph_splits() -> None:
    """Do not split compiled graphs at the ends of DDP's buckets.

    `torch._dynamo.config.optimize_ddp`; without it graphs may be split, which is slower. Imported
    here, because importing the compiler takes a second and most runs do not compile.
    """
    config = importlib.import_module("torch._dynamo").config
    if hasattr(config, "optimize_ddp"):
        config.optimize_ddp = False


class Replicas(DistributedDataParallel):
    """DDP whose buckets do not change after the first step.

    DDP reduces the gradients of the first step in one bucket, and then creates buckets in the order
    in which gradients became ready. An all-reduce over more than two ranks adds an element in an
    order that depends on its position in the bucket. The first step of a resumed run would
    therefore differ in the last bit from the same step of an uninterrupted run. Here buckets are in
    the reverse order of parameters from the beginning, which is nearly the order of gradients.

    `Reducer._push_all_rebuilt_params` and `._rebuild_buckets`; without them buckets change once, as
    in DDP. `DistributedDataParallel._build_params_for_reducer`; without it buckets are in the order
    of parameters and reduced late.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        """Take DDP's arguments; all ranks of the group must call this."""
        super().__init__(module, **settings)
        self._fix_buckets()
        self._sent_before = 0

    def _fix_buckets(self) -> None:
        """Create the final buckets, in the order of parameters that the reducer was given."""
        reducer = cast(Any, self.reducer)
        if hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets"):
            reducer._push_all_rebuilt_params()
            reducer._rebuild_buckets()

    @property
    def can_go_on(self) -> bool:
        """Return whether the group can recover from a pass that failed on one rank."""
        methods = ("_reset_state", "_get_zeros_like_grad_buckets", "_run_comm_hook")
        return all(hasattr(self.reducer, name) for name in methods)

    def begin_passes(self) -> None:
        """Start to count the reductions for `send_the_rest`."""
        self._sent_before = self._sent()

    def send_the_rest(self) -> None:
        """After a pass that failed only on this rank, join the reductions that others wait for.

        Contributes zeros, in the order of buckets, from the first bucket that this rank had not
        reduced. The results are not gradients; all ranks must call `reset` next.

        `Reducer._get_zeros_like_grad_buckets` and `._run_comm_hook`, as in DDP's `join`. The number
        of reduced buckets is the group's count of collectives
        (`ProcessGroup._get_sequence_number_for_group`), as it has no others between two passes.
        """
        reducer = cast(Any, self.reducer)
        buckets = reducer._get_zeros_like_grad_buckets()
        sent = self._sent() - self._sent_before
        assert 0 <= sent <= len(buckets), (sent, len(buckets))
        for bucket in buckets[sent:]:
            reducer._run_comm_hook(bucket).wait()

    def reset(self) -> None:
        """Discard a failed pass; all ranks must call this.

        `Reducer._reset_state`, which torchft calls for the same purpose.
        """
        cast(Any, self.reducer)._reset_state()
        self._fix_buckets()

    def _sent(self) -> int:
        """Return the number of collectives that this rank has started in the group."""
        return int(cast(Any, self.process_group)._get_sequence_number_for_group())

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return DDP's parameters, and whether their gradients are sparse, in reverse order."""
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile raises if it cannot build a kernel.

    `torch._dynamo.exc.TorchDynamoException`; without it its base class, RuntimeError.
    """
    try:
        return (importlib.import_module("torch._dynamo.exc").TorchDynamoException,)
    except (ImportError, AttributeError):
        return (RuntimeError,)


def activate_fa3() -> bool:
    """Make PyTorch's varlen attention run FlashAttention 3 if it is installed; return if it does.

    Its first versions had no backward pass, which the presence of
    `torch.nn.attention._fa3._FA3_CUDA_BWD` shows; without that nothing is activated.
    """
    return _activate_flash("FA3", "_fa3", "_FA3_CUDA_BWD")


def activate_fa4() -> bool:
    """Make PyTorch's flash attention run FlashAttention 4 if it is installed; return if it does.

    Its first versions had no windows, which the presence of
    `torch.nn.attention._fa4._aten_to_fa4_window_size` shows; without that nothing is activated.
    """
    return _activate_flash("FA4", "_fa4", "_aten_to_fa4_window_size")


def _activate_flash(version: str, module: str, feature: str) -> bool:
    """Activate a version of FlashAttention if its module of `torch.nn.attention` has a feature.

    `torch.nn.attention.activate_flash_attention_impl` is public.
    """
    attention = importlib.import_module("torch.nn.attention")
    activate = getattr(attention, "activate_flash_attention_impl", None)
    try:
        kernels = importlib.import_module(f"torch.nn.attention.{module}")
    except ImportError:
        return False
    if activate is None or not hasattr(kernels, feature):
        return False
    activate(version)
    return True


def restore_fa2() -> None:
    """Make PyTorch's flash attention run FlashAttention 2 again, after `activate_fa4`."""
    attention = importlib.import_module("torch.nn.attention")
    if attention.current_flash_attention_impl() == "FA4":
        attention.restore_flash_attention_impl()


def is_recomputing() -> bool:
    """Return whether a checkpointed forward pass is being recomputed in a backward pass.

    `torch._C._autograd._top_saved_tensors_default_hooks`: recomputation runs under hooks of
    `torch.utils.checkpoint`, a backward pass does not. Without it the fallback is whether gradients
    are enabled, which handwritten functions disable.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return torch.is_grad_enabled() if top is None else top(True) is not None


@contextmanager
def imagined_meshes(sizes: dict[str, int]) -> Iterator[dict[str, DeviceMesh]]:
    """Yield one-dimensional meshes by name, whose other ranks do not exist; this rank is the first.

    For fake tensors: nothing is communicated. `FakeProcessGroup`, `ProcessGroup._register_backend`
    and `._set_group_name`, `DeviceMesh(_init_backend, _rank)` and `._dim_group_names`,
    `distributed_c10d._world` and its name registry; without them runs with tensor, context or
    expert parallelism are not counted. Rank numbers are above all real ones, so that DTensor's
    cache does not confuse these meshes with real ones.
    """
    from torch._C._distributed_c10d import FakeProcessGroup, _unregister_process_group
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DTensor needs a default group
    has_no_group = not dist.is_initialized()
    if has_no_group:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    groups, meshes = list[Any](), dict[str, DeviceMesh]()
    rank, first_rank = dist.get_rank(), 2**30
    try:
        for name, size in sizes.items():
            # a group of this rank and ranks that do not exist
            group: Any = dist.ProcessGroup(FakeStore(), 0, size)
            backend: Any = FakeProcessGroup._create_internal(0, size)
            group._register_backend(torch.device("cpu"), group.BackendType.CUSTOM, backend)
            group._set_group_name(f"imagined {name}")
            c10d._world.pg_group_ranks[group] = {rank: 0}
            c10d._register_process_group(group.group_name, group)
            groups.append(group)

            # a mesh over the group, with rank numbers of its own
            ranks = torch.arange(first_rank, first_rank + size)
            mesh: Any = DeviceMesh(
                "cpu", ranks, mesh_dim_names=(name,), _init_backend=False, _rank=first_rank
            )
            mesh._dim_group_names = [group.group_name]
            meshes[name] = mesh
            first_rank += size
        yield meshes
    finally:
        for group in groups:
            _unregister_process_group(group.group_name)
            del c10d._world.pg_group_ranks[group]
        if has_no_group:
            dist.destroy_process_group()


@contextmanager
def unwatched_shapes() -> Iterator[None]:
    """Hide DTensor's shape propagation, which runs operations on full shapes, from dispatch modes.

    `ShardingPropagator._propagate_tensor_meta_non_cached` and `_disable_current_modes`; without
    them such tensors are counted as if they were allocated.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name, None)

    def without_modes(*args: Any) -> Any:
        with _disable_current_modes():
            return cast(Any, original)(*args)

    if original is not None:
        setattr(ShardingPropagator, name, without_modes)
    try:
        yield
    finally:
        if original is not None:
            setattr(ShardingPropagator, name, original)


def record_memory(entries: int | None) -> None:
    """Make the CUDA allocator record its newest events, with Python stacks; None: stop.

    `torch.cuda.memory._record_memory_history`, which PyTorch's guide to memory documents; without
    it a snapshot has current allocations and no history.
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return
    if entries is None:
        record(enabled=None)
    else:
        record(max_entries=entries, stacks="python")


def memory_history() -> dict[str, Any]:
    """Return a snapshot of the CUDA allocator and its history: `torch.cuda.memory._snapshot`."""
    return cast(dict[str, Any], torch.cuda.memory._snapshot())


def memory_of_profile(profiler: Any) -> dict[str, Any]:
    """Return such a snapshot of the steps that a profiler recorded, including CPU memory.

    `torch.cuda._memory_viz._profile_to_snapshot`, which PyTorch's viewer calls for profiles;
    without it the snapshot is empty.
    """
    viewer = importlib.import_module("torch.cuda._memory_viz")
    convert = getattr(viewer, "_profile_to_snapshot", None)
    if convert is None:
        return {"segments": [], "device_traces": []}
    return cast(dict[str, Any], convert(profiler))


def on_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Make the CUDA allocator call a function before it raises out of memory; cannot be undone.

    `torch._C._cuda_attach_out_of_memory_observer`, which PyTorch's guide to memory documents;
    without it nothing is called. The arguments are device, requested bytes, the device's limit and
    free bytes.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(call)

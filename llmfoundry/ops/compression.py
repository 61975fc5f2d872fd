"""Compression of saved activations to 8 bits until the backward pass.

Entry point: `Compressor.hooks`, which `distributed/activation_checkpoint.py` puts around the
forward pass of a block. Every activation that autograd saves in it, of attention, feed-forward
layers and experts alike, is quantized when it is saved and dequantized when the backward pass needs
it. The forward pass itself stays exact. `blockwise.py` has the formats. COAT (Xi et al., 2024) and
ActNN (Chen et al., 2021) train in this way.

Weights, tables that all blocks share, statistics of norms, softmax sums and router weights are not
compressed. No tensor value is read on the host, so that the code runs on fake tensors and never
waits for the device.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.distributed.tensor import DTensor

from llmfoundry.ops import blockwise
from llmfoundry.ops.blockwise import BLOCK, FORMATS, BlockwiseTensor
from llmfoundry.ops.torch_private import storage_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that are compressed
SMALL = 4096  # tensors with fewer values are not compressed
NARROW = 16  # nor are tensors with less than 1 / NARROW of the residual stream's values per token
DEPTH = 12  # autograd nodes that are searched to find out whether a tensor depends only on weights


class _Kept:
    """Compressed values of one storage, which several operations may have saved.

    The first operation that needs them dequantizes them; they stay until the last one has read
    them.
    """

    def __init__(self, packed: BlockwiseTensor, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self.waiting = 0
        self.restored: Tensor | None = None

    def take(self) -> Tensor:
        flat = self.restored
        if flat is None:
            flat = torch.ops.llmfoundry.dequantize(*self.packed, self.dtype)
        self.waiting -= 1
        self.restored = flat if self.waiting > 0 else None
        return flat


@dataclass(frozen=True)
class Compressed:
    """A saved tensor: its values and its memory layout.

    Attributes:
        kept: values in memory order.
        shape: sizes of the dimensions in memory order.
        order: position of each dimension in memory order.
    """

    kept: _Kept
    shape: tuple[int, ...]
    order: tuple[int, ...]


Saved = Tensor | Compressed


@dataclass(frozen=True)
class _Scope:
    """Information that distinguishes activations of a forward pass from other saved tensors.

    Attributes:
        module: module whose forward pass it is.
        least: minimum number of values of an activation.
        tables: storages that all blocks share.
        stop: autograd node of the residual stream's input; None: no parameter before is trained.
    """

    module: nn.Module
    least: int
    tables: set[Any]
    stop: Node | None


class Compressor:
    """Compresses the tensors that the blocks of a model save, each storage once.

    Args:
        kind: a name of FORMATS.
        exact: largest number of values per token of tensors that are not compressed in any case:
            the number of experts that a router scores, or of attention heads.
    """

    _scope: _Scope

    def __init__(self, kind: str, *, exact: int = 0) -> None:
        self.kind, self.exact = FORMATS[kind], exact
        self._kept: dict[Any, weakref.ref[_Kept]] = {}  # the storage first

    def hooks(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return a context in which saved tensors are compressed.

        Args:
            module: module whose forward pass runs in the context. Its weights are not compressed.
            inputs: positional inputs; the first is the residual stream (..., D). Tensors inside
                dataclasses belong to all blocks and are not compressed.
            named: keyword inputs, which are not compressed (the first may be the stream).
        """
        for key, kept in list(self._kept.items()):
            if key[0].expired() or kept() is None:
                del self._kept[key]
        x = next(value for value in (*inputs, *named.values()) if isinstance(value, Tensor))
        width = max(1, x.shape[-1])
        least = x.numel() // width * max(width // NARROW, self.exact) + 1
        shared = [value for value in inputs if dataclasses.is_dataclass(value)]
        others = [value for value in named.values() if value is not x]
        tables = {_storage(tensor) for tensor in _tensors((shared, others))}
        self._scope = _Scope(module, max(SMALL, least), tables, x.grad_fn)
        return saved_tensors_hooks(self.save, restore)

    def save(self, tensor: Tensor) -> Saved:
        """Return what autograd saves in place of a tensor."""
        scope = self._scope
        if not self._is_wide(tensor) or _storage(tensor) in scope.tables:
            return _alias(tensor)
        if _is_weight(tensor, scope.module, scope.stop):
            return _alias(tensor)
        return self.compress(tensor)

    def keep(self, result: Tensor) -> Saved:
        """Return what selective checkpointing saves in place of an operator's result."""
        return self.compress(result) if self._is_wide(result) else result

    def _is_wide(self, tensor: Tensor) -> bool:
        is_wide = tensor.dtype in DTYPES and tensor.numel() >= self._scope.least
        return is_wide and not isinstance(tensor, DTensor) and not _repeats(tensor)

    def compress(self, tensor: Tensor) -> Compressed:
        """Compress a tensor, reusing the values if its storage was compressed before."""
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        places = tuple(order.index(dim) for dim in range(tensor.ndim))
        values = tensor.detach().permute(order)
        dense = values.is_contiguous()
        key = (
            storage_reference(tensor),
            tensor.storage_offset(),
            tensor.dtype,
            None if tensor.is_inference() else tensor._version,
            tensor.numel() if dense else (tuple(values.shape), values.stride()),
        )
        known = self._kept.get(key)
        kept = None if known is None else known()
        if kept is None:
            packed = torch.ops.llmfoundry.quantize(values.reshape(-1), self.kind)
            kept = _Kept(BlockwiseTensor(*packed), tensor.dtype)
            self._kept[key] = weakref.ref(kept)
        kept.waiting += 1
        return Compressed(kept, tuple(values.shape), places)


def restore(saved: Any) -> Any:
    """Return a saved tensor in its layout; other values are returned unchanged."""
    if not isinstance(saved, Compressed):
        return saved
    return saved.kept.take().view(saved.shape).permute(saved.order)


@cache
def _steps(kind: str) -> ModuleType:
    """Return the module of Triton kernels on CUDA, else that of PyTorch functions."""
    if kind != "cuda" or find_spec("triton") is None:
        return blockwise
    from llmfoundry.ops import blockwise_triton

    return blockwise_triton


@torch.library.custom_op(
    "llmfoundry::quantize",
    mutates_args=(),
    schema="(Tensor x, ScalarType kind) -> (Tensor, Tensor)",
)
def _quantize(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    return _steps(x.device.type).quantize(x, kind)


@_quantize.register_fake
def _(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = -(-x.shape[0] // BLOCK)
    return torch.empty_like(x, dtype=kind), x.new_empty(blocks, dtype=torch.bfloat16)


@torch.library.custom_op(
    "llmfoundry::dequantize",
    mutates_args=(),
    schema="(Tensor values, Tensor scales, ScalarType dtype) -> Tensor",
)
def _dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _steps(values.device.type).dequantize(BlockwiseTensor(values, scales), dtype)


@_dequantize.register_fake
def _(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(values, dtype=dtype)


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias: a tensor that references its own node would never be freed."""
    return tensor if tensor.is_leaf else tensor.detach()


def _repeats(tensor: Tensor) -> bool:
    """Return whether several elements share a memory location."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _storage(tensor: Tensor) -> Any:
    return storage_reference(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _is_weight(tensor: Tensor, module: nn.Module, stop: Node | None) -> bool:
    """Return whether a tensor is a weight, a view of one, or a cast copy of one.

    FSDP frees gathered weights and gathers them again, into the same storage, for the backward
    pass. Their storage must therefore be saved as it is.
    """
    parameters = list(module.parameters())
    if _storage(tensor) in {_storage(p) for p in parameters}:
        return True
    if tensor.grad_fn is None:  # a copy of a frozen weight, or a compiled graph's: by its shape
        copied = [p for p in parameters if p.ndim > 1 and p.dtype != tensor.dtype]
        shape = (tensor.shape[:-1].numel(), tensor.shape[-1])  # of stacked experts as of a matrix
        shapes = {way for p in copied for way in (tuple(p.shape), tuple(p.shape[::-1]))}
        return not tensor.requires_grad and shape in shapes
    nodes, seen = [tensor.grad_fn], set[Node]()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if node is stop or len(seen) > DEPTH:
            return False
        if variable is not None and not isinstance(variable, nn.Parameter):
            return False
        nodes += [above for above, _ in node.next_functions if above is not None]
    return True


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(vars(value))

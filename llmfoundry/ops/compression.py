"""Activations that wait for the backward pass in 8 bits: one mechanism for all that a block saves.

`distributed/activation_checkpoint.py` puts `Compressor.hooks` around the forward pass of a block:
whatever autograd saves in it, of attention, feed-forward layers and experts alike, is quantized as
it is saved and restored as the backward pass asks for it. The forward pass itself stays exact.

`blockwise.py` has the formats. COAT (Xi et al., 2024) and ActNN (Chen et al., 2021) train with
such. Weights, tables that all blocks share, statistics of norms, softmax sums and what a router
weighs by stay as they are.

Nothing here reads a tensor's values on the host: it runs on fake tensors, and the device is never
waited for.
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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that are compressed
SMALL = 4096  # values of a tensor that is not worth a kernel
NARROW = 16  # a tensor with fewer values a token than the stream's width over this stays exact
DEPTH = 12  # autograd nodes between a weight and what is made of weights alone


class _Kept:
    """One tensor's values, which several operations may have saved.

    The first of them to ask restores the values, which stay until the last has asked.
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
    """A saved tensor: its values, and how they lie.

    Attributes:
        kept: the values in the order of memory.
        shape: of the dimensions in that order.
        order: the place of each dimension in it.
    """

    kept: _Kept
    shape: tuple[int, ...]
    order: tuple[int, ...]


Saved = Tensor | Compressed


@dataclass(frozen=True)
class _Scope:
    """What tells the activations of a forward pass from all else that it saves.

    Attributes:
        module: whose pass it is.
        least: values that an activation has at least.
        tables: memory that all blocks share.
        stop: where the residual stream came from; None: from nothing that trains.
    """

    module: nn.Module
    least: int
    tables: set[Any]
    stop: Node | None


class Compressor:
    """What the blocks of one model save, each storage once.

    Args:
        kind: of FORMATS.
        exact: values a token of the widest tensor that stays as it is whatever the stream's width:
            experts that a router scores, heads of which attention keeps sums.
    """

    _scope: _Scope

    def __init__(self, kind: str, *, exact: int = 0) -> None:
        self.kind, self.exact = FORMATS[kind], exact
        self._kept: dict[Any, weakref.ref[_Kept]] = {}  # the storage first

    def hooks(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A context in which what is saved is compressed.

        Args:
            module: whose forward pass runs in it; its weights are left as they are.
            inputs: of it, the residual stream (..., D) the first. What lies in dataclasses among
                them belongs to all blocks, and is left as it is.
            named: its other inputs, left as they are too (the first may be the stream).
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
        """What autograd holds in the place of a tensor."""
        scope = self._scope
        if not self._is_wide(tensor) or _storage(tensor) in scope.tables:
            return _alias(tensor)
        if _is_weight(tensor, scope.module, scope.stop):
            return _alias(tensor)
        return self.compress(tensor)

    def keep(self, result: Tensor) -> Saved:
        """What selective checkpointing holds in the place of an operator's result."""
        return self.compress(result) if self._is_wide(result) else result

    def _is_wide(self, tensor: Tensor) -> bool:
        is_wide = tensor.dtype in DTYPES and tensor.numel() >= self._scope.least
        return is_wide and not isinstance(tensor, DTensor) and not _repeats(tensor)

    def compress(self, tensor: Tensor) -> Compressed:
        """The tensor in 8 bits, as whoever saved the same storage before has it."""
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
    """What was saved, as it was laid out; what is not compressed as it is."""
    if not isinstance(saved, Compressed):
        return saved
    return saved.kept.take().view(saved.shape).permute(saved.order)


@cache
def _steps(kind: str) -> ModuleType:
    """Triton's kernels where they run, PyTorch's functions elsewhere."""
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
    """The same storage: a tensor that holds its own node would never be freed."""
    return tensor if tensor.is_leaf else tensor.detach()


def _repeats(tensor: Tensor) -> bool:
    """Whether one place of memory is several elements."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _storage(tensor: Tensor) -> Any:
    return storage_reference(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _is_weight(tensor: Tensor, module: nn.Module, stop: Node | None) -> bool:
    """Whether it is a weight, a view of one, or made of weights alone: a copy in autocast's dtype.

    FSDP frees gathered weights and gathers them again, in the same storage, for the backward pass:
    theirs must stay the storage that is saved.
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
    """All in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(vars(value))

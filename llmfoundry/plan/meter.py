"""What operations on fake tensors hold, compute and move: the instrument of `count.py`.

`benchmarks/memory.py` holds whole steps under it, `count.py` one block. The idea: a dispatch mode
sees every operation of the recipe's own code, with the shapes and dtypes of its tensors, and needs
no formula of what the code does.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from llmfoundry.ops.devices import planned
from llmfoundry.ops.moe.mixture import BODIES
from llmfoundry.ops.torch_private import is_recomputing

Self = TypeVar("Self", bound="Amounts")


@dataclass(frozen=True)
class Amounts:
    """Numbers that add up, field by field."""

    def plus(self: Self, other: Self) -> Self:
        """Of both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(a + b for a, b in pairs))

    def times(self: Self, factor: float) -> Self:
        """So many alike."""
        return type(self)(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class Work(Amounts):
    """What one pass does on one process; messages between processes left out.

    Attributes:
        products: FLOPs of matrix products, two a multiply-add.
        attention: FLOPs of attention; a causal kernel does those of the keys that are seen.
        moved: bytes that all other operations read and write, each a kernel of its own.
        launches: kernels of all kinds.
        fused: `moved` where the compiler makes one kernel of all that stands between two products
            (or messages): it reads what was there before, once, and writes what is there behind it.
        fused_launches: `launches` then.
    """

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    launches: float = 0.0
    fused: float = 0.0
    fused_launches: float = 0.0


@dataclass(frozen=True)
class Pass:
    """`Work` as a function of the rows computed at a time.

    Attributes:
        fixed: whatever the rows: launches, and what is done to weights.
        row: of each row.
    """

    fixed: Work = Work()
    row: Work = Work()

    def of(self, rows: int) -> Work:
        """Of so many rows at a time."""
        return self.fixed.plus(self.row.times(rows))

    def plus(self, other: Pass) -> Pass:
        """Of both."""
        return Pass(self.fixed.plus(other.fixed), self.row.plus(other.row))

    def times(self, factor: float) -> Pass:
        """So many alike."""
        return Pass(self.fixed.times(factor), self.row.times(factor))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation's result; of grouped_mm, whose fake one is of bfloat16 alone, in any dtype.

    Products that add to fp32 fail on fake tensors before PyTorch 2.13, and make nothing.
    """
    if func is torch.ops.aten.addmm.dtype_out:
        return kwargs["out"]
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    narrow = (args[0].bfloat16(), args[1].bfloat16(), *args[2:])
    return func(*narrow, **kwargs).to(args[0].dtype)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it made and that something still holds.

    A storage counts with its size at that time: FSDP frees what it gathered by resizing it to 0.

    Attributes:
        most: the most bytes after any operation since it was last set to 0.
    """

    def __init__(self, *, are_fake: bool = False) -> None:
        """`are_fake`: the tensors at hand are; beside real ones fake tensors are no memory."""
        super().__init__()
        self._counted = (Tensor, FakeTensor, nn.Parameter) if are_fake else (Tensor, nn.Parameter)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._paused = False
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and note what it made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which becomes operations on plain tensors
        kwargs = kwargs or {}
        if self._paused or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func in BODIES and _is_open(args):
            with self:
                made = BODIES[func](*args, **kwargs)
            self._finish_experts()
        else:
            made = _run(func, args, kwargs)
            self._note(func, args, kwargs, made)
        self._watch_all(made)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Hook of what else is counted; before `made` is watched."""

    def _finish_experts(self) -> None:
        """Hook: all of the experts' operator is done."""

    def _watch_all(self, made: Any) -> None:
        if any([self._watch(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]):
            self.most = max(self.most, self.now())

    def _watch(self, tensor: Tensor) -> bool:
        """Whether it is a storage that was not known."""
        if not self._counts(tensor) or self._knows(tensor.untyped_storage()):
            return False
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = weakref.ref(storage)
        return True

    def _counts(self, tensor: Tensor) -> bool:
        """Whether it stands for memory of the device."""
        return type(tensor) in self._counted and tensor.device.type != "meta"

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        known = self._alive.get(storage._cdata)
        return known is not None and known() is storage

    def now(self) -> int:
        """Bytes alive."""
        alive = {key: storage for key, ref in self._alive.items() if (storage := ref()) is not None}
        self._alive = {key: self._alive[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def settled(self) -> int:
        """Bytes alive once cycles are collected and threads of collectives let go of theirs."""
        gc.collect()
        found = self.now()
        for _ in range(10):
            time.sleep(0.01)
            found = min(found, self.now())
        return found

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose operations are one kernel: what it makes between them is not there."""

        def run(*args: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                made = function(*args)
            finally:
                self._paused = before
            if not before:
                self._note(None, args, {}, made)
                self._watch_all(made)
            return made

        return run


def _is_open(args: Any) -> bool:
    """Whether what is inside of the experts' operator counts: a GPU's code, of floats.

    A CPU's asks for numbers of rows; 4 bits are looked up in tables that last.
    """
    what = planned()
    bytes_ = any(isinstance(t, Tensor) and t.dtype == torch.uint8 for t in tree_leaves(args))
    return what is not None and what.kind == "cuda" and not bytes_


PASSES = ("forward", "backward", "again")


@dataclass
class Reading:
    """Bytes alive after an operation, since `Meter.begin`.

    Attributes:
        total: all.
        logits: those of tensors as wide as the vocabulary.
    """

    total: int
    logits: int


@dataclass
class PassRecording:
    """All that one pass forward and back did.

    Attributes:
        work: by the name of the pass, as fields of `Work`; `again` is what the backward pass
            computes again.
        readings: after each operation of forward and of backward pass.
        embedding: how many readings there were when the embedding's gradient was made.
        experts: how many there were when the experts' gradients were there; 0: never.
    """

    work: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in PASSES}
    )
    readings: dict[str, list[Reading]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    embedding: int | None = None
    experts: int = 0


class Meter(LiveBytes):
    """`LiveBytes` that writes down what each operation computes and moves as well.

    Args:
        vocabulary: width of logits on this process; 0: none are looked for.
    """

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__(are_fake=True)
        self._vocabulary, self._pass = vocabulary, "forward"
        self._logits: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._base = 0
        self.recorded = PassRecording()
        self._group: Counter[str] = Counter()  # the work that the compiler's kernel is of
        self._read: dict[int, int] = {}  # by the running group of the compiler, from outside
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These are there already; a view of one is nothing new."""
        for tensor in tensors:
            self._watch(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def begin(self) -> None:
        """Count from here: what is alive now is not of what follows."""
        self._end_group()
        self.recorded, self._base, self._pass = PassRecording(), self.now(), "forward"

    def end(self) -> PassRecording:
        """All since `begin`; what follows is of no interest."""
        self._end_group()
        recorded, self.recorded = self.recorded, PassRecording()
        return recorded

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context in which operations are the backward pass's."""
        self._end_group()
        self._pass = "backward"
        try:
            yield
        finally:
            self._end_group()
            self._pass = "forward"

    def since(self) -> int:
        """Bytes alive of what was made since `begin`."""
        return self.now() - self._base

    def _watch_all(self, made: Any) -> None:
        for leaf in tree_leaves(made):
            is_new = isinstance(leaf, Tensor) and self._watch(leaf)
            if is_new and leaf.ndim and leaf.shape[-1] == self._vocabulary:
                storage = leaf.untyped_storage()
                self._logits[storage._cdata] = weakref.ref(storage)
        wide = sum(s.nbytes() for ref in self._logits.values() if (s := ref()) is not None)
        reading = Reading(self.since(), wide)
        self.most = max(self.most, reading.total)
        self.recorded.readings[self._pass].append(reading)

    def _finish_experts(self) -> None:
        if self._pass == "backward" and not is_recomputing():
            self.recorded.experts = len(self.recorded.readings["backward"]) + 1

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name = "" if func is None else func.name()
        if "embedding_dense_backward" in name and self.recorded.embedding is None:
            self.recorded.embedding = len(self.recorded.readings["backward"])
        again = self._pass == "backward" and is_recomputing()
        work = self.recorded.work["again" if again else self._pass]
        if work is not self._group:
            self._end_group()
            self._group = work
        if name.startswith(MESSAGES):
            self._end_group()
            return
        attention, products = _attention(name, args), _products(func, args, kwargs, made)
        if attention or products:
            self._end_group()
            done = {"products": products, "attention": attention}
            work.update({**done, "launches": 1, "fused_launches": 1})
            return
        if name.startswith(FREE):
            return
        outputs = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func is not None and _is_view(func, inputs, outputs):
            return
        self._move(work, name, inputs, outputs)

    def _move(
        self, work: Counter[str], name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """An operation that memory bounds."""
        written = sum(t.nbytes for t in _distinct(outputs))
        read = {t.untyped_storage()._cdata: _extent(t) for t in inputs}
        if name.startswith(PICKS):  # rows of a table, not all of it
            read = {key: min(size, written) for key, size in read.items()}
        work.update(moved=written + sum(read.values()), launches=1)
        for key, size in read.items():
            if key not in self._made:
                self._read[key] = max(size, self._read.get(key, 0))
        for t in outputs:
            storage = t.untyped_storage()
            self._made[storage._cdata] = weakref.ref(storage)

    def _end_group(self) -> None:
        """The compiler's kernel ends here: what it made and is still there was written."""
        if self._made:
            left = [storage for ref in self._made.values() if (storage := ref()) is not None]
            moved = sum(self._read.values()) + sum(storage.nbytes() for storage in left)
            self._group.update(fused=moved, fused_launches=1)
        self._read, self._made = {}, {}


MESSAGES = ("_c10d_functional::", "c10d::")
FREE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::_local_scalar_dense")
PICKS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index.Tensor")
BACKWARD_OF_FORWARD = 2.5
"""Products of attention's backward pass, which makes its logits again: five for the forward
pass's two (Dao, 2023)."""


def _attention(name: str, args: Sequence[Any]) -> float:
    """FLOPs of an operation that is attention of queries, keys and values (B, H, T, hd)."""
    if not name.startswith("aten::_scaled_dot_product_"):
        return 0.0
    backward = "_backward" in name
    q, k = args[1:3] if backward else args[0:2]
    causal = True in [arg for arg in args if isinstance(arg, bool)]
    queries, keys = q.shape[-2], k.shape[-2]
    seen = (keys - queries + (queries + 1) / 2) / keys if causal and keys >= queries else 1.0
    factor = BACKWARD_OF_FORWARD if backward else 1.0
    return float(factor * 4 * q.numel() * keys * seen)


def _products(func: Any, args: Any, kwargs: Any, made: Any) -> float:
    """FLOPs of an operation that is a matrix product."""
    packet = getattr(func, "_overloadpacket", None)
    if packet is None:
        return 0.0
    if "grouped_mm" in func.name():
        return 2.0 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    named = {key: value for key, value in kwargs.items() if key not in ("out", "out_dtype")}
    if func.namespace == "aten":  # without arguments that no formula knows, such as dtypes
        args = args[: 3 if "addmm" in func.name() else 2]
    return float(formula(*args, **named, out_val=made))


def _is_view(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether all that it gives was there, and it writes nothing."""
    known = {t.untyped_storage()._cdata for t in inputs}
    made = (t.untyped_storage()._cdata for t in outputs)
    return not func._schema.is_mutable and all(storage in known for storage in made)


def _distinct(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    return {t.untyped_storage()._cdata: t for t in tensors}.values()


def _extent(tensor: Tensor) -> int:
    """Bytes of memory that reading it touches: an expanded tensor's are few."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class GpuKernels(TorchFunctionMode):
    """Takes the fused operators that a GPU has where PyTorch's CPU has several in their place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func`, or what a GPU runs of it."""
        kwargs = kwargs or {}
        if func in (F.rms_norm, torch.rms_norm):
            x, shape, *rest = args
            weight, eps = [*rest, *kwargs.values(), None, None][:2]
            return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]
        if func is F.dropout:
            share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            if share and training:
                return torch.native_dropout(args[0], share, True)[0]
        return func(*args, **kwargs)

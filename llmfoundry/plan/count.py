"""Bytes, FLOPs and memory traffic of a recipe's own code for one row, counted on fake tensors.

`memory.py` and the predicted seconds ask `count`. The idea: each kind of block and the ends of the
model (embedding, final norm, head and loss) run once forward and back, in the recipe's precision,
with its recomputation, adapters and frozen weights, parallelized as in a run over processes that do
not exist; `meter.py` writes down what is held, computed and moved. All of it is linear in rows, so
that two passes, of two rows and of three, give what is fixed and what each row adds.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.distributed.context import apply_context_parallel, token_sharding
from llmfoundry.distributed.experts import apply_expert_parallel, share_router_statistics
from llmfoundry.distributed.mesh import imagined
from llmfoundry.distributed.process_group import World
from llmfoundry.distributed.tensor import apply_tensor_parallel
from llmfoundry.models.decoder import Block, Decoder, Root
from llmfoundry.ops.devices import PlannedDevice, planned_for
from llmfoundry.ops.packed_layout import Batch, PackedLayout
from llmfoundry.ops.torch_private import unwatched_shapes
from llmfoundry.plan.meter import Amounts, GpuKernels, Meter, Pass, PassRecording, Reading, Work
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.model import HFModelConfig, ModelConfig, ResolvedModelConfig
from llmfoundry.recipe.parallel import ActivationMemory, Degrees, ParallelConfig, recomputation
from llmfoundry.recipe.train import ResolvedTrainRecipe

CPU = torch.device("cpu")
FEW = 2
"""Rows of the first pass: one more than one, whose sums over rows PyTorch leaves out."""


@dataclass(frozen=True)
class Bytes(Amounts):
    """Bytes as a function of the rows computed at a time, and of the load of experts.

    Attributes:
        fixed: whatever the rows: gradients and copies of weights.
        row: of each row.
        load: of each row and each unit by which the load of this process's experts exceeds the
            mean; 0 where processes share none.
        logits: of each row: logits, of which the loss holds those of a chunk of tokens at most.
    """

    fixed: float = 0.0
    row: float = 0.0
    load: float = 0.0
    logits: float = 0.0


@dataclass(frozen=True)
class BlockCount:
    """What one block does on one process; messages between processes left out.

    Attributes:
        blocks: how many are alike.
        kept: what waits for the backward pass.
        at_forward: moments of the forward pass, in bytes beside what was there before; those that
            another exceeds in every way left out.
        at_backward: moments of the backward pass, beside what all blocks keep, this one's included;
            of a mixture until its experts' gradients are there.
        experts_done: that moment; None: there are no experts, or the operator is not looked into.
        behind_experts: its moments from then on; the experts' gradients are in `fixed`.
        forward: what the forward pass computes and moves.
        backward: what the backward pass does, recomputation left out.
        again: what the backward pass computes again.
    """

    blocks: int
    kept: Bytes
    at_forward: tuple[Bytes, ...]
    at_backward: tuple[Bytes, ...]
    experts_done: Bytes | None
    behind_experts: tuple[Bytes, ...]
    forward: Pass
    backward: Pass
    again: Pass


@dataclass(frozen=True)
class EndsCount:
    """What embedding, final norm, head and loss do on one process.

    Attributes:
        at_loss: moments of the forward pass, in bytes beside what all blocks keep; the loss makes
            the head's gradient there.
        at_head: moments of the backward pass before the blocks', beside that.
        behind: moments of the backward pass behind all blocks.
        forward: what the forward pass computes and moves, the head's gradient included.
        backward: what the backward pass does.
    """

    at_loss: tuple[Bytes, ...]
    at_head: tuple[Bytes, ...]
    behind: tuple[Bytes, ...]
    forward: Pass
    backward: Pass


@dataclass(frozen=True)
class ModelCount:
    """All kinds of blocks, in the order of their last, and the ends."""

    blocks: tuple[BlockCount, ...]
    ends: EndsCount

    @property
    def forward(self) -> Pass:
        """Of the whole model."""
        return _sum([*(one.forward.times(one.blocks) for one in self.blocks), self.ends.forward])

    @property
    def backward(self) -> Pass:
        """Of the whole model, recomputation left out."""
        return _sum([*(one.backward.times(one.blocks) for one in self.blocks), self.ends.backward])

    @property
    def again(self) -> Pass:
        """Of the whole model: what the backward pass computes again."""
        return _sum([one.again.times(one.blocks) for one in self.blocks])


def _sum(parts: Sequence[Pass]) -> Pass:
    total = Pass()
    for part in parts:
        total = total.plus(part)
    return total


def count(
    recipe: ResolvedTrainRecipe,
    degrees: Degrees,
    *,
    device: torch.device = CPU,
    meta_model: Decoder | None = None,
) -> ModelCount:
    """What a filled recipe's model does for one row on one process.

    Args:
        recipe: filled; recomputation decided: auto counts as none.
        degrees: of its mesh. Of replicas and shards it matters only whether there are shards.
        device: where it is to compute.
        meta_model: of fine-tuning: the model on the meta device, frozen and quantized as it will
            be; None: all parameters train.
    """
    if meta_model is None or isinstance(meta_model, Decoder):
        return _count(recipe, degrees, device, meta_model)
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    before, noise.disabled = noise.disabled, True
    try:
        return _count(recipe, degrees, device, meta_model)
    except Exception:  # a class that asks tensors for their values, or has kernels of its own
        alike = {each.name: getattr(recipe.model, each.name) for each in fields(ModelConfig)}
        ours = replace(
            recipe, model=ResolvedModelConfig(**alike)
        )  # of the same sizes, all of it trained
        return _count(ours, degrees, device, None)
    finally:
        noise.disabled = before


def _count(
    recipe: ResolvedTrainRecipe, degrees: Degrees, device: torch.device, meta_model: Decoder | None
) -> ModelCount:
    depth = recipe.model.n_layers if meta_model is None else len(meta_model.blocks)
    memory = _decided(recipe.parallel).activation_memory(depth)
    model = None if isinstance(recipe.model, HFModelConfig) else replace(recipe.model)
    facts: list[Any] = [
        model,
        recipe.max_seq_len,
        recipe.precision,
        recipe.parallel.context_parallel_method,
    ]
    facts += [replace(degrees, replicate=1, shard=1), degrees.is_replicas, device.type]
    known = _known if meta_model is None else _known_of.setdefault(meta_model, {})
    of_ends = repr(facts)
    if model is not None:
        model.vocab_size = 0  # nothing to blocks
    of_blocks = repr([*facts, memory])
    setting = _Setting(recipe, degrees, device, meta_model)
    if of_blocks not in known:
        with setting.counter(memory) as (counter, kinds):
            known[of_blocks] = counter.blocks(kinds)
    if of_ends not in known:
        with setting.counter(replace(memory, checkpointing="none", targets=())) as (counter, _):
            known[of_ends] = counter.ends()
    return ModelCount(known[of_blocks], known[of_ends])


_known: dict[str, Any] = {}  # counts by what they depend on
_known_of: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Setting:
    """What `count` was asked."""

    recipe: ResolvedTrainRecipe
    degrees: Degrees
    device: torch.device
    meta_model: Decoder | None

    @contextmanager
    def counter(self, memory: ActivationMemory) -> Iterator[tuple[_Counter, list[_Kind]]]:
        """The model with a block of each kind, parallelized as in a run, and these kinds."""
        recipe, degrees, kind = self.recipe, self.degrees, self.device.type
        root, kinds, memory = _reduced(recipe, self.meta_model, memory)
        is_sharded = not degrees.is_replicas
        with imagined(degrees) as meshes, unwatched_shapes():
            apply_tensor_parallel(root, meshes)
            apply_expert_parallel(root, meshes)
            apply_context_parallel(root, meshes, recipe.parallel)
            share_router_statistics(root, World(0, 1, 0, CPU), meshes)
            wrap_blocks(root, memory, compile_mode=None)
            layouts = _layouts(recipe, kind, degrees)
            with FakeTensorMode(allow_non_fake_inputs=True):
                fill(
                    root, torch.bfloat16 if is_sharded and recipe.precision == "amp_bf16" else None
                )
                loads = (1.0, 2.0) if degrees.expert > 1 else (1.0,)
                model = self.meta_model
                trains = model is None or any(p.requires_grad for p in model.parameters())
                yield (
                    _Counter(
                        recipe, root, kind, layouts, loads, is_sharded=is_sharded, trains=trains
                    ),
                    kinds,
                )


def _decided(parallel: ParallelConfig) -> ParallelConfig:
    """Where auto counts as none."""
    if parallel.activation_compression == "auto":
        parallel = replace(parallel, activation_compression="none")
    if recomputation(parallel.activation_checkpointing) != "auto":
        return parallel
    return replace(parallel, activation_checkpointing="none", activation_checkpointing_target=None)


def _layouts(recipe: ResolvedTrainRecipe, kind: str, degrees: Degrees) -> dict[int, PackedLayout]:
    """Of so many rows on a CPU two documents in each: it attends to packed rows otherwise.

    Made of real numbers. GPUs' kernels keep as much of packed rows as of plain ones.
    """
    length = recipe.max_seq_len
    ours = not isinstance(recipe.model, HFModelConfig)
    if kind != "cpu" or length == 1 or degrees.context > 1 or not ours:
        return {}
    lengths = [length // 2, length - length // 2]
    return {rows: PackedLayout.from_lengths([lengths] * rows) for rows in (FEW, FEW + 1)}


def fill(root: nn.Module, dtype: torch.dtype | None = None, *, device: torch.device = CPU) -> None:
    """Give a model on the meta device fake tensors in its place, in a `FakeTensorMode`.

    `to_empty` cannot swap fake tensors. What is one parameter in two places stays one.

    Args:
        root: of any classes.
        dtype: of its floating-point parameters, as FSDP gathers them; None: as they are.
        device: where they stand for memory.
    """
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and id(p) not in made:
                kind = dtype if p.is_floating_point() else None
                empty = torch.empty_like(p, device=device, dtype=kind)
                made[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
            if p is not None:
                module._parameters[name] = made[id(p)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


@dataclass(frozen=True)
class _Kind:
    """A block that stands for those like it.

    Attributes:
        place: of it in the reduced model.
        count: how many are alike.
        is_reached: whether anything before it trains.
    """

    place: int
    count: int
    is_reached: bool


@dataclass(frozen=True)
class _Trait:
    """What blocks differ by, that run the same code.

    Attributes:
        layer: what attention does, whose keys it takes left out; None: a class of transformers'.
        owns_kv: whether its keys and values are its own.
        is_taken: whether others take them.
        is_reached: whether anything before it trains.
        targets: what of it is computed again.
        shapes: of its parameters, with dtypes and what trains; empty where all are alike.
    """

    layer: LayerConfig | None
    owns_kv: bool
    is_taken: bool
    is_reached: bool
    targets: frozenset[str]
    shapes: tuple[Any, ...]


def _reduced(
    recipe: ResolvedTrainRecipe, meta_model: Decoder | None, memory: ActivationMemory
) -> tuple[Root, list[_Kind], ActivationMemory]:
    """The model on the meta device with one block of each kind, and how these keep activations."""
    layers = recipe.model.layers() if meta_model is None else getattr(meta_model, "layers", None)
    traits = _traits(meta_model, layers, memory)
    kinds: dict[_Trait, list[int]] = {}
    for i, trait in enumerate(traits):
        kinds.setdefault(trait, []).append(i)
    in_order = sorted(kinds.values(), key=lambda each: each[-1])
    firsts = {each[0]: len(each) for each in in_order}
    makers = {layers[i].kv_from for i in firsts} if layers else set()
    places = sorted({*firsts, *makers})
    kept = None
    if layers:
        kept = [replace(layers[i], kv_from=places.index(layers[i].kv_from)) for i in places]
    if meta_model is None:
        assert kept is not None
        model = _shallow(
            recipe, [(layer, traits[i]) for i, layer in zip(places, kept, strict=True)]
        )
    else:
        copies = nn.ModuleList(copy.deepcopy(meta_model.blocks[i]) for i in places)
        model = copy.deepcopy(meta_model, {id(meta_model.blocks): copies})
        if not isinstance(model, Decoder):
            model._ways, model._head = {False: "positions", True: "mask"}, (1.0, None)
    if kept is not None:
        model.layers = kept
    found = [_Kind(places.index(i), n, traits[i].is_reached) for i, n in firsts.items()]
    targets = tuple(memory.targets[i] for i in places)
    return Root(model), found, replace(memory, targets=targets)


def _shallow(recipe: ResolvedTrainRecipe, layers: Sequence[tuple[LayerConfig, _Trait]]) -> Decoder:
    """The recipe's model on the meta device, with these blocks alone."""
    config = recipe.model
    with torch.device("meta"):
        model = Decoder(replace(config, n_layers=0, block_overrides=None))
        model.blocks.extend(
            Block(config, i, layer, is_reused=trait.is_taken)
            for i, (layer, trait) in enumerate(layers)
        )
    return model.to(torch.bfloat16 if recipe.precision == "bf16" else torch.float32)


def _traits(
    model: Decoder | None, layers: Sequence[LayerConfig] | None, memory: ActivationMemory
) -> list[_Trait]:
    """Of each block; all of a model trains where there is none yet."""
    taken = {layer.kv_from for i, layer in enumerate(layers or ()) if layer.kv_from != i}
    found, reached = [], model is None or _trains_before(model)
    for i, targets in enumerate(memory.targets):
        layer, owns = layers[i] if layers else None, True
        if layer is not None:
            layer, owns = replace(layer, kv_from=0), layer.kv_from == i
        shapes: tuple[Any, ...] = ()
        if model is not None:
            named = list(model.blocks[i].named_parameters())
            shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in named)
        found.append(_Trait(layer, owns, i in taken, reached, targets, shapes))
        reached = reached or any(trains for *_, trains in shapes)
    return found


def _trains_before(model: Decoder) -> bool:
    """Whether what comes before the blocks trains: embeddings."""
    others = {id(p) for block in model.blocks for p in block.parameters()}
    others |= {id(p) for n, p in model.named_parameters() if n.startswith("norm_f.")}
    if model.head_weight is not model.embedding_weight:
        others.add(id(model.head_weight))
    return any(p.requires_grad and id(p) not in others for p in model.parameters())


class _Counter:
    """Runs parts of a reduced model, parallelized and filled, in a `FakeTensorMode`."""

    def __init__(
        self,
        recipe: ResolvedTrainRecipe,
        root: Root,
        kind: str,
        layouts: dict[int, PackedLayout],
        loads: Sequence[float],
        *,
        is_sharded: bool,
        trains: bool,
    ) -> None:
        self._loads, self._trains = loads, trains
        self._recipe, self._root, self._is_sharded = recipe, root, is_sharded
        self._kind, self._shard, self._layouts = kind, token_sharding(root), layouts
        vocabulary = root.model.head_weight
        local = getattr(vocabulary, "to_local", lambda: vocabulary)()
        self._meter = Meter(local.shape[0])
        self._meter.know(root.parameters())
        self._meter.know(root.buffers())
        if not is_sharded:  # gradients of the microbatch before
            for p in root.parameters():
                p.grad = torch.empty_like(p) if p.requires_grad else None
            self._meter.know(p.grad for p in root.parameters() if p.grad is not None)

    @contextmanager
    def _counting(self, load: float = 1.0) -> Iterator[None]:
        what = PlannedDevice(self._kind, self._meter.kernel, load)
        with ExitStack() as stack:
            stack.enter_context(planned_for(what))
            if self._kind == "cuda":
                stack.enter_context(GpuKernels())
            stack.enter_context(self._meter)
            yield

    def _autocast(self) -> Any:
        low = self._recipe.precision not in ("fp32", "bf16")
        return torch.autocast("cpu", torch.bfloat16, enabled=low)

    def _batch(self, rows: int) -> Batch:
        """Rows with a label for each token."""
        length = self._recipe.max_seq_len
        tokens = torch.zeros(rows, length, dtype=torch.long)
        batch = Batch(tokens, tokens, self._layouts.get(rows))
        return batch if self._shard is None else self._shard(batch)

    def blocks(self, kinds: Sequence[_Kind]) -> tuple[BlockCount, ...]:
        """Of each kind of block."""
        blocks = list(self._root.model.blocks)
        cases = [(FEW, 1.0), (FEW + 1, 1.0), *((FEW, load) for load in self._loads[1:])]
        runs: dict[int, list[tuple[int, PassRecording]]] = {kind.place: [] for kind in kinds}
        for rows, load in cases:
            with self._counting(load):
                given = self._inputs(rows, blocks)
                for kind in kinds:
                    run = self._run(blocks[kind.place], *given[kind.place], kind.is_reached)
                    runs[kind.place].append(run)
        return tuple(_block_count(kind.count, runs[kind.place]) for kind in kinds)

    def _inputs(
        self, rows: int, blocks: Sequence[nn.Module]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What each block is called with."""
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append((args, kwargs))

        hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
        batch = self._batch(rows)
        with torch.no_grad(), self._autocast():
            self._root(batch.tokens, batch.layout, lambda model, hidden: None)
        for hook in hooks:
            hook.remove()
        return given

    def _run(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_reached: bool
    ) -> tuple[int, PassRecording]:
        """Bytes that it keeps, and all that it did."""
        meter, (x, *others) = self._meter, args

        def leaf(tensor: Any) -> Any:
            trains = isinstance(tensor, Tensor) and tensor.is_floating_point() and is_reached
            return tensor.detach().requires_grad_() if trains else tensor

        others = [tuple(map(leaf, one)) if isinstance(one, tuple) else one for one in others]
        meter.begin()
        with self._autocast():
            made = block(leaf(torch.empty_like(x)), *others, **kwargs)
        outputs = [t for t in _tensors(made) if t.requires_grad]
        shapes = [(t.shape, t.dtype) for t in outputs]
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
        del made, outputs
        kept = meter.since()
        if edges:
            with meter.backward():
                grads = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
                torch.autograd.backward(edges, grads)
        if self._is_sharded:
            for p in block.parameters():
                p.grad = None
        return kept, meter.end()

    def ends(self) -> EndsCount:
        """Of what is around the blocks."""
        model, runs = self._root.model, list[PassRecording]()
        hook = None
        if self._trains:  # blocks that are not here would have a gradient go on
            hook = _embedding(model).register_forward_hook(
                lambda module, args, made: made if made.requires_grad else made.requires_grad_()
            )
        for rows in (FEW, FEW + 1):
            with self._counting():
                batch = self._batch(rows)
                model.loss_chunk = batch.tokens.numel()  # one, whose size the caller knows
                self._meter.begin()
                with self._autocast():
                    loss = self._root(batch.tokens, batch.layout, _loss_of(batch.labels))
                if loss.requires_grad:
                    with self._meter.backward():
                        loss.backward()
                del loss
                runs.append(self._meter.end())
            if self._is_sharded:
                self._root.zero_grad()
        if hook is not None:
            hook.remove()
        return _ends_count(runs)


def _embedding(model: Decoder) -> nn.Module:
    """Of tokens."""
    return model.wte if isinstance(model, Decoder) else model.hf.get_input_embeddings()


def _loss_of(labels: Tensor) -> Callable[[Decoder, Tensor], Tensor]:
    return lambda model, hidden: model.loss(hidden, labels)


def _tensors(made: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(made) if isinstance(t, Tensor)]


def _block_count(number: int, runs: Sequence[tuple[int, PassRecording]]) -> BlockCount:
    """Of runs of FEW rows, of one more, and where processes share experts under twice the load."""
    kept = _bytes([Reading(kept, 0) for kept, _ in runs])
    records = [recorded for _, recorded in runs]
    held = [Reading(kept, 0) for kept, _ in runs]
    backward, marked = [r.readings["backward"] for r in records], records[0].experts
    return BlockCount(
        number,
        kept,
        _moments([r.readings["forward"] for r in records]),
        _moments([run[: marked or None] for run in backward], held),
        next(iter(_moments([run[marked - 1 : marked] for run in backward], held)), None),
        _moments([run[marked:] for run in backward], held) if marked else (),
        **_passes(records),
    )


def _passes(records: Sequence[PassRecording]) -> dict[str, Pass]:
    """Of runs of FEW rows and of one row more."""
    few, more = (
        {name: Work(**done) for name, done in recorded.work.items()} for recorded in records[:2]
    )
    row = {name: more[name].plus(few[name].times(-1)) for name in few}
    return {name: Pass(few[name].plus(row[name].times(-FEW)), row[name]) for name in few}


def _ends_count(runs: Sequence[PassRecording]) -> EndsCount:
    marked, passes = runs[0].embedding, _passes(runs)
    backward = [run.readings["backward"] for run in runs]
    return EndsCount(
        _moments([run.readings["forward"] for run in runs]),
        _moments([run[:marked] for run in backward]),
        () if marked is None else _moments([run[marked:] for run in backward]),
        passes["forward"],
        passes["backward"].plus(passes["again"]),
    )


def _bytes(readings: Sequence[Reading]) -> Bytes:
    """From those of FEW rows, of one row more, and perhaps of FEW under twice the load."""
    few, more, *loaded = readings
    row, logits = more.total - few.total, more.logits - few.logits
    load = (loaded[0].total - few.total) / FEW if loaded else 0.0
    return Bytes(few.total - FEW * row, row - logits, load, logits)


def _moments(
    runs: Sequence[Sequence[Reading]], before: Sequence[Reading] | None = None
) -> tuple[Bytes, ...]:
    """As bytes of rows and load, of the same operations in each run; without what others exceed."""
    if before is not None:
        runs = [
            [Reading(r.total - start.total, r.logits) for r in run]
            for run, start in zip(runs, before, strict=True)
        ]
    if len({len(run) for run in runs}) > 1:  # other operations for another size: the most alone
        runs = [[max(run, key=lambda r: r.total)] for run in runs]
    found: list[Bytes] = []
    for readings in zip(*runs, strict=True):
        moment = _bytes(readings)
        if not any(_exceeds(other, moment) for other in found):
            found = [other for other in found if not _exceeds(moment, other)] + [moment]
    return tuple(found)


def _exceeds(one: Bytes, other: Bytes) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(mine >= theirs for mine, theirs in pairs)

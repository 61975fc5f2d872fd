"""Bytes, FLOPs and memory traffic per sequence of a recipe, counted on fake tensors.

Entry point: `count`, which `memory.py` and `seconds.py` call. The idea: each kind of block and the
ends of the model (embedding, final norm, head and loss) run one forward and backward pass, with the
precision, activation checkpointing, adapters, frozen weights and parallelism of the run, over ranks
that do not exist. `meter.py` records allocated bytes, FLOPs and memory traffic. All of these are
linear in the number of sequences, so that passes with two and with three sequences give the
constant and the slope.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from llmfoundry.train.distillation import build_distillation, with_any_teacher

CPU = torch.device("cpu")
FEW = 2
"""Sequences of the first pass. With 1, PyTorch would omit sums over the batch dimension."""


@dataclass(frozen=True)
class Bytes(Amounts):
    """Bytes as a function of the sequences of a microbatch and of the expert load.

    Attributes:
        fixed: constant part: gradients and copies of weights.
        row: bytes per sequence.
        load: bytes per sequence and unit of expert load above the mean; 0 without expert
            parallelism.
        logits: bytes of logits per sequence; the loss holds at most those of a chunk of tokens.
    """

    fixed: float = 0.0
    row: float = 0.0
    load: float = 0.0
    logits: float = 0.0


@dataclass(frozen=True)
class BlockCount:
    """Cost of one block on one rank, without communication.

    Attributes:
        blocks: number of blocks of this kind.
        up_to_last: number of blocks of each kind up to the last block of this kind, in the order of
            `ModelCount.blocks`.
        kept: saved activations.
        at_forward: memory peaks of the forward pass, in addition to what was allocated before.
            A peak that another one exceeds in every term is left out.
        at_backward: memory peaks of the backward pass, in addition to the saved activations of all
            blocks; in a block with experts, until the gradients of the experts exist.
        experts_done: memory at the time when the gradients of the experts exist; None: no experts,
            or an operator without a mark at that time.
        behind_experts: memory peaks after it; their `fixed` includes the gradients of the experts.
        forward: work of the forward pass.
        backward: work of the backward pass, without recomputation.
        again: work of recomputation.
    """

    blocks: int
    up_to_last: tuple[int, ...]
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
    """Cost of embedding, final norm, head and loss on one rank.

    Attributes:
        at_loss: memory peaks of the forward pass, in addition to the saved activations of all
            blocks. The loss computes the gradient of the head in the forward pass.
        at_head: memory peaks of the backward pass before that of the blocks.
        behind: memory peaks of the backward pass after that of the blocks.
        forward: work of the forward pass, including the gradient of the head.
        backward: work of the backward pass.
    """

    at_loss: tuple[Bytes, ...]
    at_head: tuple[Bytes, ...]
    behind: tuple[Bytes, ...]
    forward: Pass
    backward: Pass


@dataclass(frozen=True)
class ModelCount:
    """Costs of all kinds of blocks, ordered by their last block, and of the ends."""

    blocks: tuple[BlockCount, ...]
    ends: EndsCount

    @property
    def forward(self) -> Pass:
        """Work of the forward pass of the model."""
        return _sum([*(one.forward.times(one.blocks) for one in self.blocks), self.ends.forward])

    @property
    def backward(self) -> Pass:
        """Work of the backward pass of the model, without recomputation."""
        return _sum([*(one.backward.times(one.blocks) for one in self.blocks), self.ends.backward])

    @property
    def again(self) -> Pass:
        """Work of recomputation in the model."""
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
    """Count the cost of a model on one rank, per sequence.

    Args:
        recipe: resolved recipe; activation checkpointing and compression `auto` count as none.
        degrees: degrees of the mesh. Of the data-parallel degrees it matters only whether FSDP
            shards the weights.
        device: device type of the run.
        meta_model: for fine-tuning: the model on the meta device, frozen and quantized as in the
            run; None: all parameters are trained.
    """
    if meta_model is None or isinstance(meta_model, Decoder):
        return _count(recipe, degrees, device, meta_model)
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    before, noise.disabled = noise.disabled, True
    try:
        return _count(recipe, degrees, device, meta_model)
    except Exception:  # a class that reads the values of tensors, or has kernels of its own
        # count a decoder of the same sizes instead, with all parameters trained
        sizes = {each.name: getattr(recipe.model, each.name) for each in fields(ModelConfig)}
        ours = replace(recipe, model=ResolvedModelConfig(**sizes))
        return _count(ours, degrees, device, None)
    finally:
        noise.disabled = before


def _count(
    recipe: ResolvedTrainRecipe, degrees: Degrees, device: torch.device, meta_model: Decoder | None
) -> ModelCount:
    """Return the counts from a cache whose keys are the settings that they depend on."""
    depth = recipe.model.n_layers if meta_model is None else len(meta_model.blocks)
    memory = _decided(recipe.parallel).activation_memory(depth)
    model = None if isinstance(recipe.model, HFModelConfig) else replace(recipe.model)
    facts: list[Any] = [
        model,
        recipe.max_seq_len,
        recipe.precision,
        recipe.residual_dtype,
        recipe.parallel.context_parallel_method,
        recipe.parallel.expert_capacity,
        recipe.parallel.expert_halves,
    ]
    facts += [replace(degrees, replicate=1, shard=1), degrees.is_replicas, device.type]
    known = _known if meta_model is None else _known_of.setdefault(meta_model, {})
    of_ends = repr([*facts, recipe.loss.name, recipe.loss.temperature, recipe.loss.divergence])
    if model is not None:
        model.vocab_size = 0  # does not affect the blocks
    layers = recipe.model.layers() if meta_model is None else getattr(meta_model, "layers", None)
    traits = _traits(meta_model, layers, memory)
    indices = _by_kind(traits)
    # counts of a kind depend on the kind that makes its keys and values, not on how many there are
    firsts = [each[0] for each in indices]
    kinds = [(traits[i], traits[layers[i].kv_from] if layers else None) for i in firsts]
    of_blocks = [
        repr([*facts, _alike(memory, traits[i]), kind])
        for i, kind in zip(firsts, kinds, strict=True)
    ]
    setting = _Setting(recipe, degrees, device, meta_model)
    if not known.keys() >= {*of_blocks}:
        with setting.counter(memory) as (counter, kinds_of_model):
            known |= zip(of_blocks, counter.blocks(kinds_of_model), strict=True)
    if of_ends not in known:
        with setting.counter(replace(memory, checkpointing="none", targets=())) as (counter, _):
            known[of_ends] = counter.ends()
    blocks = [
        replace(block, blocks=len(each), up_to_last=_up_to(each[-1], indices))
        for block, each in zip(map(known.__getitem__, of_blocks), indices, strict=True)
    ]
    return ModelCount(tuple(blocks), known[of_ends])


def _alike(memory: ActivationMemory, trait: _Trait) -> ActivationMemory:
    """Return the settings without those of other kinds of blocks."""
    is_kept = memory.checkpointing == "whole" and not trait.targets
    checkpointing = "none" if is_kept else memory.checkpointing
    return replace(memory, checkpointing=checkpointing, targets=())


def _by_kind(traits: Sequence[_Trait]) -> list[list[int]]:
    """Return the indices of the blocks of each kind, ordered by their last block."""
    kinds: dict[_Trait, list[int]] = {}
    for i, trait in enumerate(traits):
        kinds.setdefault(trait, []).append(i)
    return sorted(kinds.values(), key=lambda each: each[-1])


def _up_to(last: int, indices: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the number of blocks of each kind with an index of at most `last`."""
    return tuple(sum(i <= last for i in each) for each in indices)


_known: dict[str, Any] = {}  # counts by the settings that they depend on
_known_of: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Setting:
    """Arguments of `count`."""

    recipe: ResolvedTrainRecipe
    degrees: Degrees
    device: torch.device
    meta_model: Decoder | None

    @contextmanager
    def counter(self, memory: ActivationMemory) -> Iterator[tuple[_Counter, list[_Kind]]]:
        """Yield a counter for a model with one block of each kind, parallelized, and the kinds."""
        recipe, degrees, kind = self.recipe, self.degrees, self.device.type
        root, kinds, memory = _reduced(recipe, self.meta_model, memory)
        is_sharded = not degrees.is_replicas
        # parallelize as the run does, on a mesh of ranks that do not exist
        with imagined(degrees) as meshes, unwatched_shapes(), _without_collections():
            apply_tensor_parallel(root, meshes)
            apply_expert_parallel(root, meshes, recipe.parallel)
            apply_context_parallel(root, meshes, recipe.parallel)
            share_router_statistics(root, World(0, 1, 0, CPU), meshes)
            wrap_blocks(root, memory, compile_mode=None)
            layouts = _layouts(recipe, kind, degrees)

            # replace the parameters by fake tensors, in the dtype in which FSDP gathers them
            with FakeTensorMode(allow_non_fake_inputs=True):
                narrow = is_sharded and recipe.precision == "amp_bf16"
                fill(root, torch.bfloat16 if narrow else None)
                loads = (1.0, 2.0) if degrees.expert > 1 else (1.0,)
                model = self.meta_model
                trains = model is None or any(p.requires_grad for p in model.parameters())
                counter = _Counter(
                    recipe,
                    root,
                    kind,
                    layouts,
                    loads,
                    is_sharded=is_sharded,
                    trains=trains,
                    used=1 / min(recipe.parallel.expert_capacity or 1, degrees.expert),
                )
                yield counter, kinds


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch off Python's collection of cycles, which would free tensors at any operation.

    Counts would then differ from process to process, and ranks could choose differently.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decided(parallel: ParallelConfig) -> ParallelConfig:
    """Return the settings with `auto` replaced by none."""
    if parallel.activation_compression == "auto":
        parallel = replace(parallel, activation_compression="none")
    if recomputation(parallel.activation_checkpointing) != "auto":
        return parallel
    return replace(parallel, activation_checkpointing="none", activation_checkpointing_target=None)


def _layouts(recipe: ResolvedTrainRecipe, kind: str, degrees: Degrees) -> dict[int, PackedLayout]:
    """Return layouts with two documents per sequence on a CPU, by number of sequences.

    On a CPU, attention over packed sequences uses other operators. On a GPU, kernels save as much
    for packed sequences as for others. The layouts are real tensors.
    """
    length = recipe.max_seq_len
    ours = not isinstance(recipe.model, HFModelConfig)
    if kind != "cpu" or length == 1 or degrees.context > 1 or not ours:
        return {}
    lengths = [length // 2, length - length // 2]
    return {rows: PackedLayout.from_lengths([lengths] * rows) for rows in (FEW, FEW + 1)}


def fill(root: nn.Module, dtype: torch.dtype | None = None, *, device: torch.device = CPU) -> None:
    """Replace the parameters and buffers of a model on the meta device by fake tensors.

    Must be called in a `FakeTensorMode`. Tied parameters stay tied. (`to_empty` cannot swap fake
    tensors.)

    Args:
        root: model of any class.
        dtype: dtype of floating-point parameters, as FSDP gathers them; None: unchanged.
        device: device of the fake tensors.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and id(p) not in replaced:
                kind = dtype if p.is_floating_point() else None
                empty = torch.empty_like(p, device=device, dtype=kind)
                replaced[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
            if p is not None:
                module._parameters[name] = replaced[id(p)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


@dataclass(frozen=True)
class _Kind:
    """One kind of block.

    Attributes:
        place: index of its representative in the reduced model.
        is_reached: whether any parameter before it is trained.
    """

    place: int
    is_reached: bool


@dataclass(frozen=True)
class _Trait:
    """Properties that distinguish blocks which run the same code.

    Attributes:
        layer: attention settings, apart from the source of keys and values; None: a class of
            transformers.
        owns_kv: whether the block computes its keys and values.
        is_taken: whether other blocks use its keys and values.
        is_reached: whether any parameter before it is trained.
        targets: modules that are recomputed.
        shapes: shapes, dtypes and `requires_grad` of its parameters; empty if equal in all blocks.
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
    """Return the model with one block of each kind, its kinds, and their activation memory."""
    layers = recipe.model.layers() if meta_model is None else getattr(meta_model, "layers", None)
    traits = _traits(meta_model, layers, memory)

    # keep the first block of each kind, and the blocks whose keys and values these use
    firsts = [each[0] for each in _by_kind(traits)]
    makers = {layers[i].kv_from for i in firsts} if layers else set()
    places = sorted({*firsts, *makers})
    kept_layers = None
    if layers:
        kept_layers = [replace(layers[i], kv_from=places.index(layers[i].kv_from)) for i in places]

    # build the reduced model
    if meta_model is None:
        assert kept_layers is not None
        with_traits = [(layer, traits[i]) for i, layer in zip(places, kept_layers, strict=True)]
        model = _shallow(recipe, with_traits)
    else:
        copies = nn.ModuleList(copy.deepcopy(meta_model.blocks[i]) for i in places)
        model = copy.deepcopy(meta_model, {id(meta_model.blocks): copies})
        if not isinstance(model, Decoder):
            model._ways, model._head = {False: "positions", True: "mask"}, (1.0, None)
    if kept_layers is not None:
        model.layers = kept_layers
    reduced_kinds = [_Kind(places.index(i), traits[i].is_reached) for i in firsts]
    targets = tuple(memory.targets[i] for i in places)
    return Root(model), reduced_kinds, replace(memory, targets=targets)


def _shallow(recipe: ResolvedTrainRecipe, layers: Sequence[tuple[LayerConfig, _Trait]]) -> Decoder:
    """Return the recipe's model on the meta device, with only these blocks."""
    config = recipe.model
    with torch.device("meta"):
        model = Decoder(replace(config, n_layers=0, block_overrides=None))
        model.blocks.extend(
            Block(config, i, layer, is_reused=trait.is_taken)
            for i, (layer, trait) in enumerate(layers)
        )
    model.use_residual_dtype(torch.bfloat16 if recipe.residual_dtype == "bf16" else torch.float32)
    return model.to(torch.bfloat16 if recipe.precision == "bf16" else torch.float32)


def _traits(
    model: Decoder | None, layers: Sequence[LayerConfig] | None, memory: ActivationMemory
) -> list[_Trait]:
    """Return the traits of each block. Without a model, all parameters are trained."""
    reused = {layer.kv_from for i, layer in enumerate(layers or ()) if layer.kv_from != i}
    traits, reached = [], model is None or _trains_before(model)
    for i, targets in enumerate(memory.targets):
        layer, owns = layers[i] if layers else None, True
        if layer is not None:
            layer, owns = replace(layer, kv_from=0), layer.kv_from == i
        shapes: tuple[Any, ...] = ()
        if model is not None:
            named = list(model.blocks[i].named_parameters())
            shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in named)
        traits.append(_Trait(layer, owns, i in reused, reached, targets, shapes))
        reached = reached or any(trains for *_, trains in shapes)
    return traits


def _trains_before(model: Decoder) -> bool:
    """Return whether any parameter before the blocks (an embedding) is trained."""
    others = {id(p) for block in model.blocks for p in block.parameters()}
    others |= {id(p) for n, p in model.named_parameters() if n.startswith("norm_f.")}
    if model.head_weight is not model.embedding_weight:
        others.add(id(model.head_weight))
    return any(p.requires_grad and id(p) not in others for p in model.parameters())


class _LastBlockReached(Exception):
    """Ends a forward pass whose remaining operations nobody counts."""


class _Counter:
    """Runs parts of a reduced model whose parameters are fake tensors, and records their cost."""

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
        used: float,
    ) -> None:
        self._loads, self._trains = loads, trains
        self._used = used
        self._recipe, self._root, self._is_sharded = recipe, root, is_sharded
        self._kind, self._shard, self._layouts = kind, token_sharding(root), layouts
        vocabulary = root.model.head_weight
        local = getattr(vocabulary, "to_local", lambda: vocabulary)()
        self._meter = Meter(local.shape[0])
        self._meter.know(root.parameters())
        self._meter.know(root.buffers())
        if not is_sharded:  # DDP: gradients of the previous microbatch exist
            for p in root.parameters():
                p.grad = torch.empty_like(p) if p.requires_grad else None
            self._meter.know(p.grad for p in root.parameters() if p.grad is not None)

    @contextmanager
    def _counting(self, load: float = 1.0) -> Iterator[None]:
        what = PlannedDevice(self._kind, self._meter.kernel, load, self._used)
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
        """Return `rows` sequences with a label for each token."""
        length = self._recipe.max_seq_len
        tokens = torch.zeros(rows, length, dtype=torch.long)
        batch = Batch(tokens, tokens, self._layouts.get(rows))
        batch = with_any_teacher(batch, self._recipe.loss)
        return batch if self._shard is None else self._shard(batch)

    def blocks(self, kinds: Sequence[_Kind]) -> tuple[BlockCount, ...]:
        """Count the cost of each kind of block."""
        blocks = list(self._root.model.blocks)
        cases = [(FEW, 1.0), (FEW + 1, 1.0), *((FEW, load) for load in self._loads[1:])]
        runs: dict[int, list[tuple[int, PassRecording]]] = {kind.place: [] for kind in kinds}
        for rows, load in cases:
            with self._counting(load):
                inputs = self._inputs(rows, blocks)
                for kind in kinds:
                    run = self._run(blocks[kind.place], *inputs[kind.place], kind.is_reached)
                    runs[kind.place].append(run)
        return tuple(_block_count(runs[kind.place]) for kind in kinds)

    def _inputs(
        self, rows: int, blocks: Sequence[nn.Module]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each block; the forward pass stops before the last block."""
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append((args, kwargs))
            if len(inputs) == len(blocks):
                raise _LastBlockReached

        hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
        batch = self._batch(rows)
        with suppress(_LastBlockReached), torch.no_grad(), self._autocast():
            self._root(batch.tokens, batch.layout, lambda model, hidden: None)
        for hook in hooks:
            hook.remove()
        return inputs

    def _run(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_reached: bool
    ) -> tuple[int, PassRecording]:
        """Run a block forward and backward; return the bytes of saved activations, and the rest."""
        meter, (x, *others) = self._meter, args

        def leaf(tensor: Any) -> Any:
            trains = isinstance(tensor, Tensor) and tensor.is_floating_point() and is_reached
            return tensor.detach().requires_grad_() if trains else tensor

        # forward pass; only autograd then references what is allocated
        others = [tuple(map(leaf, one)) if isinstance(one, tuple) else one for one in others]
        meter.begin()
        with self._autocast():
            result = block(leaf(torch.empty_like(x)), *others, **kwargs)
        outputs = [t for t in _tensors(result) if t.requires_grad]
        shapes = [(t.shape, t.dtype) for t in outputs]
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
        del result, outputs
        saved_bytes = meter.since()
        # backward pass
        if edges:
            with meter.backward():
                grads = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
                torch.autograd.backward(edges, grads)
        if self._is_sharded:
            for p in block.parameters():
                p.grad = None
        return saved_bytes, meter.end()

    def ends(self) -> EndsCount:
        """Count the cost of embedding, final norm, head and loss."""
        model, runs = self._root.model, list[PassRecording]()
        hook = None
        if self._trains:  # the gradient passes through the omitted blocks to the embedding
            hook = _embedding(model).register_forward_hook(
                lambda module, args, out: out if out.requires_grad else out.requires_grad_()
            )
        for rows in (FEW, FEW + 1):
            with self._counting():
                batch = self._batch(rows)
                model.loss_chunk = batch.tokens.numel()  # one chunk; callers know the chunk size
                self._meter.begin()
                with self._autocast():
                    loss = self._root(batch.tokens, batch.layout, self._loss_of(batch))
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

    def _loss_of(self, batch: Batch) -> Callable[[Decoder, Tensor], Tensor]:
        objective = build_distillation(self._recipe.loss)
        if objective is None:
            return lambda model, hidden: model.loss(hidden, batch.labels)
        finish = objective.of(batch)
        return lambda model, hidden: finish(model, hidden)[0]


def _embedding(model: Decoder) -> nn.Module:
    """Return the token embedding."""
    return model.wte if isinstance(model, Decoder) else model.hf.get_input_embeddings()


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]


def _block_count(runs: Sequence[tuple[int, PassRecording]]) -> BlockCount:
    """Return the cost of one block from its runs with FEW sequences, one more, and double load."""
    saved_bytes = _bytes([Reading(saved_bytes, 0) for saved_bytes, _ in runs])
    records = [recorded for _, recorded in runs]
    saved = [Reading(saved_bytes, 0) for saved_bytes, _ in runs]
    forward = [r.readings["forward"] for r in records]
    backward, marked = [r.readings["backward"] for r in records], records[0].experts
    experts_done = _moments([run[marked - 1 : marked] for run in backward], saved)
    return BlockCount(
        1,
        (1,),
        saved_bytes,
        _moments(forward),
        _moments([run[: marked or None] for run in backward], saved),
        next(iter(experts_done), None),
        _moments([run[marked:] for run in backward], saved) if marked else (),
        **_passes(records),
    )


def _passes(records: Sequence[PassRecording]) -> dict[str, Pass]:
    """Return the work of each pass from runs with FEW sequences and with one more."""
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
    """Return bytes from readings with FEW sequences, one more, and optionally double load."""
    few, more, *loaded = readings
    row, logits = more.total - few.total, more.logits - few.logits
    load = (loaded[0].total - few.total) / FEW if loaded else 0.0
    return Bytes(few.total - FEW * row, row - logits, load, logits)


def _moments(
    runs: Sequence[Sequence[Reading]], before: Sequence[Reading] | None = None
) -> tuple[Bytes, ...]:
    """Return the memory peaks of runs of the same operations, without those that others exceed."""
    if before is not None:
        runs = [
            [Reading(r.total - start.total, r.logits) for r in run]
            for run, start in zip(runs, before, strict=True)
        ]
    if len({len(run) for run in runs}) > 1:  # operations depend on the size: only the maximum
        runs = [[max(run, key=lambda r: r.total)] for run in runs]
    peaks: list[Bytes] = []
    for readings in zip(*runs, strict=True):
        peak = _bytes(readings)
        if not any(_exceeds(other, peak) for other in peaks):
            peaks = [other for other in peaks if not _exceeds(peak, other)] + [peak]
    return tuple(peaks)


def _exceeds(one: Bytes, other: Bytes) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(left >= right for left, right in pairs)

"""The `parallel` section: how a model and a batch are distributed over processes.

The file has three parts. First, which activations of a block are kept for the backward pass:
`ActivationMemory`, which `distributed/activation_checkpoint.py` implements and `plan/` counts. The
grammar of `activation_checkpointing_target` is LLM Foundry's (`models/utils/act_ckpt.py` there):
names of parts, each with an optional range of blocks. Second, the section `ParallelConfig`. Third,
`limits`: which degrees a model supports. They are checked with the recipe, and again when the
degree -1 is resolved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import divides, divisors, nearest
from llmfoundry.recipe.model import HFModelConfig, ModelConfig
from llmfoundry.recipe.resolve import copy_as
from llmfoundry.recipe.schema import (
    MOST_LAYERS,
    PROCESSES,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)

BLOCK, EXPERTS = "block", "experts"
PARTS = (BLOCK, "attention", "feed_forward", "norm", EXPERTS)
"""Units of recomputation: a block, or a part of it, is recomputed from its input."""
INSIDE = {EXPERTS: "feed_forward"}
"""Parts that are inside another part. All parts are inside the block."""
FOUNDRY = {  # LLM Foundry's names of modules, in lower case
    "mptblock": (BLOCK,),
    "norm_attn_norm": ("attention", "norm"),
    **dict.fromkeys(
        ("multihead_attention", "grouped_query_attention", "multiquery_attention"), ("attention",)
    ),
    **dict.fromkeys(
        ("mptmlp", "mptglu", "te_ln_mlp", "torch_dmoe", "mb_moe", "mb_dmoe", "dmoe"),
        ("feed_forward",),
    ),
    **dict.fromkeys(
        ("layernorm", "low_precision_layernorm", "rmsnorm", "low_precision_rmsnorm",
         "triton_rmsnorm"),
        ("norm",),
    ),
}  # fmt: skip
RANGES = "a number n (the first n), first-n, middle-n, last-n, range-i-j (j not included), a list"

COMPRESSED_FORMATS = ("int8", "fp8")
COMPRESSIONS = ("none", *COMPRESSED_FORMATS, "auto")
LEAST_BUDGET = 0.15
BUDGET = Range(0, 1, "1 keeps what torch.compile keeps without a budget")


@dataclass(frozen=True)
class ActivationMemory:
    """The resolved choice of activations that each block keeps.

    Attributes:
        checkpointing: what the backward pass recomputes: none, selective or whole.
        targets: with whole, the members of PARTS that are recomputed, by block. Only the inputs of
            these parts are kept. Otherwise empty sets.
        compression: none, or one of COMPRESSED_FORMATS: the format of saved tensors.
        budget: torch.compile's activation_memory_budget; None: no budget.
    """

    checkpointing: str
    targets: tuple[frozenset[str], ...]
    compression: str = "none"
    budget: float | None = None

    def recomputes(self, block: int, part: str) -> bool:
        """Return whether `part` of a block is recomputed, by itself or as a part of another."""
        chosen = self.targets[block]
        return not chosen.isdisjoint({part, BLOCK, INSIDE.get(part, part)})


def read_targets(written: Any, n_layers: int | None, key: str) -> tuple[frozenset[str], ...]:
    """Return the recomputed parts of each block.

    Args:
        written: a name, a list of names, or {name: range}; None: the whole of every block.
        n_layers: number of blocks of the model; None: unknown, and no block number is too large.
        key: the dotted key, for messages.

    Raises:
        ValueError: with an error line: an unknown name, an invalid range, a missing block, or two
            overlapping targets.
    """
    count = MOST_LAYERS if n_layers is None else n_layers
    if written is None:
        return (frozenset({BLOCK}),) * count
    # A name without a range stands for all blocks.
    has_ranges = isinstance(written, dict)
    ranges = written if has_ranges else dict.fromkeys(_listed(written, key), None)
    if not ranges:
        raise ValueError(f"{key}: names nothing; write block, or remove it")
    # For each block, the recomputed parts with the name that the user wrote.
    recomputed: list[dict[str, str]] = [{} for _ in range(count)]
    for name, block_range in ranges.items():
        blocks = _blocks(block_range, count, f"{key}.{name}") if has_ranges else range(count)
        for part in _parts(str(name), key):
            for block in blocks:
                _add(recomputed[block], part, str(name), f"{key}: block {block}")
    return tuple(frozenset(parts) for parts in recomputed)


def _listed(written: Any, key: str) -> list[str]:
    names = [written] if isinstance(written, str) else list(written)
    duplicate = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if duplicate is not None:
        raise ValueError(f"{key}: {duplicate} is listed twice; write it once")
    return names


def _parts(name: str, key: str) -> tuple[str, ...]:
    """Translate a name, ours or LLM Foundry's, into our names."""
    lower = name.lower()
    if lower in PARTS:
        return (lower,)
    if lower not in FOUNDRY:
        near = nearest(lower, (*PARTS, *FOUNDRY))
        raise ValueError(f"{key}: {name} is no part of a block{near}; write {', '.join(PARTS)}")
    return FOUNDRY[lower]


def _add(recomputed: dict[str, str], part: str, name: str, where: str) -> None:
    """Add `part` to the recomputed parts of one block, under the name that the user wrote."""
    for other, by in recomputed.items():
        inside = (part in INSIDE and INSIDE[part] == other) or INSIDE.get(other) == part
        if part == other or BLOCK in (part, other) or inside:
            raise ValueError(
                f"{where} is in the ranges of {by} and {name}, which overlap; give each a range of"
                " its own, or remove one"
            )
    recomputed[part] = name


def _blocks(where: Any, count: int, key: str) -> list[int]:
    """Return the block numbers of a range, as LLM Foundry's `get_target_block_list` does.

    LLM Foundry drops numbers after the last block. We drop them for first-n and the like, which may
    be written for a deeper model. A single number that does not exist is an error.
    """
    elements = where if isinstance(where, list) else [where]
    blocks: set[int] = set()
    for element in elements:
        if isinstance(element, str):
            for word in element.replace(" ", "").split(","):
                blocks |= set(_word(word, count, key))
        elif not isinstance(element, int) or isinstance(element, bool):
            raise ValueError(f"{key}: {element!r} is no range of blocks; write {RANGES}")
        elif isinstance(where, list):
            if not 0 <= element < count:
                raise ValueError(f"{key}: there is no block {element}; write 0 to {count - 1}")
            blocks.add(element)
        else:  # the first so many blocks
            blocks |= set(range(min(element, count)))
    if not blocks:
        raise ValueError(f"{key}: {where} is no block of {count}; write {RANGES}, or remove it")
    return sorted(blocks)


def _word(word: str, count: int, key: str) -> range:
    """Return the blocks of first-n, middle-n, last-n or range-i-j, of `count` blocks."""
    kind, *numbers = word.split("-")
    n_expected = {"first": 1, "middle": 1, "last": 1, "range": 2}.get(kind)
    if len(numbers) != n_expected or not all(map(_is_number, numbers)):
        raise ValueError(f"{key}: {word!r} is no range of blocks; write {RANGES}")
    n, *end = map(int, numbers)
    last = count - 1
    if kind == "first":
        return range(min(n, count))
    if kind == "last":
        return range(max(count - n, 0), count)
    if kind == "middle":  # LLM Foundry uses the last block's number, not the count
        start = max(last // 2 - n // 2, 0)
        return range(start, min(start + n, count))
    return range(min(n, count), min(end[0], count))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


RECOMPUTED = ("none", "selective", "whole")
"""Levels of activation checkpointing, in order of recomputed operations."""
RECOMPUTATION = choice((*RECOMPUTED, "auto"), "true or false")


def recomputation(value: bool | str) -> str:
    """Return the level of activation checkpointing as a word; true stands for whole."""
    return {True: "whole", False: "none"}[value] if isinstance(value, bool) else value


AXES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)
"""Dimensions of the device mesh, outermost first: adjacent ranks communicate most."""
EXPERT = "expert_parallel_degree"
CAPACITY = Range(1, 2**16, "the number of expert-parallel ranks, which any load fits")
CONTEXT_METHODS = ("ulysses", "all_gather")
NCCL, GLOO = "nccl", "gloo"
NODE = 8
"""Processes per node if no launcher sets LOCAL_WORLD_SIZE: the usual number of GPUs."""


def node_size() -> int:
    """Return the processes per node: LOCAL_WORLD_SIZE from the launcher, or NODE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or NODE


@dataclass(frozen=True)
class Degrees:
    """The size of each dimension of the device mesh, with -1 resolved.

    Attributes:
        replicate: model replicas (DDP; with the other dimensions HSDP).
        shard: ranks over which FSDP2 shards the weights; each reads different sequences.
        context: ranks that share the tokens of each sequence; FSDP2 shards weights over them too.
        tensor: ranks that share each matrix of the dense layers.
        expert: ranks that share the experts, a divisor of shard * context * tensor.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """Number of processes of the run."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def weights(self) -> int:
        """Number of ranks over which FSDP shards all weights except those of experts."""
        return self.shard * self.context

    @property
    def copy_size(self) -> int:
        """Number of ranks of one replica, over which the experts are distributed."""
        return self.shard * self.context * self.tensor

    @property
    def expert_shard(self) -> int:
        """Number of ranks over which FSDP shards the experts of one expert-parallel rank."""
        return self.copy_size // self.expert

    @property
    def is_replicas(self) -> bool:
        """Whether every process holds the full model: DDP, or one process."""
        return self.copy_size == 1


@dataclass
class ParallelConfig:
    """Degrees of the device mesh, whose product without the expert degree is the process count.

    Replicas alone are DDP, shards alone FSDP2, and both together HSDP. Experts are distributed over
    the ranks of the other dimensions: expert_parallel_degree divides the product of the shard,
    context and tensor degrees.
    """

    nproc_per_node: Annotated[int | None, Range(1, 1024, PROCESSES)] = None
    """Number of processes that `python scripts/train.py` starts; unset: one per local GPU, one on a
    CPU. Under torchrun or Slurm the launcher decides, and this key is ignored."""
    data_parallel_replicate_degree: Annotated[int, Range(-1, 2**20)] = -1
    """Number of model replicas (DDP). -1: all remaining processes; only one degree can be -1."""
    data_parallel_shard_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Number of ranks over which FSDP2 shards one replica. Each rank reads different sequences."""
    context_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Number of ranks that share the tokens of each sequence, for sequences that do not fit on one
    GPU. FSDP2 also shards the weights over these ranks."""
    context_parallel_method: Annotated[
        str | None, choice(CONTEXT_METHODS), Unless("context_parallel_degree", 1)
    ] = None
    """How attention sees the full sequence. ulysses (Jacobs et al., 2023): an all-to-all gives each
    rank full sequences of a part of the heads, so the degree must divide the heads. all_gather:
    each rank attends with its part of the queries to gathered keys and values; it holds two chunks,
    one from each end of the sequence, so that the work is balanced. Unset: ulysses if the degree
    divides the heads, else all_gather."""
    tensor_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Number of ranks over which the matrices of attention, dense feed-forward layers, embedding
    and head are sharded (Shoeybi et al., 2019), with sequence parallelism between these layers
    (Korthikanti et al., 2022)."""
    expert_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Number of ranks over which the experts of a layer are distributed; an all-to-all sends tokens
    to their experts and back. -1: the largest degree that divides a node and one replica, so that
    tokens stay inside a node. A larger degree is possible, and its cost is reported."""
    expert_capacity: Annotated[float | None, CAPACITY, Unless(EXPERT, 1)] = None
    """Rows that a rank sends to each other rank of its experts, in multiples of the even share.
    Unset: exact numbers of rows, for which the host waits for the GPU in every layer and pass. A
    number, such as 1.5: always that many, of which some are unused, and the host never waits. It
    multiplies the communication of tokens and the activations of experts. No token is dropped: a
    step in which some rank has more rows than that for another is repeated with exact numbers, and
    reported."""
    expert_halves: Annotated[bool, Unless(EXPERT, 1)] = False
    """Send the tokens of a layer to their experts in two halves, so that the communication of one
    half overlaps with the experts of the other, in both passes. The matmuls of experts have half
    the rows. For layers without a shared expert, whose communication nothing hides otherwise."""
    reshard_after_forward: Annotated[bool | None, Unless((*AXES[1:], EXPERT), 1)] = None
    """Free the weights of a block after its forward pass and gather them again for the backward
    pass; default true. False keeps them: faster, more memory."""
    reduce_scatter_each_microbatch: Annotated[bool | None, Unless((*AXES[1:], EXPERT), 1)] = None
    """Reduce-scatter the gradients after every microbatch, so that a rank keeps only the gradients
    of its shard; default true. False: once per step, after the last microbatch. This takes less
    communication, but until then every rank holds the gradients of the whole model, 4 bytes per
    parameter."""
    activation_checkpointing: Annotated[bool | str, RECOMPUTATION] = "none"
    """Activations that the backward pass recomputes. none: no recomputation. selective: everything
    except the results of matrix multiplications and attention, and what the gradients of experts
    need. This keeps about half the activations of a dense model, and four fifths of those of a
    model with experts. whole (or true): full activation checkpointing, from the input of each
    block, for a third more compute and a fraction of the memory. auto: of the levels, whole in only
    the first blocks, and the microbatch sizes that fit, the combination with the shortest planned
    step; if the speed of the GPU is unknown, the lowest level that fits. `scripts/plan.py` searches
    in the same way."""
    activation_checkpointing_target: Annotated[
        str | list[str] | dict[str, Any] | None, Only("activation_checkpointing", ("whole", True))
    ] = None
    """Parts of a block that are recomputed, each from its inputs, and in which blocks: a name, a
    list of names, or {name: range}. Names: block (the default), attention, feed_forward, norm,
    experts, and LLM Foundry's. Ranges: n (the first n), first-n, middle-n, last-n, range-i-j (j not
    included), a list of numbers, or a combination: {attention: "first-2, last-2", feed_forward:
    [3]}."""
    activation_compression: Annotated[str, choice(COMPRESSIONS)] = "none"
    """Format in which activations are stored for the backward pass. none: unchanged. int8: 8-bit
    integers with a scale per 128 values. fp8: 8-bit floating point (e4m3), on GPUs of compute
    capability 8.9 and above. Gradients change by 2 to 3.4 % with int8 and by 8.5 to 11.4 % with
    fp8. Weights and the statistics of norms stay exact. auto: none or int8, whichever gives the
    shorter planned step together with activation_checkpointing: auto."""
    activation_memory_budget: Annotated[float | None, BUDGET] = None
    """Only with compile=true. Share of the activations of a block that torch.compile keeps, of
    those that it would keep without a budget; it recomputes the rest, cheapest first. 1: all; the
    minimum is 0.15."""
    dist_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Timeout of collectives in seconds."""
    rendezvous_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Timeout of the rendezvous at MASTER_ADDR in seconds, when the processes start."""

    dist_backend: Annotated[str | None, choice((NCCL, GLOO))] = None
    """Backend of collectives between GPUs. Unset: nccl, with one process per GPU. gloo copies every
    message through host memory and is many times slower, but several processes may share a GPU,
    which allows testing a layout on fewer GPUs than it has processes. CPUs always use gloo."""

    def check(self, key: str = "parallel.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        values = {name: getattr(self, name) for name in (*AXES, EXPERT)}
        for name, value in values.items():
            if value == 0:
                yield f"{key}{name}: {value}; write -1 or a number of processes"
        free = [name for name in AXES if values[name] == -1]
        if len(free) > 1:
            first, *others = free
            yield f"{key}{first}: and {', '.join(others)} cannot both be -1; give all but one"
        yield from self._check_activations(key)

    def _check_activations(self, key: str) -> Iterator[str]:
        level, budget = recomputation(self.activation_checkpointing), self.activation_memory_budget
        if budget is not None and budget < LEAST_BUDGET:
            yield (
                f"{key}activation_memory_budget: {budget}; below {LEAST_BUDGET} a smaller budget"
                " takes more memory, not less (pytorch issue 197838); write"
                f" {LEAST_BUDGET} or more, or activation_checkpointing: whole in its place"
            )
        if budget is not None and level != "none":
            yield (
                f"{key}activation_memory_budget: with activation_checkpointing: {level} two would"
                " decide what is computed again; remove one of them"
            )

    def activation_memory(self, n_layers: int) -> ActivationMemory:
        """Return the activations that `n_layers` blocks keep; `auto` must be resolved."""
        level = recomputation(self.activation_checkpointing)
        assert level in RECOMPUTED and self.activation_compression != "auto", "auto was not decided"
        targets: tuple[frozenset[str], ...] = (frozenset(),) * n_layers
        if level == "whole":
            key = "parallel.activation_checkpointing_target"
            targets = read_targets(self.activation_checkpointing_target, n_layers, key)
        budget = self.activation_memory_budget
        return ActivationMemory(level, targets, self.activation_compression, budget)

    @property
    def keeps_whole(self) -> bool:
        """Whether every process holds the full model, however many processes there are."""
        return all(getattr(self, name) == 1 for name in (*AXES[1:], EXPERT))

    @property
    def written_degrees(self) -> Degrees:
        """The degrees as the user wrote them, with 1 in place of -1."""
        return Degrees(*(max(1, getattr(self, name)) for name in (*AXES, EXPERT)))

    def fill(self) -> None:
        """Resolve defaults in place."""
        self.activation_checkpointing = recomputation(self.activation_checkpointing)
        if self.keeps_whole:
            return
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True
        if self.reduce_scatter_each_microbatch is None:
            self.reduce_scatter_each_microbatch = True

    def resolve(self) -> ResolvedParallelConfig:
        """Return a copy with defaults resolved."""
        config = copy_as(ResolvedParallelConfig, self)
        config.fill()
        return config

    def degrees(self, world_size: int) -> Degrees:
        """Return the degrees for a number of processes, with -1 resolved.

        Raises:
            UserError: the degrees do not fit; the message names the nearest ones that do.
        """
        values = [getattr(self, name) for name in AXES]
        rest = math.prod(value for value in values if value != -1)
        filled = [world_size // rest if value == -1 else value for value in values]
        if math.prod(filled) != world_size or 0 in filled:
            raise UserError(self._does_not_fit(world_size))
        copy_size = math.prod(filled[1:])
        expert = self.expert_parallel_degree
        if expert == -1:
            expert = math.gcd(copy_size, node_size())
        if copy_size % expert:
            close = _nearest(expert, divisors(copy_size))
            raise UserError(
                f"parallel.{EXPERT}: {expert} does not divide the processes of one copy of the"
                f" model ({copy_size}, the product of data_parallel_shard_degree,"
                f" context_parallel_degree and tensor_parallel_degree); write {close}, or a"
                f" data_parallel_shard_degree that makes it a multiple of {expert}"
            )
        replicate, shard, context, tensor = filled
        return Degrees(replicate, shard, context, tensor, expert)

    def _does_not_fit(self, world_size: int) -> str:
        """Return an error line for the last degree that the user set, with one that fits."""
        written = {name: getattr(self, name) for name in AXES}
        blamed = next((name for name in (*AXES[:0:-1], AXES[0]) if written[name] > 1), AXES[0])
        others = math.prod(v for name, v in written.items() if name != blamed and v != -1)
        beside = ", ".join(f"{n}: {v}" for n, v in written.items() if n != blamed and v > 1)
        beside = f" beside {beside}" if beside else ""
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        why = f"{written[blamed]}{beside} does not fit {processes}"
        if world_size % others:
            return f"parallel.{blamed}: {why}; start a multiple of {others}, or write -1 for one"
        room = world_size // others
        free = -1 in [v for name, v in written.items() if name != blamed]
        close = _nearest(written[blamed], divisors(room)) if free else str(room)
        return f"parallel.{blamed}: {why}; write {close}, or -1 for one of them"


class ResolvedParallelConfig(ParallelConfig):
    """`ParallelConfig` with defaults resolved."""

    reshard_after_forward: bool
    reduce_scatter_each_microbatch: bool


def _nearest(value: int, options: list[int]) -> str:
    """Name the options next below and next above a value."""
    below, above = [n for n in options if n < value], [n for n in options if n > value]
    return " or ".join(str(n) for n in (below[-1:] + above[:1]))


def limits(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    """Yield an error line for each degree that this model does not support.

    Args:
        model: with or without resolved defaults; unknown values are not compared.
        parallel: the section.
        degrees: the degrees as written, or those of all processes.
    """
    yield from _recomputed(model, parallel)
    if isinstance(model, HFModelConfig):
        yield from _transformers(degrees)
        return
    if degrees.expert > 1:
        yield from _expert(model, parallel, degrees)
    if degrees.context > 1:
        yield from _context(model, parallel, degrees)
    if degrees.tensor > 1:
        yield from _tensor(model, degrees)


def _recomputed(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Check that the model has the blocks and parts of activation_checkpointing_target."""
    key = "parallel.activation_checkpointing_target"
    written = parallel.activation_checkpointing_target
    if written is None:
        return
    try:
        targets = read_targets(written, getattr(model, "n_layers", None), key)
    except ValueError as error:
        yield str(error)
        return
    parts = frozenset[str]().union(*targets)
    if isinstance(model, HFModelConfig) and parts != {BLOCK}:
        yield (
            f"{key}: {', '.join(sorted(parts - {BLOCK}))}, but the model is a transformers class,"
            " of which only whole blocks are known; write block"
        )
    elif EXPERTS in parts and model.ffn_config.ffn_type != "dmoe":
        yield f"{key}: the model has no experts; write feed_forward"
    elif EXPERTS in parts and parallel.expert_halves:
        yield (
            "parallel.expert_halves: the experts of two halves cannot be recomputed without their"
            f" communication; remove it, or write feed_forward for experts in {key}"
        )


def compiled_limits(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield an error line for activation settings that torch.compile does not support."""
    again = recomputation(parallel.activation_checkpointing)
    if again != "whole" or parallel.activation_compression == "none":
        return
    target = parallel.activation_checkpointing_target
    parts = frozenset[str]().union(
        *read_targets(target, getattr(model, "n_layers", None), "target")
    )
    may_route = isinstance(model, HFModelConfig) or model.ffn_config.ffn_type == "dmoe"
    if may_route and parts & {BLOCK, "feed_forward"}:
        yield (
            f"parallel.activation_compression: {parallel.activation_compression} with compile: true"
            " and routers computed again (activation_checkpointing: whole) would choose other"
            " experts the second time; write compile: false, or activation_checkpointing_target:"
            " [attention, experts]"
        )


def _transformers(degrees: Degrees) -> Iterator[str]:
    for key in (*AXES[2:], EXPERT):
        degree = getattr(degrees, key.removesuffix("_parallel_degree"))
        if degree > 1:
            yield (
                f"parallel.{key}: {degree}, but the model is a transformers class, which only FSDP"
                " shards; write 1, and data_parallel_shard_degree: -1"
            )


def _expert(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    key, experts = "parallel.expert_parallel_degree", model.ffn_config.moe_num_experts
    if model.ffn_config.ffn_type != "dmoe":
        yield f"{key}: {degrees.expert}, but the model has no experts; write 1"
    elif experts is not None:
        yield from divides(key, degrees.expert, "model.ffn_config.moe_num_experts", experts)
    if model.ffn_config.moe_impl == "megablocks":
        yield (
            "model.ffn_config.moe_impl: megablocks wants rows for its experts, and a process that"
            f" shares them ({key}: {degrees.expert}) may get none; write grouped_mm"
        )
    if model.ffn_config.moe_impl == "torch" and parallel.expert_capacity is not None:
        yield (
            "parallel.expert_capacity: the host reads the rows of each expert with"
            " model.ffn_config.moe_impl: torch; remove it, or write moe_impl: grouped_mm"
        )


def _context(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    key, heads = "parallel.context_parallel_degree", model.n_heads // degrees.tensor
    if parallel.context_parallel_method == "ulysses" and heads % degrees.context:
        of = "model.n_heads" if degrees.tensor == 1 else "the heads of a tensor-parallel process"
        *_, line = divides(key, degrees.context, of, heads)
        yield f"{line}, or context_parallel_method: all_gather"


def context_method(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> str:
    """Return the context-parallel method: as written, or the default for these degrees."""
    if parallel.context_parallel_method is not None:
        return parallel.context_parallel_method
    heads = model.n_heads // degrees.tensor
    return "all_gather" if heads % degrees.context else "ulysses"


def _tensor(model: ModelConfig, degrees: Degrees) -> Iterator[str]:
    key, attn, ffn = "parallel.tensor_parallel_degree", model.attn_config, model.ffn_config
    yield from divides(key, degrees.tensor, "model.n_heads", model.n_heads)
    if attn.kv_n_heads is not None:
        name = "model.attn_config.kv_n_heads"
        yield from divides(key, degrees.tensor, name, attn.kv_n_heads)
    if ffn.ffn_type != "dmoe" and ffn.ffn_hidden_size is not None:
        name = "model.ffn_config.ffn_hidden_size"
        yield from divides(key, degrees.tensor, name, ffn.ffn_hidden_size)
    if ffn.dense_hidden_size is not None:
        name = "model.ffn_config.dense_hidden_size"
        yield from divides(key, degrees.tensor, name, ffn.dense_hidden_size)
    if attn.qk_ln:
        yield (
            f"{key}: {degrees.tensor}, but model.attn_config.qk_ln normalizes queries and keys over"
            " all heads, which lie on several processes; write 1, or qk_gn in its place"
        )


def tensor_adapters(adapter: str, quantize: str, degrees: Degrees) -> Iterator[str]:
    """Yield an error line for fine-tuning settings that tensor parallelism does not support."""
    key, instead = "parallel.tensor_parallel_degree", "write 1, and data_parallel_shard_degree: -1"
    if degrees.tensor > 1 and adapter != "none":
        yield f"{key}: {degrees.tensor}, but an adapter's layers are not sharded; {instead}"
    if degrees.tensor > 1 and quantize != "none":
        yield f"{key}: {degrees.tensor}, but 4-bit matrices are not sharded; {instead}"

"""The `parallel` section: how one model and one batch are spread over processes.

First how each block's activations wait for the backward pass: an `ActivationMemory`, which
`distributed/activation_checkpoint.py` carries out and `plan/` counts. The target's grammar is LLM
Foundry's (`models/utils/act_ckpt.py` there): names of parts, each perhaps with a range of blocks.
Then the section itself; last what a model cannot be spread over: checked with the recipe, and
again once -1 is known.
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
from llmfoundry.recipe.schema import (
    MOST_LAYERS,
    PROCESSES,
    Only,
    Range,
    Unless,
    choice,
    out_of_bounds,
)

BLOCK, EXPERTS = "block", "experts"
PARTS = (BLOCK, "attention", "feed_forward", "norm", EXPERTS)
"""What recomputation may start anew from: a block's input, or that of a part of it."""
INSIDE = {EXPERTS: "feed_forward"}
"""Parts that lie in another; all lie in the block."""
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
    """How the activations of each block are kept, all decided.

    Attributes:
        checkpointing: what the backward pass computes again: none, selective or whole.
        targets: of whole: by block, what of PARTS is computed again; nothing of it is kept but its
            inputs. Empty sets else.
        compression: none, or of FORMATS: in what form saved tensors wait.
        budget: torch.compile's activation_memory_budget; None: it has none.
    """

    checkpointing: str
    targets: tuple[frozenset[str], ...]
    compression: str = "none"
    budget: float | None = None

    def recomputes(self, block: int, part: str) -> bool:
        """Whether `part` of a block is recomputed, by itself or in what it lies in."""
        chosen = self.targets[block]
        return not chosen.isdisjoint({part, BLOCK, INSIDE.get(part, part)})


def read_targets(written: Any, n_layers: int | None, key: str) -> tuple[frozenset[str], ...]:
    """The parts recomputed of each block.

    Args:
        written: a name, a list of names, or {name: range}; None: all of every block.
        n_layers: blocks of the model; None: not known yet, and no number is too large.
        key: the dotted key, for messages.

    Raises:
        ValueError: a line for people: an unknown name, a range that is none, a block that there is
            not, or two targets of which one lies in the other.
    """
    count = MOST_LAYERS if n_layers is None else n_layers
    if written is None:
        return (frozenset({BLOCK}),) * count
    ranges = written if isinstance(written, dict) else dict.fromkeys(_listed(written, key), None)
    if not ranges:
        raise ValueError(f"{key}: names nothing; write block, or remove it")
    named: list[dict[str, str]] = [{} for _ in range(count)]
    for name, where in ranges.items():
        is_all = not isinstance(written, dict)
        blocks = range(count) if is_all else _blocks(where, count, f"{key}.{name}")
        for part in _parts(str(name), key):
            for block in blocks:
                _add(named[block], part, str(name), f"{key}: block {block}")
    return tuple(frozenset(parts) for parts in named)


def _listed(written: Any, key: str) -> list[str]:
    names = [written] if isinstance(written, str) else list(written)
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{key}: {twice} stands there twice; write it once")
    return names


def _parts(name: str, key: str) -> tuple[str, ...]:
    """Ours of a name of ours or of LLM Foundry's."""
    lower = name.lower()
    if lower in PARTS:
        return (lower,)
    if lower not in FOUNDRY:
        near = nearest(lower, (*PARTS, *FOUNDRY))
        raise ValueError(f"{key}: {name} is no part of a block{near}; write {', '.join(PARTS)}")
    return FOUNDRY[lower]


def _add(named: dict[str, str], part: str, name: str, where: str) -> None:
    """Note that `name` has a part of one block recomputed; `named` has those before it."""
    for other, by in named.items():
        inside = (part in INSIDE and INSIDE[part] == other) or INSIDE.get(other) == part
        if part == other or BLOCK in (part, other) or inside:
            raise ValueError(
                f"{where} is in the ranges of {by} and {name}, which overlap; give each a range of"
                " its own, or remove one"
            )
    named[part] = name


def _blocks(where: Any, count: int, key: str) -> list[int]:
    """Block numbers of a range, as LLM Foundry's `get_target_block_list` reads it.

    There numbers behind the last block are dropped: of first-n and the like they are here, too,
    which may be meant for a deeper model; a number by itself is not.
    """
    elements = where if isinstance(where, list) else [where]
    found: set[int] = set()
    for element in elements:
        if isinstance(element, str):
            for word in element.replace(" ", "").split(","):
                found |= set(_word(word, count, key))
        elif not isinstance(element, int) or isinstance(element, bool):
            raise ValueError(f"{key}: {element!r} is no range of blocks; write {RANGES}")
        elif isinstance(where, list):
            if not 0 <= element < count:
                raise ValueError(f"{key}: there is no block {element}; write 0 to {count - 1}")
            found.add(element)
        else:
            found |= set(range(min(element, count)))
    if not found:
        raise ValueError(f"{key}: {where} is no block of {count}; write {RANGES}, or remove it")
    return sorted(found)


def _word(word: str, count: int, key: str) -> range:
    """The blocks of first-n, middle-n, last-n or range-i-j, of `count`."""
    kind, *numbers = word.split("-")
    wanted = {"first": 1, "middle": 1, "last": 1, "range": 2}.get(kind)
    if len(numbers) != wanted or not all(map(_is_number, numbers)):
        raise ValueError(f"{key}: {word!r} is no range of blocks; write {RANGES}")
    n, *end = map(int, numbers)
    last = count - 1
    if kind == "first":
        return range(min(n, count))
    if kind == "last":
        return range(max(count - n, 0), count)
    if kind == "middle":  # as there, with the last block's number, not the count
        start = max(last // 2 - n // 2, 0)
        return range(start, min(start + n, count))
    return range(min(n, count), min(end[0], count))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


RECOMPUTED = ("none", "selective", "whole")
"""What is computed again in the backward pass, the least first."""
RECOMPUTATION = choice((*RECOMPUTED, "auto"), "true or false")


def recomputation(value: bool | str) -> str:
    """One of RECOMPUTED, or auto, as `parallel.activation_checkpointing` says it: true is whole."""
    return {True: "whole", False: "none"}[value] if isinstance(value, bool) else value


AXES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)
"""The mesh's dimensions, the outermost first: adjacent ranks work most closely together."""
EXPERT = "expert_parallel_degree"
CONTEXT_METHODS = ("ulysses", "all_gather")
NCCL, GLOO = "nccl", "gloo"
NODE = 8
"""Processes of a node where no launcher says how many: GPUs of most."""


def node_size() -> int:
    """Processes of this node: LOCAL_WORLD_SIZE from torchrun or `distributed.launch`, or NODE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or NODE


@dataclass(frozen=True)
class Degrees:
    """Processes along each dimension of the mesh, none of them -1.

    Attributes:
        replicate: copies of the model (DDP; with the others HSDP).
        shard: processes over which weights are cut (FSDP2); each reads rows of its own.
        context: processes that share each row's tokens; weights are cut over them too.
        tensor: processes that share each matrix of the dense layers.
        expert: processes that share the experts; they are borrowed from shard, context and tensor.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Shares of a batch's rows."""
        return self.replicate * self.shard

    @property
    def weights(self) -> int:
        """Over how many processes FSDP cuts what is not an expert's."""
        return self.shard * self.context

    @property
    def copy_size(self) -> int:
        """Processes of one copy of the model, over which the experts are laid out anew."""
        return self.shard * self.context * self.tensor

    @property
    def expert_shard(self) -> int:
        """Over how many processes FSDP cuts the experts of one expert-parallel process."""
        return self.copy_size // self.expert

    @property
    def is_replicas(self) -> bool:
        """Whether every process holds the whole model: DDP, or one process."""
        return self.copy_size == 1


@dataclass
class ParallelConfig:
    """Degrees of the device mesh: the product of all but the experts' is the number of processes.

    Replicas alone are DDP, shards alone FSDP2, both HSDP. Experts borrow their processes from
    shard, context and tensor: expert_parallel_degree divides the product of these three.
    """

    nproc_per_node: Annotated[int | None, Range(1, 1024, PROCESSES)] = None
    """Processes that `python scripts/train.py` starts; unset: one per local GPU, one on a CPU.
    Under torchrun or Slurm, these decide."""
    data_parallel_replicate_degree: Annotated[int, Range(-1, 2**20)] = -1
    """Copies of the model; -1, of one degree: all processes that the others leave."""
    data_parallel_shard_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes over which one copy is cut (FSDP2), each with rows of its own."""
    context_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes that share the tokens of each row, for rows that one has no memory for; weights are
    cut over them as over the shard degree's."""
    context_parallel_method: Annotated[
        str | None, choice(CONTEXT_METHODS), Unless("context_parallel_degree", 1)
    ] = None
    """How attention sees the full sequence. ulysses (Jacobs et al., 2023): an all-to-all gives each
    rank full sequences of a part of the heads, so the degree must divide the heads. all_gather:
    each rank attends with its part of the queries to gathered keys and values; it holds two chunks,
    one from each end of the sequence, so that the work is balanced. Unset: ulysses if the degree
    divides the heads, else all_gather."""
    tensor_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes that share each matrix of attention, dense feed-forward layers, embedding and head
    (Shoeybi et al., 2019), and between these the row's tokens (Korthikanti et al., 2022)."""
    expert_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes that share the experts of a layer: tokens travel to them and back. -1: as many as
    divide both a node and one copy of the model, so that tokens stay inside a node; a larger degree
    is reported with its cost."""
    reshard_after_forward: Annotated[bool | None, Unless((*AXES[1:], EXPERT), 1)] = None
    """Free the weights of a block after its forward pass and gather them again for the backward
    pass; default true. False keeps them: faster, more memory."""
    reduce_scatter_each_microbatch: Annotated[bool | None, Unless((*AXES[1:], EXPERT), 1)] = None
    """Reduce-scatter the gradients after every microbatch, so that a rank keeps only the gradients
    of its shard; default true. False: once per step, after the last microbatch. This takes less
    communication, but until then every rank holds the gradients of the whole model, 4 bytes per
    parameter."""
    activation_checkpointing: Annotated[bool | str, RECOMPUTATION] = "none"
    """What the backward pass computes again in place of keeping it. none; selective: all but the
    results of matrix products, attention and experts, at half the memory; whole (or true): blocks,
    from their inputs: a third more work, a fraction of the memory; auto: of these, with as many
    rows as fit, what makes the shortest step by the plan; where the GPU's speed is not known, the
    least that fits."""
    activation_checkpointing_target: Annotated[
        str | list[str] | dict[str, Any] | None, Only("activation_checkpointing", ("whole", True))
    ] = None
    """Parts of a block that are recomputed, each from its inputs, and in which blocks: a name, a
    list of names, or {name: range}. Names: block (the default), attention, feed_forward, norm,
    experts, and LLM Foundry's. Ranges: n (the first n), first-n, middle-n, last-n, range-i-j (j not
    included), a list of numbers, or a combination: {attention: "first-2, last-2", feed_forward:
    [3]}."""
    activation_compression: Annotated[str, choice(COMPRESSIONS)] = "none"
    """In what form activations wait for the backward pass. none: as they are; int8: 8-bit integers,
    128 values sharing a scale; fp8: 8-bit floating point (e4m3), on GPUs of compute capability 8.9
    and above. Gradients change by about one per cent; what weighs and normalizes stays exact. auto:
    none or int8, whichever makes the shorter step by the plan, together with what
    activation_checkpointing: auto stands for."""
    activation_memory_budget: Annotated[float | None, BUDGET] = None
    """Only with compile: share of what torch.compile would keep of a block's activations that it
    keeps; it computes the rest again, the cheapest first. 1: all; at least 0.15."""
    dist_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Seconds that a collective may wait for other processes."""
    rendezvous_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Seconds within which all processes must have met at MASTER_ADDR, as they start."""

    dist_backend: Annotated[str | None, choice((NCCL, GLOO))] = None
    """What carries collectives between GPUs. Unset: nccl, one process a GPU. gloo copies each
    message through the host's memory: many times slower, but several processes may share a GPU, to
    try a layout on fewer GPUs than it has processes. On CPUs it is gloo in any case."""

    def check(self, key: str = "parallel.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
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
        """How the activations of `n_layers` blocks are kept; nothing in it is auto any more."""
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
        """Whether every process holds the whole model, however many there are."""
        return all(getattr(self, name) == 1 for name in (*AXES[1:], EXPERT))

    @property
    def written_degrees(self) -> Degrees:
        """The degrees as they are written; 1 in place of -1, which waits for the processes."""
        return Degrees(*(max(1, getattr(self, name)) for name in (*AXES, EXPERT)))

    def fill(self) -> None:
        """Write derived values in place."""
        self.activation_checkpointing = recomputation(self.activation_checkpointing)
        if self.keeps_whole:
            return
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True
        if self.reduce_scatter_each_microbatch is None:
            self.reduce_scatter_each_microbatch = True

    def degrees(self, world_size: int) -> Degrees:
        """The degrees of so many processes, -1 worked out.

        Raises:
            UserError: they do not fit; names the nearest that do.
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
        """Blames the last degree that was written, and names what fits in its place."""
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


def _nearest(value: int, options: list[int]) -> str:
    """The options next below and next above, or the one that there is."""
    below, above = [n for n in options if n < value], [n for n in options if n > value]
    return " or ".join(str(n) for n in (below[-1:] + above[:1]))


def limits(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    """Lines for degrees that this model cannot have, with the nearest that it can.

    Args:
        model: filled or not; what is not known yet is not compared.
        parallel: the section.
        degrees: its degrees as written, or of all processes.
    """
    yield from _recomputed(model, parallel)
    if isinstance(model, HFModelConfig):
        yield from _transformers(degrees)
        return
    if degrees.expert > 1:
        yield from _expert(model, degrees)
    if degrees.context > 1:
        yield from _context(model, parallel, degrees)
    if degrees.tensor > 1:
        yield from _tensor(model, degrees)


def _recomputed(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Of `activation_checkpointing_target`: blocks and parts that the model has not."""
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
            f"{key}: {', '.join(sorted(parts - {BLOCK}))}, but the model is of a class of"
            " transformers' own, of which blocks alone are known; write block"
        )
    elif EXPERTS in parts and model.ffn_config.ffn_type != "dmoe":
        yield f"{key}: the model has no experts; write feed_forward"


def compiled_limits(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Lines for what cannot be done to the activations of this model where it is compiled."""
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
                f"parallel.{key}: {degree}, but the model is of a class of transformers' own, which"
                " FSDP alone cuts; write 1, and data_parallel_shard_degree: -1"
            )


def _expert(model: ModelConfig, degrees: Degrees) -> Iterator[str]:
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


def _context(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    key, heads = "parallel.context_parallel_degree", model.n_heads // degrees.tensor
    if parallel.context_parallel_method == "ulysses" and heads % degrees.context:
        of = "model.n_heads" if degrees.tensor == 1 else "the heads of a tensor-parallel process"
        *_, line = divides(key, degrees.context, of, heads)
        yield f"{line}, or context_parallel_method: all_gather"


def context_method(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> str:
    """How attention sees whole rows that processes share: the method written, or the default."""
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
    if attn.qk_ln:
        yield (
            f"{key}: {degrees.tensor}, but model.attn_config.qk_ln normalizes queries and keys over"
            " all heads, which lie on several processes; write 1, or qk_gn in its place"
        )


def tensor_adapters(adapter: str, quantize: str, degrees: Degrees) -> Iterator[str]:
    """Lines for what fine-tuning adds to a model whose matrices processes would share."""
    key, instead = "parallel.tensor_parallel_degree", "write 1, and data_parallel_shard_degree: -1"
    if degrees.tensor > 1 and adapter != "none":
        yield f"{key}: {degrees.tensor}, but an adapter's layers are not cut; {instead}"
    if degrees.tensor > 1 and quantize != "none":
        yield f"{key}: {degrees.tensor}, but matrices in 4 bits are not cut; {instead}"

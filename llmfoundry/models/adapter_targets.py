"""Which matrices of a decoder get an adapter: from the recipe's names to a `LowRank` for each.

`builders/adapter.py` calls `plan_adapter` and gives the result to `models.adapter.add_adapter`. A
name that matches nothing, or only a part of what it seems to mean, is an error: an adapter that
misses the experts of a mixture trains, and is worse, and nobody sees why.

`select` reads the patterns of `adapter.target_modules`, `adapter.exclude_modules`,
`adapter.modules_to_save` and `freeze` (`wte`, `"blocks.0-3"`, `"*.attn"`, `Wqkv`): the parts of a
pattern, between dots, must be adjacent parts of a name. A part may have `*` and `?`, or be a range
of numbers, both ends included.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from llmfoundry.errors import UserError
from llmfoundry.models.attention import Attention
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.layers import Embedding, Linear
from llmfoundry.models.low_rank import LowRank
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.router import Router
from llmfoundry.recipe.adapter import ALL_LINEAR, AdapterConfig

QKV = ("q_proj", "k_proj", "v_proj")
FUSED = "Wqkv"
_KEY = "adapter.target_modules"


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix that can have an adapter.

    Attributes:
        module: that holds it.
        shape: (out, in); of stacked experts one expert's.
        kind: `linear`, `router`, `experts`, `embedding` or `head`.
        parts: output rows that the architecture keeps apart.
        experts: how many matrices are stacked; 1 elsewhere.
    """

    module: nn.Module
    shape: tuple[int, int]
    kind: str
    parts: tuple[tuple[int, int], ...]
    experts: int = 1


def find_targets(model: Decoder, *, split_qkv: bool) -> dict[str, AdapterTarget]:
    """Every matrix that can have an adapter, by name, in the model's order."""
    targets: dict[str, AdapterTarget] = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertWeights):
            shapes = {"w1": (module.f, module.d), "v1": (module.f, module.d)}
            for weight, shape in (shapes | {"w2": (module.d, module.f)}).items():
                if hasattr(module, weight):
                    parts = ((0, shape[0]),)
                    targets[f"{name}.{weight}"] = AdapterTarget(
                        module, shape, "experts", parts, module.n
                    )
        elif isinstance(module, Linear):
            kind = "router" if isinstance(module, Router) else "linear"
            shape = (module.out_features, module.in_features)
            kind = kind if name.startswith("blocks.") else "head"
            targets[name] = AdapterTarget(module, shape, kind, ((0, shape[0]),))
        elif isinstance(module, Embedding):
            shape = (module.embedding_dim, module.num_embeddings)
            targets[name] = AdapterTarget(module, shape, "embedding", ((0, shape[0]),))
    return _with_parts(model, targets) if split_qkv else targets


def _with_parts(model: Decoder, targets: dict[str, AdapterTarget]) -> dict[str, AdapterTarget]:
    """Queries, keys and values of the fused projections as parts."""
    found = dict(targets)
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.owns_kv:
            ends = list(accumulate(module.widths))
            parts = tuple(zip([0, *ends], ends, strict=False))
            old = found[f"{name}.{FUSED}"]
            found[f"{name}.{FUSED}"] = AdapterTarget(old.module, old.shape, old.kind, parts)
    return found


def plan_adapter(model: Decoder, config: AdapterConfig, *, split_qkv: bool) -> dict[str, LowRank]:
    """The adapter of each chosen matrix, by its name.

    Args:
        model: on any device.
        config: filled, of name `lora`.
        split_qkv: queries, keys and values have adapters of their own, as in an architecture that
            keeps them apart; q_proj, k_proj and v_proj are names then.

    Raises:
        UserError: a name matches nothing, or only a part; or the rank or a setting does not fit.
    """
    targets = find_targets(model, split_qkv=split_qkv)
    chosen = _chosen(targets, config)
    assert config.r and config.lora_alpha and config.init_lora_weights, "the recipe was not filled"
    plan = {}
    for name, parts in chosen.items():
        lora = LowRank(
            config.r,
            config.lora_alpha,
            parts,
            dropout=config.lora_dropout or 0.0,
            rslora=bool(config.use_rslora),
            dora=bool(config.use_dora),
            init=config.init_lora_weights,
            shared=targets[name].kind == "experts" and config.experts == "shared",
        )
        check_fit(name, targets[name], lora)
        plan[name] = lora
    check_tied(plan, model, _KEY)
    return plan


def check_tied(names: Collection[str], model: Decoder, where: str) -> None:
    """Raise a UserError for a low-rank change of an embedding that is the head as well.

    peft changes the embedding alone, and a merged weight would change both.
    """
    if model.config.tie_word_embeddings and "wte" in names:
        raise UserError(
            f"{where}: wte is the head as well (tie_word_embeddings), and low-rank matrices would"
            " change one of the two; write adapter.modules_to_save: [wte], which trains both"
        )


def _chosen(
    targets: Mapping[str, AdapterTarget], config: AdapterConfig
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Rows of each chosen matrix that get an adapter."""
    names = list(_names(targets))
    if config.target_modules == ALL_LINEAR:
        kinds = ("linear", "experts", *(("router",) if config.train_router else ()))
        taken = [name for name in targets if targets[name].kind in kinds]
    else:
        patterns = config.target_modules
        patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
        taken = select(patterns, names, _KEY)
        _refuse_a_part(patterns, names, targets)
    left = set(select(config.exclude_modules, names, "adapter.exclude_modules"))
    _refuse_idle(config.exclude_modules, taken, names)
    chosen: dict[str, tuple[tuple[int, int], ...]] = {}
    for name in targets:
        mine = [
            part
            for part, alias in zip(targets[name].parts, _aliases(name, targets[name]), strict=True)
            if (name in taken or alias in taken) and name not in left and alias not in left
        ]
        if mine:
            chosen[name] = tuple(mine)
    if not chosen:
        raise UserError(f"{_KEY}: exclude_modules leaves nothing of it; remove some of its names")
    return chosen


def _refuse_idle(excluded: Sequence[str], taken: Sequence[str], names: Sequence[str]) -> None:
    """Each excluded name takes something away."""
    for index, pattern in enumerate(excluded):
        if not set(select([pattern], names, "")) & set(taken):
            raise UserError(
                f"adapter.exclude_modules[{index}]: {pattern!r} has no effect, as target_modules"
                " does not name it; remove it"
            )


def _names(targets: Mapping[str, AdapterTarget]) -> Iterator[str]:
    """The names that patterns are held against."""
    for name, target in targets.items():
        yield name
        if len(target.parts) > 1:
            yield from _aliases(name, target)


def _aliases(name: str, target: AdapterTarget) -> tuple[str, ...]:
    """A name for each part."""
    if len(target.parts) == 1:
        return (name,)
    return tuple(name.removesuffix(FUSED) + part for part in QKV)


def _refuse_a_part(
    patterns: list[str], names: list[str], targets: Mapping[str, AdapterTarget]
) -> None:
    """A pattern without numbers means all blocks; one of a feed-forward layer its experts, too."""
    taken = select(patterns, names, _KEY)
    layers = {_place(name) for name in names if name.startswith("blocks.")}
    served = {_place(name) for name in taken}
    for index, pattern in enumerate(patterns):
        mine = select([pattern], names, _KEY)
        inside = [name for name in mine if name.startswith("blocks.")]
        if not inside or re.search(r"(^|\.)\d+(-\d+)?(\.|$)", pattern):
            continue
        homes = {place.split(".", 2)[2] for place in map(_place, inside)}
        missing = sorted(p for p in layers - served if p.split(".", 2)[2] in homes)
        if missing:
            raise UserError(
                f"{_KEY}[{index}]: {pattern!r} matches a part of the blocks, and nothing is chosen"
                f" in {missing[0]}; name what is there too, or the blocks that you mean"
            )
        experts = [n for n in targets if targets[n].kind == "experts"]
        only_shared = all(".ffn.shared." in name for name in inside)
        if experts and only_shared and not any(n in taken for n in experts):
            if "shared" in pattern:
                continue
            raise UserError(
                f"{_KEY}[{index}]: {pattern!r} matches the shared experts alone; the routed ones"
                " are called w1, v1 and w2: add them, or write shared." + pattern
            )


def _place(name: str) -> str:
    """blocks.3.attn of blocks.3.attn.Wqkv."""
    return ".".join(name.split(".")[:3])


def check_fit(name: str, target: AdapterTarget, lora: LowRank) -> None:
    """Raise a UserError where a matrix cannot have such an adapter."""
    smallest = min(target.shape[1], *(end - begin for begin, end in lora.parts))
    if lora.r > smallest:
        raise UserError(
            f"adapter.r: {lora.r} is more than {name} has rows or columns ({smallest}); write"
            f" {smallest} or less"
        )
    leave_out = f"or leave it out by adapter.exclude_modules: [{_short(name)}]"
    if target.kind == "experts":
        if lora.dropout:
            raise UserError(
                f"adapter.lora_dropout: {lora.dropout:g}, but stacked experts ({name}) have no"
                f" dropout; write 0, {leave_out}"
            )
        if lora.dora:
            raise UserError(
                f"adapter.use_dora: stacked experts ({name}) have no DoRA; write false, {leave_out}"
            )
        if lora.init == "pissa":
            raise UserError(
                f"adapter.init_lora_weights: stacked experts ({name}) have no PiSSA; write default,"
                f" {leave_out}"
            )
    if target.kind == "embedding" and (lora.dora or lora.init == "pissa" or lora.dropout):
        key = "use_dora" if lora.dora else "lora_dropout" if lora.dropout else "init_lora_weights"
        raise UserError(f"adapter.{key}: embeddings ({name}) do not have it; {leave_out[3:]}")
    if target.kind == "head" and lora.dora and lora.dropout:
        raise UserError(
            f"adapter.use_dora: the head ({name}) does not have it with lora_dropout;"
            f" {leave_out[3:]}"
        )


def _short(name: str) -> str:
    return "experts" if ".experts." in name else name.rpartition(".")[2]


_RANGE = re.compile(r"(\d+)-(\d+)")
_FUSED = {  # what other libraries call layers that the decoder fuses or names otherwise
    **dict.fromkeys(("query_key_value", "c_attn", "qkv_proj"), "Wqkv"),
    "o_proj": "out_proj",
    "embed_tokens": "wte",
    "embed_in": "wte",
    "embed_out": "lm_head",
    "gate_up_proj": "w1, v1",
    "mlp": "ffn",
    "self_attn": "attn",
}


def matches(pattern: str, name: str) -> bool:
    """Whether the parts of `pattern` stand side by side in `name`."""
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(_is_part, wanted, parts[start:])) for start in starts)


def _is_part(wanted: str, part: str) -> bool:
    found = _RANGE.fullmatch(wanted)
    if found:
        return part.isdecimal() and int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, wanted)


def select(patterns: Iterable[str], names: Collection[str], key: str) -> list[str]:
    """Those of `names`, in their order, that any pattern matches.

    Args:
        patterns: as the recipe has them.
        names: of modules or parameters.
        key: of the recipe, for errors.

    Raises:
        UserError: a pattern matches nothing, or its range ends behind the last block.
    """
    taken: set[str] = set()
    for index, pattern in enumerate(patterns):
        found = {name for name in names if matches(pattern, name)}
        if not found:
            raise UserError(
                f"{key}[{index}]: {pattern!r} matches nothing; {_advice(pattern, names)}"
            )
        _check_range(pattern, found, f"{key}[{index}]")
        taken |= found
    return [name for name in names if name in taken]


def _check_range(pattern: str, found: Collection[str], key: str) -> None:
    """Every number of a range is one of the model's."""
    for part in pattern.split("."):
        numbers = _RANGE.fullmatch(part)
        if numbers is None:
            continue
        present = {int(p) for name in found for p in name.split(".") if p.isdecimal()}
        if int(numbers[2]) not in present or int(numbers[1]) not in present:
            raise UserError(
                f"{key}: {pattern!r} goes beyond what there is; the last that it matches is"
                f" {max(present)}; write {numbers[1]}-{max(present)}"
            )


def _advice(pattern: str, names: Collection[str]) -> str:
    last = pattern.rpartition(".")[2]
    if last in _FUSED:
        return f"here it is called {_FUSED[last]}"
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))

    def likeness(name: str) -> float:
        parts = [name, *name.split(".")]
        return max(difflib.SequenceMatcher(None, pattern, part).ratio() for part in parts)

    nearest = sorted(kinds, key=likeness, reverse=True)[:3]
    return f"the nearest are {', '.join(nearest)}"

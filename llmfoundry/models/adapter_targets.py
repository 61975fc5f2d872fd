"""Selection of the matrices that get an adapter: from names in the recipe to a `LowRank` each.

Entry point: `plan_adapter`. `builders/adapter.py` passes its result to `add_adapter`.
A name that matches nothing, or only a part of what it seems to mean, is an error. An adapter that
misses the experts of a mixture would train without a warning and give worse results.

`select` reads the patterns of `adapter.target_modules`, `adapter.exclude_modules`,
`adapter.modules_to_save` and `freeze` (`wte`, `"blocks.0-3"`, `"*.attn"`, `Wqkv`). The parts of a
pattern, between dots, must match adjacent parts of a name. A part may contain `*` and `?`, or be an
inclusive range of numbers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from llmfoundry.recipe.adapter import ALL_LINEAR, ResolvedAdapterConfig

QKV = ("q_proj", "k_proj", "v_proj")
FUSED = "Wqkv"
_KEY = "adapter.target_modules"


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix that can have an adapter.

    Attributes:
        module: module of the matrix.
        shape: (out, in); for stacked experts the shape of one expert.
        kind: `linear`, `router`, `experts`, `embedding` or `head`.
        parts: output rows [begin, end) of each separate projection.
        experts: number of stacked matrices; 1 for other kinds.
    """

    module: nn.Module
    shape: tuple[int, int]
    kind: str
    parts: tuple[tuple[int, int], ...]
    experts: int = 1


def find_targets(model: Decoder, *, split_qkv: bool) -> dict[str, AdapterTarget]:
    """Return every matrix that can have an adapter, by name, in the model's order."""
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
    """Divide the fused projections into parts for queries, keys and values."""
    divided = dict(targets)
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.owns_kv:
            ends = list(accumulate(module.widths))
            parts = tuple(zip([0, *ends], ends, strict=False))
            divided[f"{name}.{FUSED}"] = replace(targets[f"{name}.{FUSED}"], parts=parts)
    return divided


def plan_adapter(
    model: Decoder, config: ResolvedAdapterConfig, *, split_qkv: bool
) -> dict[str, LowRank]:
    """Return the adapter of each chosen matrix, by name.

    Args:
        model: on any device.
        config: resolved, with name `lora`.
        split_qkv: queries, keys and values have separate adapters, as in an architecture with
            separate projections. The names q_proj, k_proj and v_proj are then valid.

    Raises:
        UserError: a name matches nothing or only a part of the blocks, or the rank or a setting
            does not fit a matrix.
    """
    targets = find_targets(model, split_qkv=split_qkv)
    chosen = _chosen(targets, config)
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
    return plan | _token_rows(model, targets, config, plan)


def _token_rows(
    model: Decoder,
    targets: Mapping[str, AdapterTarget],
    config: ResolvedAdapterConfig,
    plan: Mapping[str, LowRank],
) -> dict[str, LowRank]:
    """Return the adapters of embedding and head for `trainable_token_indices`.

    An adapter of as many ranks as tokens is exactly a change of their rows. A tied head has the
    change of its embedding.
    """
    key, ids = "adapter.trainable_token_indices", config.trainable_token_indices
    if not ids:
        return {}
    if isinstance(ids, str):  # a sketch of the run, whose tokens are not known yet
        ids = [0]
    if max(ids) >= model.config.vocab_size:
        raise UserError(f"{key}: {max(ids)}, but the model has {model.config.vocab_size} rows")
    tables = ("wte",) if model.config.tie_word_embeddings else ("wte", "lm_head")
    rows = {name: row_change(targets[name], ids) for name in tables}
    for name in rows.keys() & plan.keys():
        raise UserError(f"{key}: {name} has an adapter already; leave it out of target_modules")
    return rows


def row_change(target: AdapterTarget, tokens: Sequence[int]) -> LowRank:
    """Return the adapter that changes the rows of `tokens` in an embedding or head."""
    return LowRank(len(tokens), len(tokens), target.parts, tokens=tuple(tokens))


def check_tied(names: Collection[str], model: Decoder, where: str) -> None:
    """Raise a UserError for an adapter on an embedding that is tied to the head.

    peft adapts the embedding only, whereas a merged weight would change both.
    """
    if model.config.tie_word_embeddings and "wte" in names:
        raise UserError(
            f"{where}: wte is the head as well (tie_word_embeddings), and low-rank matrices would"
            " change one of the two; write adapter.modules_to_save: [wte], which trains both"
        )


def _chosen(
    targets: Mapping[str, AdapterTarget], config: ResolvedAdapterConfig
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the parts of each chosen matrix that get an adapter."""
    # names that target_modules includes
    names = list(_names(targets))
    if config.target_modules == ALL_LINEAR:
        kinds = ["linear", "experts"]
        if config.train_router:
            kinds.append("router")
        included = [name for name in targets if targets[name].kind in kinds]
    else:
        patterns = config.target_modules
        patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
        included = select(patterns, names, _KEY)
        _refuse_incomplete(patterns, names, targets)

    # without those that exclude_modules names
    excluded = set(select(config.exclude_modules, names, "adapter.exclude_modules"))
    _refuse_exclusion_without_effect(config.exclude_modules, included, names)
    chosen: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, target in targets.items():
        parts = []
        for part, alias in zip(target.parts, _aliases(name, target), strict=True):
            is_included = name in included or alias in included
            if is_included and name not in excluded and alias not in excluded:
                parts.append(part)
        if parts:
            chosen[name] = tuple(parts)
    if not chosen:
        raise UserError(f"{_KEY}: exclude_modules leaves nothing of it; remove some of its names")
    return chosen


def _refuse_exclusion_without_effect(
    excluded: Sequence[str], included: Sequence[str], names: Sequence[str]
) -> None:
    """Raise a UserError for an excluded name that is not included in the first place."""
    for index, pattern in enumerate(excluded):
        if not set(select([pattern], names, "")) & set(included):
            raise UserError(
                f"adapter.exclude_modules[{index}]: {pattern!r} has no effect, as target_modules"
                " does not name it; remove it"
            )


def _names(targets: Mapping[str, AdapterTarget]) -> Iterator[str]:
    """Yield the names that patterns are matched with."""
    for name, target in targets.items():
        yield name
        if len(target.parts) > 1:
            yield from _aliases(name, target)


def _aliases(name: str, target: AdapterTarget) -> tuple[str, ...]:
    """Return a name for each part: q_proj, k_proj and v_proj of a divided Wqkv."""
    if len(target.parts) == 1:
        return (name,)
    return tuple(name.removesuffix(FUSED) + part for part in QKV)


def _refuse_incomplete(
    patterns: list[str], names: list[str], targets: Mapping[str, AdapterTarget]
) -> None:
    """Raise a UserError for a pattern that matches only a part of what it means.

    A pattern without block numbers means all blocks. A pattern for feed-forward layers means the
    routed experts, too.
    """
    included = select(patterns, names, _KEY)
    layers = {_layer_path(name) for name in names if name.startswith("blocks.")}
    covered_layers = {_layer_path(name) for name in included}
    with_experts = {_layer_path(name) for name in names if ".ffn.experts." in name}

    def kind(layer: str) -> tuple[str, bool]:  # the first blocks of a mixture may have no experts
        return layer.split(".", 2)[2], layer in with_experts

    for index, pattern in enumerate(patterns):
        in_blocks = [n for n in select([pattern], names, _KEY) if n.startswith("blocks.")]
        has_block_number = re.search(r"(^|\.)\d+(-\d+)?(\.|$)", pattern)
        if not in_blocks or has_block_number:
            continue

        # e.g. "Wqkv" in a model some of whose blocks have Wq instead
        kinds = {kind(_layer_path(name)) for name in in_blocks}
        missing = [layer for layer in layers - covered_layers if kind(layer) in kinds]
        if missing:
            raise UserError(
                f"{_KEY}[{index}]: {pattern!r} matches a part of the blocks, and nothing is chosen"
                f" in {min(missing)}; name what is there too, or the blocks that you mean"
            )

        # e.g. "up_proj" in a mixture with shared experts
        experts = [n for n in targets if targets[n].kind == "experts"]
        only_shared = all(".ffn.shared." in name for name in in_blocks)
        if experts and only_shared and not any(n in included for n in experts):
            if "shared" in pattern:
                continue
            raise UserError(
                f"{_KEY}[{index}]: {pattern!r} matches the shared experts alone; the routed ones"
                " are called w1, v1 and w2: add them, or write shared." + pattern
            )


def _layer_path(name: str) -> str:
    """Return `blocks.3.attn` of `blocks.3.attn.Wqkv`."""
    return ".".join(name.split(".")[:3])


def check_fit(name: str, target: AdapterTarget, lora: LowRank) -> None:
    """Raise a UserError if a matrix cannot have the adapter."""
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
_OTHER_NAMES = {  # names of other libraries, and the decoder's name of the same layer
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
    """Return whether the parts of `pattern` match adjacent parts of `name`."""
    pattern_parts, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(pattern_parts) + 1)
    return any(all(map(_part_matches, pattern_parts, parts[start:])) for start in starts)


def _part_matches(pattern_part: str, part: str) -> bool:
    numbers = _RANGE.fullmatch(pattern_part)
    if numbers:
        return part.isdecimal() and int(numbers[1]) <= int(part) <= int(numbers[2])
    return fnmatchcase(part, pattern_part)


def select(patterns: Iterable[str], names: Collection[str], key: str) -> list[str]:
    """Return the names that any pattern matches, in the order of `names`.

    Args:
        patterns: as written in the recipe.
        names: of modules or parameters.
        key: key of the recipe, for error messages.

    Raises:
        UserError: a pattern matches nothing, or its range ends after the last block.
    """
    selected: set[str] = set()
    for index, pattern in enumerate(patterns):
        matched = {name for name in names if matches(pattern, name)}
        if not matched:
            raise UserError(
                f"{key}[{index}]: {pattern!r} matches nothing; {_advice(pattern, names)}"
            )
        _check_range(pattern, matched, f"{key}[{index}]")
        selected |= matched
    return [name for name in names if name in selected]


def _check_range(pattern: str, matched: Collection[str], key: str) -> None:
    """Raise a UserError if an end of a range is not a number of the model."""
    for part in pattern.split("."):
        numbers = _RANGE.fullmatch(part)
        if numbers is None:
            continue
        present = {int(p) for name in matched for p in name.split(".") if p.isdecimal()}
        if int(numbers[2]) not in present or int(numbers[1]) not in present:
            raise UserError(
                f"{key}: {pattern!r} goes beyond what there is; the last that it matches is"
                f" {max(present)}; write {numbers[1]}-{max(present)}"
            )


def _advice(pattern: str, names: Collection[str]) -> str:
    last = pattern.rpartition(".")[2]
    if last in _OTHER_NAMES:
        return f"here it is called {_OTHER_NAMES[last]}"
    # one candidate for all blocks
    candidates = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))

    def similarity(name: str) -> float:
        parts = [name, *name.split(".")]
        return max(difflib.SequenceMatcher(None, pattern, part).ratio() for part in parts)

    nearest = sorted(candidates, key=similarity, reverse=True)[:3]
    return f"the nearest are {', '.join(nearest)}"

"""Import of peft's adapter folders into adapters of the decoder; `write.py` exports them.

Entry point: `read_adapter`. Every tensor of the file must be used, and every shape must match;
otherwise the adapter belongs to another model. Nothing is unpickled: adapter_model.bin is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.config_keys import field_text
from llmfoundry.hf.peft.names import (
    CONFIG,
    DEFINED,
    EMBEDDING,
    OWN_TYPE,
    PREFIX,
    ROUTER,
    TOKEN_ROWS,
    WEIGHTS,
    PeftModule,
    RowRange,
    adapter_architecture,
    depth,
    ends,
    first_matches,
    peft_modules,
    read_config,
    token_tables,
)
from llmfoundry.hf.tensor_names import MAPS, NameRule, computed, layers
from llmfoundry.models.adapter import BASE
from llmfoundry.models.adapter_targets import AdapterTarget, check_tied, find_targets, row_change
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.low_rank import TOKEN_ROWS as ROWS
from llmfoundry.models.low_rank import LowRank
from llmfoundry.recipe.schema import MOST_FLOAT

REFUSED: dict[
    str, tuple[Any, ...]
] = {  # keys of adapter_config.json that change what is computed, and what they must be
    "bias": ("none",),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "velora_config": (None,),
    "kasa_config": (None,),
}
BASE_KEEPERS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""`init_lora_weights` that leave the base as it is; peft applies any other to the base it loads."""
MERGE = "merge it by peft's merge_and_unload() and save_pretrained(), and write that folder"


class PeftNeeded(UserError):
    """Error for an adapter that the decoder does not support; peft may support it."""


@dataclass(frozen=True)
class ReadAdapter:
    """An imported adapter.

    Attributes:
        plan: adapter of each matrix, as `plan.plan_adapter` makes it.
        tensors: unsharded values of our parameters, by name; of an adapter of tokens, their rows.
        modules_to_save: names of our modules that were trained in full.
        base: name of the base model in the folder.
    """

    plan: dict[str, LowRank]
    tensors: dict[str, Tensor]
    modules_to_save: list[str]
    base: str | None


@dataclass
class _Part:
    """Part of the adapter of one of our matrices: rows [begin, end), A, B, scale and magnitude."""

    begin: int
    end: int
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None


@dataclass
class _File:
    """Contents of an adapter folder: tensors by name without peft's prefix.

    Attributes:
        folder: the folder.
        config: contents of adapter_config.json.
        tensors: tensors by name.
        read: names of the tensors that were used.
        alpha_patterns: matching key of alpha_pattern, by module name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    read: set[str] = field(default_factory=set)
    alpha_patterns: dict[str, str] = field(default_factory=dict)  # by name

    @cached_property
    def ranks(self) -> set[float]:
        return {self.config.get("r", 8), *(self.config.get("rank_pattern") or {}).values()}

    @cached_property
    def targets(self) -> dict[str, list[tuple[int, str]]]:
        """Return the order and the name of the targeted parameters, by module."""
        targets: dict[str, list[tuple[int, str]]] = {}
        for n, target in enumerate(self.config.get("target_parameters") or []):
            parent, _, parameter = target.rpartition(".")
            if parameter in DEFINED:
                targets.setdefault(parent, []).append((n, parameter))
        return targets

    def get(self, name: str) -> Tensor | None:
        if name not in self.tensors:
            return None
        self.read.add(name)
        return self.tensors[name]


def read_adapter(folder: Path, model: Decoder, *, dropout: float) -> ReadAdapter:
    """Read an adapter for a model on any device that has no adapter yet.

    Args:
        folder: folder with adapter_config.json and adapter_model.safetensors.
        model: base model.
        dropout: LoRA dropout for further training; the value in the folder is ignored.

    Raises:
        UserError: the folder is not an adapter folder, or belongs to another model.
    """
    # read the folder
    file = _open(folder)
    config = model.config
    architecture = adapter_architecture(config)
    parts: dict[str, list[_Part]] = {}
    places = [*_all_places(model, architecture)]
    file.alpha_patterns = first_matches(
        [*(file.config.get("alpha_pattern") or {})],
        [*map(_name, places)],
        file=f"{folder / CONFIG}: alpha_pattern",
    )

    # split its matrices into the parts of ours
    for place in places:
        matrices = _read(place, file)
        if matrices is not None:
            a, b, magnitude = matrices
            for source, part in _ours(place, a, b, magnitude, file):
                parts.setdefault(source, []).append(part)
    rows = dict(_token_rows(file, places))
    if not parts and not rows:
        raise _foreign(file, "none of its names is in this model")
    try:
        check_tied(parts, model, str(folder))
    except UserError as error:
        raise PeftNeeded(*error.problems) from error

    # modules that were trained in full
    whole, saved = _whole(file, architecture, model)
    unread = sorted(file.tensors.keys() - file.read)
    if unread:
        raise _unread(file, unread[0])

    # join the parts of each of our matrices
    plan, tensors = {}, dict(whole)
    for name, target in find_targets(model, split_qkv=False).items():
        if name in parts:
            plan[name], values = _join(name, parts[name], file, target.shape, dropout)
            tensors |= values
        if name in rows:
            plan[name], tensors[f"{name}.{ROWS}"] = _row_adapter(name, rows[name], file, target)
    return ReadAdapter(plan, tensors, saved, file.config.get("base_model_name_or_path"))


def _open(folder: Path) -> _File:
    """Read and check an adapter folder.

    Raises:
        UserError: a file is missing or malformed; a PeftNeeded if only peft can read the adapter.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # adapter_config.json
    config = read_config(folder)
    kind = config.get("peft_type")
    if kind not in ("LORA", OWN_TYPE):
        raise PeftNeeded(f"{folder}: peft_type {kind}; the decoder reads LORA")
    for key, values in REFUSED.items():
        if key in config and config[key] not in values:
            shown = field_text(values[0])
            raise PeftNeeded(f"{folder}: {key} {config[key]}; the decoder reads {shown}; {MERGE}")
    check_start(folder, config)
    _check_numbers(folder, config)
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise UserError(f"{folder / CONFIG}: target_parameters is not a list of names; correct it")

    # tensors, which must have magnitudes if and only if the config says DoRA
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path}: is missing; save the adapter with safe_serialization=True")
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if any("magnitude_vector" in name for name in loaded) != bool(config.get("use_dora")):
        raise UserError(
            f"{folder}: use_dora {config.get('use_dora')} in adapter_config.json, and {WEIGHTS} is"
            " otherwise; the two belong to different adapters"
        )
    return _File(folder, config, {n.removeprefix(PREFIX): t for n, t in loaded.items()})


def check_start(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise a UserError if peft would change the base model before it adds the adapter."""
    start = config.get("init_lora_weights")
    if start not in BASE_KEEPERS:
        raise PeftNeeded(
            f"{folder}: init_lora_weights {start!r} changes the base model as well; save the"
            " adapter with path_initial_model_for_weight_conversion (peft's save_pretrained), which"
            " makes a plain one of it"
        )


def _check_numbers(folder: Path, config: Mapping[str, Any]) -> None:
    """Check the ranks and scales, also those of single matrices."""
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        single = config.get(pattern) or {}
        if not isinstance(single, dict):
            raise UserError(f"{folder}: {pattern} is not a section; correct adapter_config.json")
        for value in (config.get(key, 8), *single.values()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= MOST_FLOAT:
                raise UserError(f"{folder}: {key} {repr(value)[:40]}; write a number above 0")


def _foreign(file: _File, why: str) -> UserError:
    """Return the error for an adapter of another base model."""
    return PeftNeeded(f"adapter: {file.folder} was made for another base model: {why}")


def _unread(file: _File, name: str) -> UserError:
    """Return the error for a tensor of the file that has no counterpart."""
    if name.endswith(".base_layer.weight"):
        return PeftNeeded(
            f"{file.folder / WEIGHTS}: holds {name}, a weight of the base model, which may have"
            " changed; where it has not, save the adapter with save_embedding_layers=False"
        )
    return PeftNeeded(
        f"adapter: {file.folder}: the decoder has no place for {name}; if it was made for this"
        f" model, {MERGE}; else name its base model"
    )


def _all_places(model: Decoder, architecture: str) -> Iterator[PeftModule]:
    """Yield the modules of the HF architecture (experts stacked and separate), then our modules."""
    yield from peft_modules(model.config, architecture)
    for place in peft_modules(model.config, architecture, separate=True):
        if "{e}" in place.module:
            yield place
    for name, target in find_targets(model, split_qkv=False).items():
        rows = target.shape[0]
        kind = "embedding" if target.kind == "embedding" else "linear"
        source = (RowRange(name, 0, rows),)
        yield PeftModule(f"model.{name}", "", rows, source, experts=target.experts, kind=kind)


def _read(place: PeftModule, file: _File) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return A (E, R, in), B (E, rows, R) and magnitude of a module; None without an adapter."""
    # a module per expert: stack their matrices
    if "{e}" in place.module:
        names = [place.module.format(e=e) for e in range(place.experts)]
        all_pairs = [_pair(file, name) for name in names]
        pairs = [pair for pair in all_pairs if pair is not None]
        if not pairs:
            return None
        if len(pairs) < len(names):
            raise UserError(f"adapter: {file.folder} has an adapter for some experts of"
                            f" {place.module} alone")  # fmt: skip
        return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]), None

    # one module; peft nests a wrapper `base_layer` for each further parameter that it adapts
    key = place.module
    if place.parameter:
        wrapped = _wrapped(place, file)
        if place.parameter not in wrapped:
            return None
        key += ".base_layer" * depth(place.parameter, wrapped)
    pair = _pair(file, key, embedding=place.kind == "embedding")
    if pair is None:
        return None
    a, b = pair

    # split the experts, which peft keeps in the rows of A and, interleaved, in the columns of B
    if place.parameter and place.experts > 1:
        b = b.view(len(b), -1, place.experts).permute(2, 0, 1)
    else:
        b = b.view(place.experts, -1, b.shape[1])
    a = a.view(place.experts, -1, a.shape[1])
    return a, b, file.get(f"{key}.lora_magnitude_vector")


def _token_rows(
    file: _File, places: Iterable[PeftModule]
) -> Iterator[tuple[str, tuple[list[int], Tensor]]]:
    """Yield the name of our embedding and head, ids of tokens, and their rows (n, D) of it.

    Raises:
        UserError: ids in adapter_config.json do not belong to the rows.
    """
    written = token_tables(file.folder, file.config)
    if EMBEDDING in written:
        ids = written[EMBEDDING]
        written = {place.module: ids for place in places if place.kind == "embedding"}
    found = set()
    for place in places:
        rows = file.get(f"{place.module}.{TOKEN_ROWS}")
        if rows is None:
            continue
        ids = next((written[end] for end in ends(place.module) if end in written), [])
        if rows.ndim != 2 or len(ids) != len(rows):
            raise UserError(
                f"{file.folder / CONFIG}: trainable_token_indices does not name the {len(rows)}"
                f" rows of {place.module} that {WEIGHTS} has, each once; correct it"
            )
        found.add(place.sources[0].ours)
        yield place.sources[0].ours, (ids, rows.float() / place.factor)

    # tables whose rows the file lacks
    for name in written:
        if found.isdisjoint(p.sources[0].ours for p in places if name in ends(p.module)):
            raise UserError(
                f"{file.folder / CONFIG}: trainable_token_indices names {name}, of which {WEIGHTS}"
                " has no rows; copy both files of one adapter"
            )


def _row_adapter(
    name: str, read: tuple[list[int], Tensor], file: _File, target: AdapterTarget
) -> tuple[LowRank, Tensor]:
    """Return the adapter of tokens in an embedding or head, and their rows.

    Raises:
        UserError: the rows do not fit the base model.
    """
    ids, rows = read
    n_rows, width = target.shape[:: -1 if target.kind == "embedding" else 1]
    if rows.shape[1] != width or min(ids) < 0 or max(ids) >= n_rows:
        raise _foreign(
            file,
            f"{name} is {n_rows} x {width} here, and rows up to {max(ids)} of {rows.shape[1]}"
            " values there",
        )
    return row_change(target, ids), rows


def _wrapped(place: PeftModule, file: _File) -> list[str]:
    """Return the parameters of a module that the folder targets, in order."""
    wrapped = []
    for module_end in (*ends(place.module), ""):
        wrapped += file.targets.get(module_end, [])
    # a module has either the router's parameter or the experts' parameters
    is_router = place.parameter == ROUTER
    return [name for _, name in sorted(wrapped) if (name == ROUTER) == is_router]


def _pair(file: _File, key: str, *, embedding: bool = False) -> tuple[Tensor, Tensor] | None:
    """Return A and B of a module; None without an adapter."""
    kind = "lora_embedding_{}" if embedding else "lora_{}.weight"
    a, b = (file.get(f"{key}.{kind.format(side)}") for side in "AB")
    if (a is None) != (b is None):
        raise UserError(f"{file.folder / WEIGHTS}: {key} has one of lora_A and lora_B alone")
    return None if a is None or b is None else (a.float(), b.float())


def _ours(
    place: PeftModule, a: Tensor, b: Tensor, magnitude: Tensor | None, file: _File
) -> Iterator[tuple[str, _Part]]:
    """Yield the name of each of our matrices in a module, with its part of the adapter.

    Args:
        place: module in peft's format.
        a: (E, R, in).
        b: (E, rows, R).
        magnitude: (rows,), of DoRA.
        file: adapter folder.

    Raises:
        UserError: the shapes do not fit the base model or adapter_config.json.
    """
    # check the shapes
    if b.shape[1] != place.rows or a.shape[1] != b.shape[2]:
        raise _foreign(
            file,
            f"{place.module} has {place.rows} rows here, its lora_B {b.shape[1]}",
        )
    if a.shape[1] not in file.ranks:
        raise UserError(
            f"{file.folder}: {place.module} has rank {a.shape[1]}, which adapter_config.json does"
            " not say; the two belong to different adapters"
        )

    # the order of rows here
    scale = _scale(place, a.shape[1], file)
    if place.order is not None:
        _, to_our_order = place.order
        b = torch.stack([to_our_order(expert_b) for expert_b in b])
        magnitude = None if magnitude is None else to_our_order(magnitude)

    # the rows of each of our matrices, with its half of the rank in a block diagonal matrix
    halves = _halves(place, b)
    for index, source in enumerate(place.sources):
        height = source.end - source.begin
        rows = slice(source.at, source.at + height)
        columns = halves[index] if halves else slice(None)
        part = _Part(
            source.begin,
            source.end,
            a[:, columns],
            b[:, rows, columns] / place.factor,
            scale,
            None if magnitude is None else magnitude[rows],
        )
        yield source.ours, part


def _halves(place: PeftModule, b: Tensor) -> list[slice] | None:
    """Return the columns of each source in a joint matrix if it is block diagonal; else None.

    `write.py` writes such matrices: each source has one half of the rank.
    """
    rank = b.shape[2]
    if len(place.sources) != 2 or rank % 2 or not b.any():
        return None
    halves = [slice(0, rank // 2), slice(rank // 2, rank)]
    for source, other in zip(place.sources, reversed(halves), strict=True):
        rows = slice(source.at, source.at + source.end - source.begin)
        if b[:, rows, other].any():
            return None
    return halves


def _scale(place: PeftModule, rank: int, file: _File) -> float:
    """Return the factor by which peft multiplies B A."""
    config = file.config
    pattern = file.alpha_patterns.get(_name(place))
    alpha = config.get("lora_alpha", 8) if pattern is None else config["alpha_pattern"][pattern]
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _name(place: PeftModule) -> str:
    """Return the name of a module or parameter for the patterns of adapter_config.json."""
    return place.module.format(e=0) + (f".{place.parameter}" if place.parameter else "")


def _join(
    name: str, parts: list[_Part], file: _File, shape: tuple[int, int], dropout: float
) -> tuple[LowRank, dict[str, Tensor]]:
    """Return the adapter of one of our matrices, and the values of its parameters."""
    parts = sorted(parts, key=lambda part: part.begin)
    rank, scale = max(part.a.shape[1] for part in parts), parts[0].scale
    if any(part.a.shape[2] != shape[1] for part in parts):
        raise _foreign(file, f"{name} has {shape[1]} columns here, lora_A {parts[0].a.shape[2]}")
    rslora = bool(file.config.get("use_rslora"))
    dora = parts[0].magnitude is not None
    lora = LowRank(
        rank,
        scale * (rank**0.5 if rslora else rank),
        tuple((part.begin, part.end) for part in parts),
        dropout=dropout,
        rslora=rslora,
        dora=dora,
    )
    pad: Callable[[Tensor, int, int], Tensor] = _padded
    a = torch.cat([pad(part.a, 1, rank) for part in parts], 1).flatten(0, 1)
    b = torch.cat([pad(part.b * (part.scale / scale), 2, rank) for part in parts], 1).flatten(0, 1)
    key = f"{name}_lora_" if ".experts." in name else f"{name}.lora_"
    values = {f"{key}A": a, f"{key}B": b}
    if dora:
        magnitudes = [part.magnitude for part in parts if part.magnitude is not None]
        values[f"{key}magnitude"] = torch.cat(magnitudes)
    return lora, values


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Pad a dimension of `tensor` with zeros at its end."""
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _whole(file: _File, architecture: str, model: Decoder) -> tuple[dict[str, Tensor], list[str]]:
    """Return the values of modules that were trained in full, and the names of these modules."""
    # our name and conversion rule of each parameter, by its name in the file
    parameters, config = dict(model.named_parameters()), model.config
    names: dict[str, tuple[str, NameRule | None]] = {f"model.{n}": (n, None) for n in parameters}
    if architecture in MAPS:
        for rule, ours, theirs in layers(MAPS[architecture], config):
            tied = ours == "lm_head" and config.tie_word_embeddings
            for kind in ("weight", "bias"):
                name = f"{'wte' if tied else ours}.{kind}"
                if len(theirs) == 1 and name in parameters:
                    names[theirs[0].removesuffix("weight") + kind] = (name, rule)

    # read them
    values: dict[str, Tensor] = {}
    for theirs_name, (name, name_rule) in names.items():
        tensor = file.get(theirs_name)
        if tensor is None:
            continue
        if tensor.shape != parameters[name].shape:
            raise _foreign(file, f"{theirs_name} has the shape {tuple(tensor.shape)}")
        if name_rule is not None and name.endswith("weight"):
            tensor = computed(name_rule, config, tensor, back=True)
        # a tied head must be equal to the embedding, which has been read before it
        is_head = name_rule is not None and name_rule.ours == "lm_head"
        is_tied_head = is_head and name == "wte.weight"
        if is_tied_head and not torch.equal(values.get(name, tensor[:0]), tensor):
            raise PeftNeeded(
                f"{file.folder}: {theirs_name} is not its embedding, and the base model ties the"
                " two; save a base with tie_word_embeddings: false, and train on that"
            )
        values[name] = tensor
    _check_head(file, architecture, model, values)
    return values, list(dict.fromkeys(name.rpartition(".")[0] for name in values))


def _check_head(
    file: _File, architecture: str, model: Decoder, values: Mapping[str, Tensor]
) -> None:
    """Raise a UserError if peft would train a tied embedding without its head."""
    if architecture not in MAPS or "wte.weight" not in values:
        return
    places = layers(MAPS[architecture], model.config)
    head = next(theirs[0] for _, ours, theirs in places if ours == "lm_head")
    ties = file.config.get("ensure_weight_tying") or (file.folder / BASE).is_file()
    if model.config.tie_word_embeddings and head not in file.read and not ties:
        raise PeftNeeded(
            f"{file.folder}: modules_to_save has the embedding without the head, which the base"
            " model ties to it, and which stays the base's in peft; train it with"
            " ensure_weight_tying=True, or write the base with tie_word_embeddings: false"
        )

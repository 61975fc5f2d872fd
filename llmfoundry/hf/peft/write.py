"""Adapters as peft's folders: adapter_config.json and adapter_model.safetensors, written here.

Names are those of the Hugging Face architecture that the model exports to, so the folder loads in
peft on the folder that `convert.py to=hf` writes of the base. `read.py` goes the other way.

Stacked experts follow peft's `target_parameters`: A (E * R, in) expert after expert, B (out, R * E)
rank after rank. Its joint gate and up projection have one A: ours stand in it side by side, with
zeros where the other's rows are. peft has no way to change DBRX's experts, whose weights are read
past the module that it wraps: such a folder names another `peft_type`, so that peft refuses it
instead of leaving the experts out.

peft replaces modules one by one, so that a head that is tied to an embedding would stay the base's:
an embedding that trained whole is written as both, and `ensure_weight_tying` ties them again where
peft trains on. Versions of peft that do not know that key replace both all the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.files import open_to_all, write_json
from llmfoundry.hf.architectures import OWN
from llmfoundry.hf.peft.names import (
    CONFIG,
    OWN_TYPE,
    PREFIX,
    WEIGHTS,
    PeftModule,
    RowRange,
    adapter_architecture,
    depth,
    module_name,
    peft_modules,
)
from llmfoundry.hf.tensor_names import MAPS, WeightMap, computed, layers
from llmfoundry.models.low_rank import LowRank
from llmfoundry.recipe.model import ResolvedModelConfig


@dataclass(frozen=True)
class AdaptedMatrix:
    """One of our adapted matrices with its tensors, whole.

    Attributes:
        lora: its adapter.
        a: (E, P * r, in), E 1 where it is not a stack.
        b: (E, rows, r).
        start: A and B that PiSSA began with, in the same shapes; None elsewhere.
        magnitude: (rows,) DoRA's.
    """

    lora: LowRank
    a: Tensor
    b: Tensor
    start: tuple[Tensor, Tensor] | None = None
    magnitude: Tensor | None = None

    def pieces(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Rows [begin, end) of each part, with its A (E, R, in) and B (E, end - begin, R)."""
        pairs = [(self.a, self.b)]
        if self.start is not None:
            pairs.append((self.start[0], -self.start[1]))
        at = 0
        for index, (begin, end) in enumerate(self.lora.parts):
            r, height = self.lora.r, end - begin
            a = [a[:, index * r : (index + 1) * r] for a, _ in pairs]
            b = [b[:, at : at + height] for _, b in pairs]
            yield begin, end, torch.cat(a, 1), torch.cat(b, 2)
            at += height


def target_matrices(
    plan: Mapping[str, LowRank], tensors: Mapping[str, Tensor], experts: int
) -> dict[str, AdaptedMatrix]:
    """Adapted matrices by name, from a model's parameters by theirs."""
    found = {}
    for name, lora in plan.items():
        stacked = ".experts." in name
        key = f"{name}_lora_" if stacked else f"{name}.lora_"
        count = experts if stacked and not lora.shared else 1

        def read(kind: str, key: str = key, count: int = count) -> Tensor:
            tensor = tensors[key + kind].detach().float().cpu()
            return tensor.view(count, -1, tensor.shape[-1])

        start = (read("A_init"), read("B_init")) if lora.init == "pissa" else None
        magnitude = tensors[f"{key}magnitude"].detach().float().cpu() if lora.dora else None
        found[name] = AdaptedMatrix(lora, read("A"), read("B"), start, magnitude)
    return found


def write_adapter(
    folder: Path,
    config: ResolvedModelConfig,
    adapted: Mapping[str, AdaptedMatrix],
    *,
    whole: Mapping[str, Tensor],
    base: str | None,
    architecture: str | None = None,
    experts: str = "stacked",
    is_resized: bool = False,
) -> str:
    """Write adapter_config.json and adapter_model.safetensors.

    Args:
        folder: exists.
        config: filled.
        adapted: adapted matrices by our names.
        whole: parameters that were trained whole, by our names.
        base: what adapter_config.json names as the base model.
        architecture: whose names; None: the one that the model exports to.
        experts: `stacked`, as peft's target_parameters, or `separate`: an adapter for each expert.
        is_resized: `base` has fewer rows than the model that was trained, so that peft is to refuse
            the folder.

    Returns:
        The architecture.

    Raises:
        UserError: it has no place for something, or no experts apart.
    """
    from safetensors.torch import save_file

    name = adapter_architecture(config, architecture)
    separate = experts == "separate"
    if separate and not _has_separate(name):
        raise UserError(
            f"adapter_experts: {name} keeps its experts in one tensor; write stacked, or merge by"
            " to=hf"
        )
    written = _Writer(separate)
    written.refused_by_peft = is_resized
    there = peft_modules(config, name, separate=separate)
    for place in there:
        written.add(place, adapted)
    left = {n: m for n, m in adapted.items() if n not in written.placed}
    written.add_own(left, named_by_us=name == OWN)
    written.add_whole(whole, MAPS.get(name), config)
    written.finish()
    save_file(written.tensors, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_all(folder / WEIGHTS)
    write_json(folder / CONFIG, written.settings(adapted, base, name))
    return name


def _has_separate(architecture: str) -> bool:
    weights = MAPS.get(architecture)
    return bool(weights and weights.experts and weights.experts[0].form == "each")


class _Writer:
    """Collects tensors by their names in the file, and what the configuration has to say."""

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.tensors: dict[str, Tensor] = {}
        self.placed: set[str] = set()
        self.refused_by_peft = False
        self.ties_weights = False
        self.modules_to_save: list[str] = []
        self._shapes: dict[str, tuple[int, float]] = {}  # rank and scale by module or parameter
        self._modules: list[str] = []
        self._parameters: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}

    def add(self, place: PeftModule, adapted: Mapping[str, AdaptedMatrix]) -> None:
        """What `place` holds of the adapter, if anything."""
        mine = [(source, adapted[source.ours]) for source in place.sources
                if source.ours in adapted]  # fmt: skip
        found = _assemble(place, mine)
        if found is None:
            return
        self.placed |= {source.ours for source, _ in mine}
        a, b, scale, magnitude = found
        if place.experts > 1 and "{e}" in place.module:
            for e in range(place.experts):
                self._linear(place.module.format(e=e), a[e], b[e], scale, None)
        elif place.parameter:
            self._parameter(place, a, b, scale)
        elif place.kind == "embedding":
            self.tensors[f"{PREFIX}{place.module}.lora_embedding_A"] = a[0].contiguous()
            self.tensors[f"{PREFIX}{place.module}.lora_embedding_B"] = b[0].contiguous()
            self._modules.append(place.module)
            self._shapes[place.module] = (a.shape[1], scale)
        else:
            self._linear(place.module, a[0], b[0], scale, magnitude)

    def _linear(
        self, module: str, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None
    ) -> None:
        self.tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        self.tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
        if magnitude is not None:
            self.tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = magnitude.contiguous()
        self._modules.append(module)
        self._shapes[module] = (len(a), scale)

    def _parameter(self, place: PeftModule, a: Tensor, b: Tensor, scale: float) -> None:
        self._parameters.setdefault(place.module, {})[place.parameter] = (a, b)
        self._shapes[f"{place.module}.{place.parameter}"] = (a.shape[1], scale)

    def finish(self) -> None:
        """Name the wrapped parameters' tensors, which depend on what else their module has."""
        for module, parameters in self._parameters.items():
            for name, (a, b) in parameters.items():
                key = f"{PREFIX}{module}." + "base_layer." * depth(name, parameters)
                self.tensors[f"{key}lora_A.weight"] = a.flatten(0, 1).contiguous()
                self.tensors[f"{key}lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()

    def add_own(self, adapted: Mapping[str, AdaptedMatrix], *, named_by_us: bool) -> None:
        """What the architecture has no place for, by our own names."""
        for name, matrix in adapted.items():
            stacked = ".experts." in name
            self.refused_by_peft |= stacked or not named_by_us
            rows = max(end for _, end in matrix.lora.parts)
            place = PeftModule(f"model.{name}", "", rows, (RowRange(name, 0, rows),),
                          experts=len(matrix.a))  # fmt: skip
            found = _assemble(place, [(place.sources[0], matrix)])
            assert found is not None
            a, b, scale, magnitude = found
            if stacked:
                self._linear(place.module, a.flatten(0, 1), b.flatten(0, 1), scale, None)
                self._shapes[place.module] = (a.shape[1], scale)
            else:
                self._linear(place.module, a[0], b[0], scale, magnitude)

    def add_whole(
        self, whole: Mapping[str, Tensor], weights: WeightMap | None, config: ResolvedModelConfig
    ) -> None:
        """Parameters that trained whole."""
        rules = {} if weights is None else {
            ours: (rule, theirs) for rule, ours, theirs in layers(weights, config)}  # fmt: skip
        for name, tensor in whole.items():
            layer, _, kind = name.rpartition(".")
            value = tensor.detach().cpu().contiguous()
            if layer not in rules:
                self.refused_by_peft |= weights is not None
                self._save_module(f"model.{layer}", kind, value)
                continue
            rule, theirs = rules[layer]
            if len(theirs) != 1 or rule.transposed:
                raise UserError(
                    f"adapter.modules_to_save: {layer} is not one module in peft's format;"
                    " remove it"
                )
            value = computed(rule, config, value) if kind == "weight" else value
            self._save_module(module_name(theirs[0]), kind, value)
            if layer == "wte" and config.tie_word_embeddings:
                self._save_module(module_name(rules["lm_head"][1][0]), kind, value.clone())
                self.ties_weights = True

    def _save_module(self, module: str, kind: str, value: Tensor) -> None:
        self.tensors[f"{PREFIX}{module}.{kind}"] = value
        self.modules_to_save.append(module)

    def settings(
        self, adapted: Mapping[str, AdaptedMatrix], base: str | None, architecture: str
    ) -> dict[str, Any]:
        """adapter_config.json."""
        loras = [matrix.lora for matrix in adapted.values()]
        rslora = any(lora.rslora for lora in loras)
        sizes = {
            key: (rank, scale * (math.sqrt(rank) if rslora else rank))
            for key, (rank, scale) in self._shapes.items()
        }
        (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
        transposed = any(rule.transposed for rule in MAPS[architecture].rules) if (
            architecture in MAPS) else False  # fmt: skip
        return {
            "peft_type": OWN_TYPE if self.refused_by_peft else "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": max(lora.dropout for lora in loras),
            "rank_pattern": {k: r for k, (r, _) in sizes.items() if r != rank},
            "alpha_pattern": {k: a for k, (_, a) in sizes.items() if a != alpha},
            "target_modules": self._modules,
            "target_parameters": [f"{m}.{p}" for m, ps in self._parameters.items() for p in ps]
            or None,
            "modules_to_save": list(dict.fromkeys(self.modules_to_save)) or None,
            "ensure_weight_tying": self.ties_weights,
            "use_rslora": rslora,
            "use_dora": any(lora.dora for lora in loras),
            "fan_in_fan_out": transposed,
            "bias": "none",
            "init_lora_weights": True,
        }


def _assemble(
    place: PeftModule, mine: Sequence[tuple[RowRange, AdaptedMatrix]]
) -> tuple[Tensor, Tensor, float, Tensor | None] | None:
    """A (E, R, in), B (E, rows, R), scale and magnitude of a place, in their order of rows."""
    pieces = []
    for source, matrix in mine:
        for begin, end, a, b in matrix.pieces():
            low, high = max(begin, source.begin), min(end, source.end)
            if low < high:
                rows = b[:, low - begin : high - begin]
                pieces.append((source.at + low - source.begin, a, rows, matrix))
    if not pieces:
        return None
    scale = pieces[0][3].lora.scaling
    experts = max(len(a) for _, a, _, _ in pieces)
    experts = max(experts, place.experts)
    rank = sum(a.shape[1] for _, a, _, _ in pieces)
    joint = torch.cat([a.expand(experts, -1, -1) for _, a, _, _ in pieces], 1)
    b = torch.zeros(experts, place.rows, rank)
    at = 0
    for row, a, rows, matrix in pieces:
        width = a.shape[1]
        factor = place.factor * matrix.lora.scaling / scale
        b[:, row : row + rows.shape[1], at : at + width] = rows * factor
        at += width
    magnitude = _magnitude(place, mine)
    if place.order is not None:
        b = torch.stack([place.order[0](one) for one in b])
        magnitude = None if magnitude is None else place.order[0](magnitude)
    return joint, b, scale, magnitude


def _magnitude(place: PeftModule, mine: Sequence[tuple[RowRange, AdaptedMatrix]]) -> Tensor | None:
    if all(matrix.magnitude is None for _, matrix in mine):
        return None
    found, filled = torch.zeros(place.rows), 0
    for source, matrix in mine:
        assert matrix.magnitude is not None
        at = 0
        for begin, end in matrix.lora.parts:
            low, high = max(begin, source.begin), min(end, source.end)
            if low < high:
                to = source.at + low - source.begin
                found[to : to + high - low] = matrix.magnitude[at + low - begin : at + high - begin]
                filled += high - low
            at += end - begin
    if filled != place.rows:
        raise UserError(
            f"architecture: {place.module} has rows without an adapter, and DoRA needs all; leave"
            " architecture out"
        )
    return found

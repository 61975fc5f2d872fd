"""Export of adapters as peft folders: adapter_config.json and adapter_model.safetensors.

Entry point: `write_adapter`. Names are those of the HF architecture that the model exports to. The
folder therefore loads in peft on the folder that `convert.py to=hf` writes for the base model.
`read.py` imports such folders.

Stacked experts follow peft's `target_parameters`: A (E * R, in) is ordered by expert, B (out,
R * E) by rank. A joint gate and up projection has one A: it contains both of ours, and B is block
diagonal. peft cannot adapt DBRX's experts, because DBRX reads their weights past the module that
peft wraps. Such a folder has a different `peft_type`, so that peft rejects it instead of ignoring
the experts.

peft replaces modules one by one, so a head tied to an embedding would keep the base model's
weights. An embedding that was trained in full is therefore written twice, and
`ensure_weight_tying` ties both when peft continues training. Older versions of peft ignore that
key, but they replace both modules as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.files import open_to_all, write_json
from llmfoundry.hf.architecture import OWN
from llmfoundry.hf.peft.names import (
    CONFIG,
    OWN_TYPE,
    PREFIX,
    TOKEN_ROWS,
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
    """One of our adapted matrices with its unsharded tensors.

    Attributes:
        lora: settings of the adapter.
        a: (E, P * r, in); E is 1 for a plain matrix, P is the number of parts.
        b: (E, rows, r).
        start: initial A and B of PiSSA, in the same shapes; None otherwise.
        magnitude: (rows,) magnitude of DoRA; None otherwise.
        token_rows: (len(tokens), D), changed rows of the base for `lora.tokens`; None otherwise.
    """

    lora: LowRank
    a: Tensor
    b: Tensor
    start: tuple[Tensor, Tensor] | None = None
    magnitude: Tensor | None = None
    token_rows: Tensor | None = None

    def pieces(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield the rows [begin, end) of each part, A (E, R, in) and B (E, end - begin, R)."""
        pairs = [(self.a, self.b)]
        if self.start is not None:
            pairs.append((self.start[0], -self.start[1]))
        rank, first_row = self.lora.r, 0
        for index, (begin, end) in enumerate(self.lora.parts):
            height = end - begin
            a_parts = [a[:, index * rank : (index + 1) * rank] for a, _ in pairs]
            b_parts = [b[:, first_row : first_row + height] for _, b in pairs]
            yield begin, end, torch.cat(a_parts, 1), torch.cat(b_parts, 2)
            first_row += height


def target_matrices(
    plan: Mapping[str, LowRank],
    tensors: Mapping[str, Tensor],
    experts: int,
    base_rows: Mapping[str, Tensor],
) -> dict[str, AdaptedMatrix]:
    """Return the adapted matrices by name.

    Args:
        plan: adapter of each matrix.
        tensors: parameters of the model by name.
        experts: number of experts.
        base_rows: result of `base_token_rows`.
    """
    matrices = {}
    for name, lora in plan.items():
        stacked = ".experts." in name
        key = f"{name}_lora_" if stacked else f"{name}.lora_"
        count = experts if stacked and not lora.shared else 1

        def read(kind: str, key: str = key, count: int = count) -> Tensor:
            tensor = tensors[key + kind].detach().float().cpu()
            return tensor.view(count, -1, tensor.shape[-1])

        start = (read("A_init"), read("B_init")) if lora.init == "pissa" else None
        magnitude = tensors[f"{key}magnitude"].detach().float().cpu() if lora.dora else None
        matrix = AdaptedMatrix(lora, read("A"), read("B"), start, magnitude)
        if lora.tokens:
            change = matrix.b[0].T if name == "wte" else matrix.a[0]
            matrix = replace(matrix, token_rows=base_rows[name] + change)
        matrices[name] = matrix
    return matrices


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
        folder: existing folder.
        config: resolved model configuration.
        adapted: adapted matrices by our names.
        whole: parameters that were trained in full, by our names.
        base: name of the base model in adapter_config.json.
        architecture: HF architecture whose names are used; None: that of the export.
        experts: `stacked` (peft's target_parameters) or `separate` (an adapter for each expert).
        is_resized: the base model has fewer embedding rows than the trained model. peft must
            reject such a folder.

    Returns:
        The architecture.

    Raises:
        UserError: the architecture cannot represent a part of the adapter.
    """
    from safetensors.torch import save_file

    name = adapter_architecture(config, architecture)
    separate = experts == "separate"
    if separate and not _has_separate(name):
        raise UserError(
            f"adapter_experts: {name} keeps its experts in one tensor; write stacked, or merge by"
            " to=hf"
        )

    # adapted matrices: those of the architecture by its names, the others by ours
    writer = _Writer(separate)
    writer.refused_by_peft = is_resized
    for place in peft_modules(config, name, separate=separate):
        writer.add(place, adapted)
    others = {n: matrix for n, matrix in adapted.items() if n not in writer.placed}
    writer.add_own(others, named_by_us=name == OWN)

    # parameters that were trained in full
    writer.add_whole(whole, MAPS.get(name), config)

    # both files
    writer.finish()
    save_file(writer.tensors, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_all(folder / WEIGHTS)
    write_json(folder / CONFIG, writer.settings(adapted, base, name))
    return name


def _has_separate(architecture: str) -> bool:
    """Return whether an architecture stores each expert separately."""
    weights = MAPS.get(architecture)
    return bool(weights and weights.experts and weights.experts[0].form == "each")


class _Writer:
    """Collects the tensors of the file and the values of adapter_config.json."""

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.tensors: dict[str, Tensor] = {}
        self.placed: set[str] = set()
        self.refused_by_peft = False
        self.ties_weights = False
        self.modules_to_save: list[str] = []
        self._tokens: dict[str, list[int]] = {}  # whose rows are trained, by module
        self._shapes: dict[str, tuple[int, float]] = {}  # rank and scale by module or parameter
        self._modules: list[str] = []
        self._parameters: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}

    def add(self, place: PeftModule, adapted: Mapping[str, AdaptedMatrix]) -> None:
        """Add the part of the adapter in a module, if there is any."""
        # join the adapted matrices that are parts of the module
        sources = [(source, adapted[source.ours]) for source in place.sources
                   if source.ours in adapted]  # fmt: skip
        if sources and sources[0][1].lora.tokens:
            self.placed.add(sources[0][0].ours)
            self._rows(place.module, sources[0][1], place.factor)
            return
        assembled = _assemble(place, sources)
        if assembled is None:
            return
        self.placed |= {source.ours for source, _ in sources}
        self.refused_by_peft |= place.is_lost
        a, b, scale, magnitude = assembled

        # add it in the form of its kind: experts, a parameter, an embedding or a linear layer
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
        """Add A (R, in), B (rows, R) and magnitude (rows,) of a linear layer."""
        self.tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        self.tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
        if magnitude is not None:
            self.tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = magnitude.contiguous()
        self._modules.append(module)
        self._shapes[module] = (len(a), scale)

    def _rows(self, module: str, matrix: AdaptedMatrix, factor: float = 1.0) -> None:
        """Add the rows of single tokens, (len(tokens), D), of an embedding or head."""
        assert matrix.token_rows is not None
        rows = (matrix.token_rows * factor).contiguous()
        self.tensors[f"{PREFIX}{module}.{TOKEN_ROWS}"] = rows
        self._tokens[module] = [*matrix.lora.tokens]

    def _parameter(self, place: PeftModule, a: Tensor, b: Tensor, scale: float) -> None:
        """Note A (E, R, in) and B (E, rows, R) of a parameter; `finish` adds them."""
        self._parameters.setdefault(place.module, {})[place.parameter] = (a, b)
        self._shapes[f"{place.module}.{place.parameter}"] = (a.shape[1], scale)

    def finish(self) -> None:
        """Add the tensors of wrapped parameters.

        Their names depend on the other adapted parameters of the module.
        """
        for module, parameters in self._parameters.items():
            for name, (a, b) in parameters.items():
                key = f"{PREFIX}{module}." + "base_layer." * depth(name, parameters)
                self.tensors[f"{key}lora_A.weight"] = a.flatten(0, 1).contiguous()
                self.tensors[f"{key}lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()

    def add_own(self, adapted: Mapping[str, AdaptedMatrix], *, named_by_us: bool) -> None:
        """Add adapted matrices that the architecture has no counterpart for, by our names."""
        for name, matrix in adapted.items():
            stacked = ".experts." in name
            self.refused_by_peft |= stacked or not named_by_us or bool(matrix.lora.tokens)
            if matrix.lora.tokens:
                self._rows(f"model.{name}", matrix)
                continue
            rows = max(end for _, end in matrix.lora.parts)
            place = PeftModule(f"model.{name}", "", rows, (RowRange(name, 0, rows),),
                          experts=len(matrix.a))  # fmt: skip
            assembled = _assemble(place, [(place.sources[0], matrix)])
            assert assembled is not None
            a, b, scale, magnitude = assembled
            if stacked:
                self._linear(place.module, a.flatten(0, 1), b.flatten(0, 1), scale, None)
                self._shapes[place.module] = (a.shape[1], scale)
            else:
                self._linear(place.module, a[0], b[0], scale, magnitude)

    def add_whole(
        self, whole: Mapping[str, Tensor], weights: WeightMap | None, config: ResolvedModelConfig
    ) -> None:
        """Add parameters that were trained in full."""
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
        """Return the contents of adapter_config.json."""
        # rank and alpha of each module; the most common pair is the default
        loras = [matrix.lora for matrix in adapted.values()]
        rslora = any(lora.rslora for lora in loras)
        sizes = {}
        for key, (rank, scale) in self._shapes.items():
            sizes[key] = (rank, scale * (math.sqrt(rank) if rslora else rank))
        (default_rank, default_alpha), _ = Counter(sizes.values()).most_common(1)[0]

        # other settings
        rules = MAPS[architecture].rules if architecture in MAPS else ()
        parameters = [f"{m}.{name}" for m, names in self._parameters.items() for name in names]
        return {
            "peft_type": OWN_TYPE if self.refused_by_peft else "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": default_rank,
            "lora_alpha": default_alpha,
            "lora_dropout": max(lora.dropout for lora in loras),
            "rank_pattern": {k: r for k, (r, _) in sizes.items() if r != default_rank},
            "alpha_pattern": {k: a for k, (_, a) in sizes.items() if a != default_alpha},
            "target_modules": self._modules,
            "target_parameters": parameters or None,
            "trainable_token_indices": self._tokens or None,
            "modules_to_save": list(dict.fromkeys(self.modules_to_save)) or None,
            "ensure_weight_tying": self.ties_weights,
            "use_rslora": rslora,
            "use_dora": any(lora.dora for lora in loras),
            "fan_in_fan_out": any(rule.transposed for rule in rules),
            "bias": "none",
            "init_lora_weights": True,
        }


def _assemble(
    place: PeftModule, sources: Sequence[tuple[RowRange, AdaptedMatrix]]
) -> tuple[Tensor, Tensor, float, Tensor | None] | None:
    """Return A (E, R, in), B (E, rows, R), scale and magnitude of a module, in HF's row order.

    Returns None if no part of `sources` is in the module.
    """
    # the parts of the sources: their first row in the module, A, the rows of B, and the scale
    parts: list[tuple[int, Tensor, Tensor, float]] = []
    for source, matrix in sources:
        for begin, end, a, b in matrix.pieces():
            low, high = max(begin, source.begin), min(end, source.end)
            if low < high:
                row = source.at + low - source.begin
                parts.append((row, a, b[:, low - begin : high - begin], matrix.lora.scaling))
    if not parts:
        return None

    # join them: A by rows, B block by block; the scale is that of the first part
    _, _, _, scale = parts[0]
    experts = max(place.experts, *(len(a) for _, a, _, _ in parts))
    rank = sum(a.shape[1] for _, a, _, _ in parts)
    joint_a = torch.cat([a.expand(experts, -1, -1) for _, a, _, _ in parts], 1)
    joint_b = torch.zeros(experts, place.rows, rank)
    column = 0
    for row, a, b, part_scale in parts:
        part_rank = a.shape[1]
        factor = place.factor * part_scale / scale
        joint_b[:, row : row + b.shape[1], column : column + part_rank] = b * factor
        column += part_rank

    # the order of rows in the HF module
    magnitude = _magnitude(place, sources)
    if place.order is not None:
        to_hf_order, _ = place.order
        joint_b = torch.stack([to_hf_order(expert_b) for expert_b in joint_b])
        magnitude = None if magnitude is None else to_hf_order(magnitude)
    return joint_a, joint_b, scale, magnitude


def _magnitude(
    place: PeftModule, sources: Sequence[tuple[RowRange, AdaptedMatrix]]
) -> Tensor | None:
    """Return DoRA's magnitude of a module, (rows,); None without DoRA.

    Raises:
        UserError: rows of the module have no adapter.
    """
    if all(matrix.magnitude is None for _, matrix in sources):
        return None
    magnitude, n_filled = torch.zeros(place.rows), 0
    for source, matrix in sources:
        assert matrix.magnitude is not None
        part_start = 0  # of the part in the magnitude of the adapted rows
        for begin, end in matrix.lora.parts:
            low, high = max(begin, source.begin), min(end, source.end)
            if low < high:
                row = source.at + low - source.begin
                values = matrix.magnitude[part_start + low - begin : part_start + high - begin]
                magnitude[row : row + high - low] = values
                n_filled += high - low
            part_start += end - begin
    if n_filled != place.rows:
        raise UserError(
            f"architecture: {place.module} has rows without an adapter, and DoRA needs all; leave"
            " architecture out"
        )
    return magnitude

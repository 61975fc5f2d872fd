"""An adapter on a model of transformers' class: what `adapter.py` does there, by peft."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import open_to_all, write_json
from llmfoundry.hf.peft.modules import CONFIG, WEIGHTS, read_config
from llmfoundry.hf.peft.patterns import check_patterns
from llmfoundry.hf.transformers_models.adapters import (
    add_peft,
    import_peft,
    init_peft,
    peft_config,
    peft_name,
    values_from_peft,
)
from llmfoundry.models.adapters.adapt import fill_adapter_from, is_added
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe
from llmfoundry.terminal import columns


def add_to_class(
    model: Any,
    recipe: FinetuneRecipe,
    folder: Path | None,
    *,
    dtype: torch.dtype,
    note: Callable[[str], None],
) -> None:
    """Add the recipe's adapter, or that of a folder, to a class on the meta device."""
    if folder is None:
        config = peft_config(model, recipe.adapter)
    else:
        config = _read_lora_config(folder, model)
    add_peft(model, config, dtype=dtype)
    model.peft_config = config
    for line in class_table(model):
        note(line)


def _read_lora_config(folder: Path, model: Any) -> Any:
    LoraConfig = import_peft().LoraConfig
    read = read_config(folder)
    if read.get("peft_type") != "LORA":
        raise UserError(f"{folder}: peft_type {read.get('peft_type')}; write a LORA folder")
    if read.get("layer_replication"):
        raise UserError(f"{folder}: layer_replication changes the base model; remove it")
    names = [name for name, _ in model.hf.named_modules()]
    check_patterns(read, names, file=str(folder / CONFIG))
    known = LoraConfig.__dataclass_fields__
    try:
        config = LoraConfig(**{k: v for k, v in read.items() if k in known and k != "peft_type"})
    except Exception as error:  # whatever peft's checks raise
        raise UserError(f"{folder / CONFIG}: peft refuses it: {one_line(error)}") from error
    config.inference_mode = False
    return config


def begin_in_class(model: nn.Module, recipe: FinetuneRecipe, folder: Path | None) -> None:
    """Fill the adapter, anew or from a folder."""
    init_peft(model, recipe.seed, recipe.adapter.init_lora_weights or "default")
    if folder is not None:
        from safetensors.torch import load_file

        fill_adapter_from(model, values_from_peft(model, load_file(folder / WEIGHTS)))


def write_class_adapter(
    folder: Path, config: Any, tensors: Mapping[str, Tensor], base: str | None
) -> None:
    """Peft's folder of what was trained."""
    from safetensors.torch import save_file

    named = {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_all(folder / WEIGHTS)
    values = config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    plain = json.loads(json.dumps(values, default=_plain))
    write_json(folder / CONFIG, plain)


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)


def class_table(model: nn.Module) -> list[str]:
    """Lines for the user: each kind of wrapped layer, how many, and parameters."""
    kinds: dict[str, tuple[set[str], int]] = {}
    for name, parameter in model.named_parameters():
        if not is_added(name):
            continue
        layer = name.partition(".lora_")[0]
        kind = re.sub(r"^.*?\.\d+\.", "", layer)
        layers, size = kinds.get(kind, (set(), 0))
        kinds[kind] = (layers | {layer}, size + parameter.numel())
    rows = [(kind, f"{len(layers):,}", f"{size:,}") for kind, (layers, size) in kinds.items()]
    lines = columns(("adapter on", "layers", "parameters"), rows)
    total = sum(p.numel() for p in model.parameters())
    mine = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [*lines, f"trained: {mine:,} of {total:,} parameters ({100 * mine / total:.2g} %)"]

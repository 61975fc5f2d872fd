"""Adapters on a model of transformers' class, made by peft (extra: peft).

`builders/adapter.py` uses it in place of `models/adapter_targets.py` and
`models.adapter.add_adapter`. peft wraps layers of the class. The parameters of a wrapped layer get
the name `….base_layer.weight`; `plain_name` restores the original name for files. Experts that a
class stacks in one parameter use peft's `target_parameters`, which computes W + B A of all experts
in every forward pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError, import_optional, one_line
from llmfoundry.files import open_to_all, write_json
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.peft.names import (
    CONFIG,
    OWN_TYPE,
    TOKEN_ROWS,
    WEIGHTS,
    check_patterns,
    read_config,
    token_tables,
)
from llmfoundry.hf.peft.read import check_start
from llmfoundry.hf.token_rows import add_token_rows, merge_token_rows, row_layers
from llmfoundry.models.adapter import fill_adapter_from, is_added, set_token_rows
from llmfoundry.models.adapter_targets import select
from llmfoundry.models.init import Distribution, sample
from llmfoundry.models.low_rank import A, B
from llmfoundry.ops.shard_layout import assign, full_rows, full_tensor
from llmfoundry.recipe.adapter import ALL_LINEAR, ResolvedAdapterConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.terminal import columns

_KEY, _NAME = "adapter.target_modules", "default"


@dataclass(frozen=True)
class HFTargets:
    """Names of the layers, routers and stacked experts of a class that can have an adapter."""

    linear: list[str]
    routers: list[str]
    stacks: list[str]


def find_hf_targets(model: HFCausalLM) -> HFTargets:
    """Return the possible targets in the order of the class, without embedding and head."""
    from transformers.pytorch_utils import Conv1D

    experts = _expert_count(model)
    targets = HFTargets([], [], [])
    inside = {id(m) for block in model.blocks for m in block.modules()}
    for name, module in model.hf.named_modules():
        if id(module) not in inside:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            outputs = module.weight.shape[1 if isinstance(module, Conv1D) else 0]
            is_router = outputs == 1 or (outputs == experts and experts > 1)  # or a gate
            (targets.routers if is_router else targets.linear).append(name)
            continue
        for parameter, value in module.named_parameters(recurse=False):
            if value.ndim == 3:
                targets.stacks.append(f"{name}.{parameter}")
    return targets


def _expert_count(model: HFCausalLM) -> int:
    """Return the number of experts; 0 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    counts = (getattr(model.hf.config, name, None) for name in names)
    return next((n for n in counts if isinstance(n, int)), 0)


def peft_config(model: HFCausalLM, config: ResolvedAdapterConfig) -> Any:
    """Return peft's configuration for the adapter of a resolved recipe.

    Raises:
        UserError: peft is not installed, a name matches nothing, or peft does not support the
            adapter.
    """
    # all layers that may be adapted, and those that the recipe selects
    peft = import_peft()
    targets = find_hf_targets(model)
    every = [*targets.linear, *targets.routers, *targets.stacks]
    if config.target_modules == ALL_LINEAR:
        routers = targets.routers if config.train_router else []
        selected = [*targets.linear, *routers, *targets.stacks]
    else:
        patterns = config.target_modules or []
        selected = select([patterns] if isinstance(patterns, str) else patterns, every, _KEY)
    excluded = set(select(config.exclude_modules, every, "adapter.exclude_modules"))
    selected = [name for name in selected if name not in excluded]
    if not selected:
        raise UserError(f"{_KEY}: exclude_modules leaves nothing of it; remove some of its names")

    # stacked experts are parameters for peft, all other layers are modules
    stacks = [name for name in selected if name in targets.stacks]
    modules = [name for name in selected if name not in stacks]
    _check(model, config, modules, stacks)
    return peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # peft declares an int, but accepts a float
        lora_dropout=config.lora_dropout or 0.0,
        target_modules=modules,
        target_parameters=stacks or None,
        use_rslora=bool(config.use_rslora),
        use_dora=bool(config.use_dora),
        task_type="CAUSAL_LM",
    )


def import_peft() -> Any:
    """Import peft; raise a UserError if it is not installed."""
    where = "adapter.name: on a model of transformers' class it"
    return import_optional("peft", where, extra="peft")


def _check(
    model: HFCausalLM, config: ResolvedAdapterConfig, layers: Sequence[str], stacks: Sequence[str]
) -> None:
    """Raise a UserError for settings that peft rejects with a traceback or computes differently."""
    if config.init_lora_weights == "pissa":
        raise UserError(
            "adapter.init_lora_weights: pissa changes the base's weights in peft, before they are"
            " there; write default, or gaussian"
        )
    if config.modules_to_save:
        raise UserError("adapter.modules_to_save: is the decoder's alone; remove it")
    if stacks and (config.use_dora or config.lora_dropout):
        key = "use_dora" if config.use_dora else "lora_dropout"
        raise UserError(
            f"adapter.{key}: peft has none on stacked experts ({stacks[0]}); leave it out, or the"
            " experts by adapter.exclude_modules: [experts]"
        )
    if stacks and config.experts == "shared":
        raise UserError("adapter.experts: peft has independent alone; write that")
    for name in layers:
        smallest = min(model.hf.get_submodule(name).weight.shape)
        if config.r > smallest:
            raise UserError(
                f"adapter.r: {config.r} is more than {name} has rows or columns ({smallest}); write"
                f" {smallest} or less"
            )


def add_peft(model: HFCausalLM, config: Any, *, dtype: torch.dtype) -> None:
    """Let peft wrap the layers of a class on the meta device, and freeze everything else.

    Args:
        model: model without adapters.
        config: configuration from `peft_config` or from a folder.
        dtype: dtype of the new parameters.

    Raises:
        UserError: peft rejects the configuration.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model.hf, adapter_name=_NAME)
    except Exception as error:
        raise UserError(f"adapter: peft refuses it: {one_line(error)}") from error
    for module in peft_layers(model):
        for name in (*module.adapter_layer_names, "lora_magnitude_vector"):
            container = getattr(module, name, None)
            if isinstance(container, nn.ModuleDict | nn.ParameterDict) and _NAME in container:
                container.to(dtype)
                container.requires_grad_(True)


def peft_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the layers in which peft wraps other layers."""
    for module in model.modules():
        if hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names"):
            yield module


@torch.no_grad()
def init_peft(model: nn.Module, seed: int, init: str) -> None:
    """Initialize the adapters in the same way as `init_adapter`; the base has its weights."""
    for name, module in model.named_modules():
        if not (hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")):
            continue
        a, b = module.lora_A[_NAME].weight, module.lora_B[_NAME].weight
        std = 1 / module.r[_NAME] if init == "gaussian" else (3 * a.shape[1]) ** -0.5
        sample(a, Distribution(std, uniform=init != "gaussian"), seed, f"{name}.lora_A")
        assign(b, torch.zeros(b.shape, device=b.device))
        if module.use_dora.get(_NAME):
            weight = full_tensor(module.get_base_layer().weight)
            dim = 0 if module.fan_in_fan_out else 1
            norm = torch.linalg.vector_norm(weight.float(), dim=dim)
            magnitude = module.lora_magnitude_vector[_NAME].weight
            assign(magnitude, norm.view(magnitude.shape))


def peft_name(name: str) -> str:
    """Return the name of one of our parameters in peft's file."""
    # without our prefix and the name of the adapter
    name = name.removeprefix("hf.").replace(f".{_NAME}.", ".").removesuffix(f".{_NAME}")
    name = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    return f"base_model.model.{name}"


def merge_peft(model: HFCausalLM) -> None:
    """Merge the adapters into the weights of the class, and remove peft's layers."""
    merge_token_rows(model.hf)
    for name, module in [*model.hf.named_modules()][::-1]:
        if hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names"):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.hf.get_submodule(parent), last, module.base_layer)


def merge_folder(hf: Any, folder: Path) -> Any:
    """Return a class with the adapter of an untrusted folder merged, by peft itself.

    Raises:
        UserError: peft cannot load it, or a tensor of it or of the class is left over.
    """
    from peft import PeftModel

    config = read_config(folder)
    _check_layers_kept(folder, config)
    names = [name for name, _ in hf.named_modules()]
    check_patterns(config, names, file=str(folder / CONFIG))
    if not config.get("ensure_weight_tying"):
        _untie_head(hf)
    try:
        adapted = PeftModel.from_pretrained(hf, str(folder))
        result = adapted.load_adapter(str(folder), _NAME)  # once more: the first reports no names
        left = [*result.unexpected_keys, *result.missing_keys]
        merged = adapted.merge_and_unload().eval()
    except Exception as error:  # peft raises many unrelated types
        raise UserError(f"{folder}: peft cannot load it: {one_line(error)}") from error
    if left:
        raise UserError(
            f"{folder}: was made for another base model: {left[0]} is in one of adapter and model"
            " alone; name the right base"
        )
    return merged


def _check_layers_kept(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise a UserError for an adapter that repeats layers of the base model."""
    if config.get("layer_replication"):
        raise UserError(f"{folder}: layer_replication changes the base model; remove it")


def _untie_head(hf: Any) -> None:
    """Untie the head from the embedding, because an adapter changes only one of them."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        hf.config.tie_word_embeddings = False


def values_from_peft(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of our parameters from the tensors of a file.

    Raises:
        UserError: names or shapes do not match.
    """
    of_rows = {name for name, _ in row_layers(model)}
    ours = {
        peft_name(name): (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name.rpartition(".")[0] not in of_rows
    }
    different = sorted(ours.keys() ^ tensors.keys())
    if different:
        raise UserError(f"adapter: {different[0]} is in one of adapter and model alone")
    for name, tensor in tensors.items():
        if ours[name][1].shape != tensor.shape:
            raise UserError(
                f"adapter: {name} is {tuple(tensor.shape)}, and would be"
                f" {tuple(ours[name][1].shape)} here; it was made for another base model"
            )
    return {ours[name][0]: tensor for name, tensor in tensors.items()}


def add_to_class(
    model: Any,
    recipe: ResolvedFinetuneRecipe,
    folder: Path | None,
    *,
    dtype: torch.dtype,
    note: Callable[[str], None],
) -> None:
    """Add the recipe's adapter, or that of a folder, to a class on the meta device."""
    if folder is None:
        config, tokens = peft_config(model, recipe.adapter), recipe.adapter.trainable_token_indices
    else:
        config = _read_lora_config(folder, model)
        tokens = _read_tokens(config, model, folder)
    config.trainable_token_indices = None  # `token_rows.py` has the rows, with peft's semantics
    add_peft(model, config, dtype=dtype)
    if tokens:
        ids = [0] if isinstance(tokens, str) else tokens  # a sketch, whose tokens are not known yet
        _check_tokens(model, ids)
        add_token_rows(model.hf, ids, dtype)
    model.peft_config = config
    for line in class_table(model):
        note(line)


def _check_tokens(model: Any, ids: Sequence[int]) -> None:
    """Raise a UserError for a token that the model has no row for."""
    rows = len(model.embedding_weight)
    if max(ids) >= rows:
        raise UserError(
            f"adapter.trainable_token_indices: {max(ids)}, but the model has {rows} rows"
        )


def _read_tokens(config: Any, model: Any, folder: Path) -> list[int]:
    """Return the tokens whose rows an adapter folder trains, in embedding and head.

    Raises:
        UserError: the two have different tokens, or one has none.
    """
    settings = {"trainable_token_indices": config.trainable_token_indices}
    written = token_tables(folder, settings)
    tied = model.hf.get_output_embeddings().weight is model.embedding_weight
    ids = [*written.values()]
    if ids and (len(ids) < (1 if tied else 2) or any(other != ids[0] for other in ids)):
        raise UserError(
            f"{folder / CONFIG}: trainable_token_indices differ for embedding and head, and a model"
            " of transformers' class trains the same rows of both; merge the adapter by peft's"
            " merge_and_unload()"
        )
    return ids[0] if ids else []


def _read_lora_config(folder: Path, model: Any) -> Any:
    """Return peft's configuration of an adapter folder, for further training.

    Raises:
        UserError: the folder is not a LoRA folder, or peft rejects it.
    """
    LoraConfig = import_peft().LoraConfig
    read = read_config(folder)
    if read.get("peft_type") not in ("LORA", OWN_TYPE):
        raise UserError(f"{folder}: peft_type {read.get('peft_type')}; write a LORA folder")
    _check_layers_kept(folder, read)
    check_start(folder, read)
    names = [name for name, _ in model.hf.named_modules()]
    check_patterns(read, names, file=str(folder / CONFIG))
    known = LoraConfig.__dataclass_fields__
    try:
        config = LoraConfig(**{k: v for k, v in read.items() if k in known and k != "peft_type"})
    except Exception as error:  # peft's checks raise many types
        raise UserError(f"{folder / CONFIG}: peft refuses it: {one_line(error)}") from error
    config.inference_mode = False
    return config


def begin_in_class(model: nn.Module, recipe: ResolvedFinetuneRecipe, folder: Path | None) -> None:
    """Initialize the adapter, or read it from a folder."""
    init_peft(model, recipe.seed, recipe.adapter.init_lora_weights or "default")
    for _, layer in row_layers(model):
        set_token_rows(layer, full_rows(layer.weight, layer.lora.tokens))
    if folder is not None:
        from safetensors.torch import load_file

        tensors = load_file(folder / WEIGHTS)
        for layer, rows in _take_rows(model, tensors):
            set_token_rows(layer, rows)
        fill_adapter_from(model, values_from_peft(model, tensors))


def _take_rows(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
    """Remove the rows of tokens from a file's tensors; yield the layer and the rows of each.

    Raises:
        UserError: the file lacks some, or they do not fit the layer.
    """
    for name, layer in row_layers(model):
        key = f"{peft_name(name)}.{TOKEN_ROWS}"
        rows, shape = tensors.pop(key, None), (len(layer.lora.tokens), layer.weight.shape[1])
        if rows is None or rows.shape != shape:
            there = "is missing" if rows is None else f"is {tuple(rows.shape)}"
            raise UserError(
                f"adapter: {key} {there}, and would be {shape} here; it was made for another base"
                " model"
            )
        yield layer, rows


def write_class_adapter(
    folder: Path,
    model: HFCausalLM,
    tensors: Mapping[str, Tensor],
    base: str | None,
    base_rows: Mapping[str, Tensor],
    *,
    is_resized: bool,
) -> None:
    """Write the trained adapter as a peft folder.

    Args:
        folder: existing folder.
        model: model with the adapter.
        tensors: values of its parameters by name.
        base: name of the base model in adapter_config.json.
        base_rows: result of `base_token_rows`.
        is_resized: the base model has fewer embedding rows. peft must reject such a folder.
    """
    from safetensors.torch import save_file

    # rows of tokens: those of the base with their change
    named, tokens = {}, {}
    for name, layer in row_layers(model):
        is_embedding = isinstance(layer, nn.Embedding)
        change = tensors[f"{name}.{B}"].T if is_embedding else tensors[f"{name}.{A}"]
        rows = (base_rows[name] + change.float()).contiguous()
        named[f"{peft_name(name)}.{TOKEN_ROWS}"] = rows
        tokens[name] = [*layer.lora.tokens]

    # everything else
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in tokens:
            named[peft_name(name)] = tensor.contiguous()
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_all(folder / WEIGHTS)
    config: Any = model.peft_config
    values = config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    in_class = {name.removeprefix("hf."): ids for name, ids in tokens.items()}
    values["trainable_token_indices"] = in_class or None
    if is_resized:
        values["peft_type"] = OWN_TYPE
    plain = json.loads(json.dumps(values, default=_plain))
    write_json(folder / CONFIG, plain)


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)


def class_table(model: nn.Module) -> list[str]:
    """Return lines for the user: number and parameters of each kind of wrapped layer."""
    kinds: dict[str, tuple[set[str], int]] = {}
    for name, parameter in model.named_parameters():
        if not is_added(name):
            continue
        layer = name.partition(".lora_")[0]
        kind = re.sub(r"^.*?\.\d+\.", "", layer)  # the name within a block, without its number
        layers, size = kinds.get(kind, (set(), 0))
        kinds[kind] = (layers | {layer}, size + parameter.numel())
    rows = [(kind, f"{len(layers):,}", f"{size:,}") for kind, (layers, size) in kinds.items()]
    lines = columns(("adapter on", "layers", "parameters"), rows)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    percentage = 100 * trained / total
    return [*lines, f"trained: {trained:,} of {total:,} parameters ({percentage:.2g} %)"]

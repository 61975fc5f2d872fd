"""Tuned prompts and prefixes as peft's folders: one tensor, and what it is.

Unlike `write.py`'s, such a folder knows no layer's name: a prompt is the same for the decoder and
for the class of transformers that `convert.py to=hf` makes of it.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.hf.peft.modules import CONFIG, WEIGHTS, read_config
from llmfoundry.models.virtual_tokens import NAME, VirtualTokens
from llmfoundry.recipe.architecture.adapter import PREFIX_TUNING, VIRTUAL
from llmfoundry.recipe.architecture.model import ModelConfig

TYPES = {name: name.upper() for name in VIRTUAL}
"""peft's own names of the recipe's."""


def write_virtual(
    folder: Path, config: ModelConfig, tokens: VirtualTokens, values: Tensor, base: str | None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    Args:
        folder: exists.
        config: the base's, filled.
        tokens: what `values` are.
        values: the model's `prompt_embeddings`, whole.
        base: what adapter_config.json names as the base model.
    """
    from safetensors.torch import save_file

    heads, width, more = config.n_heads, config.d_model, {"prompt_tuning_init": "RANDOM"}
    if tokens.kind == PREFIX_TUNING:
        assert config.attn_config.kv_n_heads and config.head_dim, "the recipe was not filled"
        heads = config.attn_config.kv_n_heads
        width = heads * config.head_dim
        more = {"prefix_projection": False, "encoder_hidden_size": width}  # type: ignore[dict-item]
    settings = {
        "peft_type": TYPES[tokens.kind],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "num_virtual_tokens": tokens.count,
        "num_transformer_submodules": 1,
        "num_layers": config.n_layers,
        "num_attention_heads": heads,
        "token_dim": width,
        **more,
    }
    save_file({NAME: values.contiguous()}, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, settings)


def read_virtual(folder: Path, name: str) -> Tensor:
    """The tensor of a folder of the recipe's adapter `name`.

    Raises:
        UserError: the folder is not such a one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found = read_config(folder).get("peft_type")
    if found != TYPES[name]:
        known = {kind: own for own, kind in TYPES.items()} | {"LORA": "lora"}
        instead = f"adapter.name: {known[found]}" if found in known else "another folder"
        raise UserError(f"{folder}: peft_type {found}, but adapter.name is {name}; write {instead}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read: {error}") from error
    if tensors.keys() != {NAME} or tensors[NAME].ndim != 2:
        raise UserError(
            f"{folder / WEIGHTS}: is not a tuned prompt or prefix; write another folder"
        )
    return tensors[NAME]

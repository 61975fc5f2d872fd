"""A Hugging Face folder to begin with: who holds its model, and which of its keys are overridden.

The decoder holds what it expresses exactly; a class of transformers the rest, and what the recipe
wants it to. `pretrained.py` calls `open_folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.builders.weights.fill import fill_model, with_new_rows
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.launch import ALONE, World, on_rank0
from llmfoundry.errors import UserError
from llmfoundry.hf.config.settings import OWN_TYPE, check_layers
from llmfoundry.hf.read import UNTIED, open_hf
from llmfoundry.hf.read_weights import read_json
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.architecture.hf_model import HF_CAUSAL_LM
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.architecture.pretrained import PretrainedConfig
from llmfoundry.recipe.values.checks import nearest


@dataclass(frozen=True)
class Pretrained:
    """A model to begin with.

    Attributes:
        config: its shape, filled.
        tokenizer: its own.
        fill: writes its weights into a model of that shape, whole or in shards; every process
            calls it.
        summary: a line for the user: what it is, and how it is held.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    fill: Callable[[Decoder], None]
    summary: str


def open_folder(
    folder: Path, asked: PretrainedConfig, note: Callable[[str], None], world: World = ALONE
) -> Pretrained:
    """A Hugging Face folder, held by the decoder where it expresses the model, else by its class.

    Every process calls it; rank 0 reads all but the weights.

    Raises:
        UserError: neither can hold it; or the one that was asked for cannot.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise UserError(
            f"model.pretrained: {folder} is an adapter; write it as adapter.pretrained, and the"
            " model that it was made for as model.pretrained"
        )
    written = on_rank0(world, lambda: read_json(folder / "config.json"))
    if not isinstance(written, dict):
        raise UserError(
            f"{folder / 'config.json'}: is not a model's; write a folder that holds one"
        )
    code = _trusted_code(folder, written, asked, note)
    for key, value in asked.config_overrides.items():
        _override_hf(written, key, value, code)
    check_layers(written)
    tokenizer = on_rank0(world, lambda: Tokenizer.load(folder))
    reason = "model.name asks for it"
    if asked.name != HF_CAUSAL_LM and code is None:
        try:
            return _by_decoder(folder, written, tokenizer, note, world)
        except UserError as error:
            if asked.name != "auto":
                raise
            reason = error.problems[0].partition(" (can be:")[0]
    return _by_class(folder, written, asked, code, tokenizer, reason, note, world)


def _by_decoder(
    folder: Path,
    written: dict[str, Any],
    tokenizer: Tokenizer,
    note: Callable[[str], None],
    world: World,
) -> Pretrained:
    def read() -> tuple[ModelConfig, str]:
        with open_hf(folder, written=written, note=note) as opened:  # reads all but the weights
            return opened.config, opened.architecture

    config, name = on_rank0(world, read)

    def fill(model: Decoder) -> None:
        with open_hf(folder, written=written, note=lambda _: None) as again:
            fill_model(model, with_new_rows(model, again.tensors(), model.vocabulary()))

    return Pretrained(config, tokenizer, fill, f"{folder}, {name} held by the decoder")


def _by_class(
    folder: Path,
    written: dict[str, Any],
    asked: PretrainedConfig,
    code: str | None,
    tokenizer: Tokenizer,
    reason: str,
    note: Callable[[str], None],
    world: World,
) -> Pretrained:
    from llmfoundry.builders.weights.hf_model import check_class, class_config, fill_class

    if asked.quantize != "none":
        raise UserError(
            f"model.quantize: {asked.quantize} is the decoder's, which cannot hold this model"
            f" ({reason}); write none"
        )
    if written.get("quantization_config") is not None:
        raise UserError("config.json: quantization_config; write a folder that is not quantised")
    config = class_config(written, attn_impl=asked.attn_impl, code=code)
    if on_rank0(world, lambda: check_class(config, folder)):
        note(UNTIED.format(embedding="the embedding"))
        untied = {**written, "tie_word_embeddings": False}
        config = class_config(untied, attn_impl=asked.attn_impl, code=code)

    def fill(model: Decoder) -> None:
        fill_class(model, folder)

    named = written.get("architectures")
    kind = named[0] if isinstance(named, list) and named else written.get("model_type")
    summary = f"{folder}, {kind} held by transformers' class ({reason})"
    return Pretrained(config, tokenizer, fill, summary)


def _trusted_code(
    folder: Path, written: dict[str, Any], asked: PretrainedConfig, note: Callable[[str], None]
) -> str | None:
    """The folder, where its own code is to make the class; None: transformers and we have it.

    Raises:
        UserError: there is only the folder's own code, and it is not trusted.
    """
    if "auto_map" not in written:
        if asked.trust_remote_code:
            raise UserError(
                f"model.trust_remote_code: has no effect, as {folder} brings no code; remove it"
            )
        return None
    if asked.trust_remote_code:
        return str(folder)
    if not _is_known(written):
        raise UserError(
            f"model.trust_remote_code: {folder} is a model of its own Python code (auto_map), which"
            " is not run; write true if you trust it"
        )
    note(f"{folder}: the Python code that it brings (auto_map) is not run")
    return None


def _is_known(written: Mapping[str, Any]) -> bool:
    """Whether transformers has a class for it, or the decoder reads it."""
    from transformers import CONFIG_MAPPING

    return written.get("model_type") in CONFIG_MAPPING


def _override_hf(written: dict[str, Any], key: str, value: Any, code: str | None) -> None:
    """Change a key of config.json in place; sections are merged, not replaced.

    Raises:
        UserError: neither config.json nor transformers' configuration has such a key.
    """
    from llmfoundry.hf.transformers_models.build import read_hf_config

    parts = key.split(".")
    if len(parts) > 1:
        return _override_hf(written, parts[0], _nested(parts[1:], value), code)
    known = dict(written)
    if written.get("model_type") != OWN_TYPE:
        known = {**read_hf_config(dict(written), code=code).to_dict(), **written}
    _merge(written, known, {key: value}, "model.config_overrides.")


def _nested(parts: list[str], value: Any) -> dict[str, Any]:
    return {parts[0]: value if len(parts) == 1 else _nested(parts[1:], value)}


def _merge(into: dict[str, Any], known: Mapping[str, Any], new: dict[str, Any], at: str) -> None:
    """Write `new` into `into`, section by section; `known` are the keys that there may be."""
    for key, value in new.items():
        if key not in known:
            raise UserError(
                f"{at}{key}: the model's config.json has no such key{nearest(key, known)}"
            )
        if isinstance(value, dict) and isinstance(known[key], dict) and known[key]:
            section = into.get(key) or dict(known[key])
            into[key] = dict(section)
            _merge(into[key], {**known[key], **section}, value, f"{at}{key}.")
        else:
            into[key] = value

"""Makes a class of transformers: its configuration, and itself without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from llmfoundry.errors import UserError, one_line
from llmfoundry.recipe.architecture.hf_model import HFModelConfig


def read_hf_config(values: dict[str, Any], *, code: str | None = None) -> Any:
    """Transformers' configuration of config.json's values.

    Raises:
        UserError: transformers does not know the class, or refuses a value.
    """
    from transformers import AutoConfig

    kind = values.get("model_type")
    try:
        if code is not None:
            config = AutoConfig.from_pretrained(code, trust_remote_code=True)
            return type(config).from_dict({**config.to_dict(), **values})
        plain = {key: value for key, value in values.items() if key != "auto_map"}
        return AutoConfig.for_model(**{"model_type": kind, **plain})
    except Exception as error:
        raise UserError(
            f"config.json: transformers cannot read it (model_type {kind!r}): {one_line(error)}"
        ) from error


def build_class(config: HFModelConfig) -> Any:
    """The class, parameters on the meta device, buffers with their values.

    Raises:
        UserError: transformers has no causal language model of this kind.
    """
    from transformers import AutoModelForCausalLM

    hf_config = read_hf_config(config.hf_config, code=config.code)
    try:
        with _parameters_on_meta():
            return AutoModelForCausalLM.from_config(
                hf_config,
                attn_implementation=config.hf_attn_impl,
                dtype=torch.float32,
                trust_remote_code=config.code is not None,
            )
    except Exception as error:
        raise UserError(
            f"model.pretrained: transformers cannot build {config.hf_config.get('model_type')!r} as"
            f" a causal language model (model.attn_impl {config.hf_attn_impl}): {one_line(error)}"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as modules register them; buffers are computed and keep it."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

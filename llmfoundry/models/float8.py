"""Matrix products in 8-bit floating point (fp8), by torchao: `precision: amp_fp8`.

`builders/trainer.py` calls `use_float8` on the meta device, before the model is spread over
processes. A dense linear layer of a block then casts its input, its weight and the gradient of its
output to fp8 with scales of their own, in each product anew (torchao's Float8Linear); weights,
gradients and all else are as under amp_bf16. Embedding, head, routers and experts stay bf16: the
first three by torchao's and torchtitan's practice, experts as no library trains them so yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llmfoundry.errors import UserError, import_optional
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.layers import Linear
from llmfoundry.models.moe import MoE

_KEY = "precision: amp_fp8"
_MULTIPLE = 16  # of both sides of a weight: what the hardware's products take
_LEAST_CAPABILITY = (8, 9)  # NVIDIA Ada; Hopper is 9.0


def float8_refusal(device: torch.device) -> str | None:
    """Why a device has no products in fp8, and what to write; None: it has."""
    instead = "write amp_bf16, or fp8_emulate: true to try the numerics, slowly"
    if device.type != "cuda":
        return f"a {device.type.upper()} has no products in fp8; {instead}"
    if torch.version.hip is not None:
        found = torch.cuda.get_device_properties(device).gcnArchName
        return None if found.startswith(("gfx94", "gfx95")) else f"{found} has no fp8; {instead}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= _LEAST_CAPABILITY:
        return None
    name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    return (
        f"{name} (compute capability {version}) has no products in fp8, 8.9 and up have; {instead}"
    )


def use_float8(model: Decoder, recipe: str, *, emulate: bool) -> list[str]:
    """Have the dense linear layers of all blocks compute in fp8; their names.

    Args:
        model: on the meta device, or with weights, which stay the parameters that they are.
        recipe: how scales are chosen: rowwise, tensorwise.
        emulate: compute in fp32 with values rounded to fp8, on any device.

    Raises:
        UserError: a layer's sides are not divisible by 16, or torchao is not installed.
    """
    library = import_optional("torchao.float8", _KEY, extra="lowp", package="torchao")
    names = dict(_dense_layers(model))
    odd = [
        f"{_KEY}: blocks.{name} is {layer.out_features} x {layer.in_features}, and products in fp8"
        f" take multiples of {_MULTIPLE}; write amp_bf16, or other sizes"
        for name, layer in names.items()
        if layer.out_features % _MULTIPLE or layer.in_features % _MULTIPLE
    ]
    if odd:
        raise UserError(odd[0])
    config = library.Float8LinearConfig.from_recipe_name(recipe)
    # any number of tokens: the gradient of a weight is a product over them
    config = replace(config, pad_inner_dim=True, emulate=emulate)

    def is_dense(layer: Any, name: str) -> bool:
        return name in names

    library.convert_to_float8_training(model.blocks, module_filter_fn=is_dense, config=config)
    return [f"blocks.{name}" for name in names]


def _dense_layers(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Linear layers by their names below `blocks`, those of mixtures of experts left out."""
    mixtures = [f"{name}." for name, part in model.blocks.named_modules() if isinstance(part, MoE)]
    for name, part in model.blocks.named_modules():
        if type(part) is Linear and not name.startswith(tuple(mixtures)):
            assert isinstance(part, nn.Linear)
            yield name, part

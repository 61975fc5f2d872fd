"""Matmuls in 8-bit floating point with torchao: `precision: amp_fp8`.

Entry point: `use_float8`, which `builders/trainer.py` calls on the meta device before the model is
sharded. A dense linear layer of a block then casts its input, its weight and the gradient of its
output to fp8 with dynamic scales, for each matmul (torchao's Float8Linear). Stored weights,
gradients and everything else are as under amp_bf16. Embedding, head and routers stay bf16, as in
torchao and torchtitan. Experts stay bf16: torchao 0.18 trains them in fp8 as a prototype, whose
rowwise matmuls (Hopper) cannot be emulated, and so not be tested without such a GPU.
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
_MULTIPLE = 16  # fp8 matmuls need both sides of a weight to be multiples of it
_LEAST_CAPABILITY = (8, 9)  # NVIDIA Ada; Hopper is 9.0


def float8_refusal(device: torch.device) -> str | None:
    """Return why a device cannot compute fp8 matmuls and what to write; None if it can."""
    instead = "write amp_bf16, or fp8_emulate: true to try the numerics, slowly"
    if device.type != "cuda":
        return f"a {device.type.upper()} has no fp8 matmuls; {instead}"
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName
        return None if arch.startswith(("gfx94", "gfx95")) else f"{arch} has no fp8; {instead}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= _LEAST_CAPABILITY:
        return None
    name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    return f"{name} (compute capability {version}) has no fp8 matmuls, 8.9 and up have; {instead}"


def use_float8(model: Decoder, recipe: str, *, emulate: bool) -> list[str]:
    """Convert the dense linear layers of all blocks to fp8; return their names.

    Args:
        model: on any device. Its parameters stay the same objects.
        recipe: granularity of the scales: rowwise or tensorwise.
        emulate: compute in fp32 with values rounded to fp8, on any device.

    Raises:
        UserError: a layer's sides are not divisible by 16, or torchao is not installed.
    """
    library = import_optional("torchao.float8", _KEY, extra="lowp", package="torchao")
    names = dict(_dense_layers(model))
    for name, layer in names.items():
        if layer.out_features % _MULTIPLE or layer.in_features % _MULTIPLE:
            raise UserError(
                f"{_KEY}: blocks.{name} is {layer.out_features} x {layer.in_features}, and fp8"
                f" matmuls take multiples of {_MULTIPLE}; write amp_bf16, or other sizes"
            )
    config = library.Float8LinearConfig.from_recipe_name(recipe)
    # the gradient of a weight is a matmul over tokens, whose number need not be a multiple of 16
    config = replace(config, pad_inner_dim=True, emulate=emulate)

    def is_dense(layer: Any, name: str) -> bool:
        return name in names

    library.convert_to_float8_training(model.blocks, module_filter_fn=is_dense, config=config)
    return [f"blocks.{name}" for name in names]


def _dense_layers(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers outside of MoE layers, with their names below `blocks`."""
    mixtures = [f"{name}." for name, part in model.blocks.named_modules() if isinstance(part, MoE)]
    for name, part in model.blocks.named_modules():
        if type(part) is Linear and not name.startswith(tuple(mixtures)):
            assert isinstance(part, nn.Linear)
            yield name, part

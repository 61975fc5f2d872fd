"""Matmuls in 8-bit floating point: `precision: amp_fp8`.

Entry points: `use_float8` and `use_float8_experts`, which `builders/trainer.py` calls on the meta
device before the model is sharded. A dense linear layer of a block then casts its input, its weight
and the gradient of its output to fp8 with dynamic scales, for each matmul (torchao's
Float8Linear). Experts use the grouped matmuls of `ops/moe/fp8.py`, rowwise or MXFP8. Stored
weights, gradients and everything else are as under amp_bf16. Embedding, head and routers stay bf16,
as in torchao and torchtitan.
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
from llmfoundry.ops.moe import fp8
from llmfoundry.ops.moe.gpu import steps_of

_KEY = "precision: amp_fp8"
_MULTIPLE = 16  # of the sides of a weight
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
        _check_sides(name, layer.out_features, layer.in_features)
    config = library.Float8LinearConfig.from_recipe_name(recipe)
    # the gradient of a weight is a matmul over tokens, whose number need not be a multiple of 16
    config = replace(config, pad_inner_dim=True, emulate=emulate)

    def is_dense(layer: Any, name: str) -> bool:
        return name in names

    library.convert_to_float8_training(model.blocks, module_filter_fn=is_dense, config=config)
    return [f"blocks.{name}" for name in names]


def use_float8_experts(model: Decoder, device: torch.device, *, emulate: bool) -> str | None:
    """Let experts multiply in fp8 on `device`; return why they stay bf16, or None.

    Args:
        model: on any device.
        device: where the model will run.
        emulate: compute in fp32 with values rounded to fp8, on any device.

    Raises:
        UserError: a side of the experts' matrices is not divisible by 16.
    """
    layers = {name: m for name, m in model.blocks.named_modules() if isinstance(m, MoE)}
    for name, layer in layers.items():
        if layer.config.moe_impl != "grouped_mm":
            return f"fp8 is for moe_impl: grouped_mm, not {layer.config.moe_impl}"
        reason = fp8.refusal(device, layer.experts.n, emulate=emulate)
        if reason is not None:
            return reason
        _check_sides(f"{name}.experts", layer.experts.f, layer.experts.d)
    method = fp8.method_of(device, emulate=emulate)
    multiple = fp8.METHODS[method].multiple
    for name, layer in layers.items():
        f, d = layer.experts.f, layer.experts.d
        if f % multiple or d % multiple:
            return f"blocks.{name}.experts is {f} x {d}, and {method} takes multiples of {multiple}"
    reason = fp8.fault(device, steps_of(device)) if method == fp8.MXFP8 else None
    if reason is not None:
        return reason
    for layer in layers.values():
        layer.experts.fp8 = method
    return None


def _check_sides(name: str, rows: int, columns: int) -> None:
    """Raise a UserError unless fp8 matmuls take a weight of these sides."""
    if rows % _MULTIPLE or columns % _MULTIPLE:
        raise UserError(
            f"{_KEY}: blocks.{name} is {rows} x {columns}, and fp8 matmuls take multiples of"
            f" {_MULTIPLE}; write amp_bf16, or other sizes"
        )


def _dense_layers(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers, without routers (a subclass), with their names below `blocks`."""
    for name, part in model.blocks.named_modules():
        if type(part) is Linear:
            assert isinstance(part, nn.Linear)
            yield name, part

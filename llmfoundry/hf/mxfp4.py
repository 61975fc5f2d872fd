"""MXFP4 weights, in which gpt-oss is published, read to bf16 (OCP Microscaling Formats, 1.0).

Entry point: `Mxfp4.of` finds the packed weights of a folder, for `read_folder.py`. A weight W is
stored as W_blocks, two 4-bit floats in a byte, low half first, and W_scales, a power of two for
32 values. Nothing is rounded: bf16 holds every product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmfoundry.errors import UserError

METHOD = "mxfp4"  # quantization_config.quant_method
BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, then the same with a minus sign
BIAS = 127  # of the exponent (E8M0)


@dataclass(frozen=True)
class Mxfp4:
    """The packed weights of a folder.

    Attributes:
        sketches: each weight as it is read, on the meta device: (E, in, out), bf16.
    """

    sketches: dict[str, Tensor]

    @classmethod
    def of(cls, stored: Mapping[str, Tensor]) -> Mxfp4:
        """Return the packed weights among the stored tensors, on the meta device.

        Raises:
            UserError: shapes or dtypes of blocks and scales do not fit together.
        """
        sketches = {}
        for name, blocks in stored.items():
            weight = name.removesuffix(BLOCKS)
            scales = stored.get(weight + SCALES)
            if weight == name or scales is None:
                continue
            if blocks.ndim != 4 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
                raise UserError(
                    f"{name}: is {tuple(blocks.shape)}, with scales {tuple(scales.shape)};"
                    " MXFP4 has (experts, out, groups, 16) and (experts, out, groups)"
                )
            if weight in stored:
                raise UserError(f"{weight}: is stored twice, in full and packed; remove one")
            if {blocks.dtype, scales.dtype} != {torch.uint8}:
                raise UserError(f"{name}: is not in bytes (uint8), as MXFP4 is")
            experts, rows, groups, _ = blocks.shape
            shape = (experts, 32 * groups, rows)
            sketches[weight] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return cls(sketches)

    def parts(self) -> set[str]:
        """Return the names of the stored tensors that the weights are made of."""
        return {weight + part for weight in self.sketches for part in (BLOCKS, SCALES)}

    def get(self, weight: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return a weight (E, in, out), bf16."""
        return dequantize(read(weight + BLOCKS), read(weight + SCALES))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of an MXFP4 tensor, expert by expert.

    Args:
        blocks: (E, out, G, 16) uint8.
        scales: (E, out, G) uint8.

    Returns:
        (E, 32 G, out), bf16.
    """
    experts, rows, groups, _ = blocks.shape
    halves = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([halves[byte % 16], halves[byte // 16]], dim=1)  # (256, 2)
    values = torch.empty(experts, 32 * groups, rows, dtype=torch.bfloat16)
    for one, packed, exponents in zip(values, blocks, scales, strict=True):
        unscaled = pairs[packed.int()].flatten(2)  # (out, G, 32)
        scaled = torch.ldexp(unscaled, exponents[..., None].int() - BIAS)
        one.copy_(scaled.flatten(1).T)
    return values

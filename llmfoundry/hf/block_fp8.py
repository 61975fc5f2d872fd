"""Weights in blocks of FP8, in which DeepSeek-V3 and Qwen3-FP8 are published, read to bf16.

Entry point: `BlockFp8.of` finds the weights of a folder, for `read_folder.py`. A weight W is stored
as W in 8 bits (e4m3) and W_scale_inv, a factor for each block of 128 x 128 values, or one for all.
As in DeepSeek's own conversion, the product is computed in fp32 and rounded to bf16 once. The
last blocks of a dimension may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError

METHOD = "fp8"  # quantization_config.quant_method
FP8, SCALE, INPUT_SCALE = torch.float8_e4m3fn, "_scale_inv", "activation_scale"
_SCALE_DTYPES = (torch.float32, torch.bfloat16)
_KEY = "config.json: quantization_config.weight_block_size"


@dataclass(frozen=True)
class BlockFp8:
    """The FP8 weights of a folder.

    Attributes:
        block: rows and columns of a block; None: one factor for each weight.
        sketches: each weight as it is read, on the meta device: its shape, bf16.
        others: tensors that only FP8 matmuls use: factors of their inputs.
    """

    block: tuple[int, int] | None = None
    sketches: dict[str, Tensor] = field(default_factory=dict)
    others: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stored: Mapping[str, Tensor], config: Mapping[str, Any]) -> BlockFp8:
        """Return the FP8 weights among the stored tensors, on the meta device.

        Args:
            stored: tensors by name.
            config: contents of config.json.

        Raises:
            UserError: factors are missing, or do not fit their weights.
        """
        quantization = config.get("quantization_config")
        if not isinstance(quantization, Mapping) or quantization.get("quant_method") != METHOD:
            _check_complete(stored, {}, has_method=False)
            return cls()
        block = _block(quantization.get("weight_block_size"))
        sketches, others = {}, set()
        for name, scale in stored.items():
            weight = stored.get(name.removesuffix(SCALE))
            if not name.endswith(SCALE) or weight is None:
                continue
            weight_name = name.removesuffix(SCALE)
            _check(weight_name, weight, scale, block)
            sketches[weight_name] = weight.to(torch.bfloat16)
            others.add(f"{weight_name.rpartition('.')[0]}.{INPUT_SCALE}")
        _check_complete(stored, sketches, has_method=True)
        return cls(block, sketches, frozenset(others & stored.keys()))

    def parts(self) -> set[str]:
        """Return the names of the stored tensors that the weights are made of."""
        return {weight + part for weight in self.sketches for part in ("", SCALE)} | self.others

    def get(self, weight: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return a weight, bf16."""
        scale = read(weight + SCALE).clone()  # its file may be another, and is closed
        return dequantize(read(weight), scale, self.block)


def _block(written: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block, as written in config.json."""
    if written is None:
        return None
    is_pair = isinstance(written, list) and len(written) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in written):
        raise UserError(f"{_KEY}: {written!r} is not two sizes; correct it")
    rows, columns = written
    return rows, columns


def _check_complete(
    stored: Mapping[str, Tensor], sketches: Mapping[str, Tensor], *, has_method: bool
) -> None:
    """Raise a UserError for an FP8 weight without factors, whose values would be wrong."""
    lost = sorted(n for n in stored.keys() - sketches.keys() if stored[n].dtype == FP8)
    if lost and has_method:
        raise UserError(
            f"{lost[0]}: is {FP8}, and its factors {lost[0]}{SCALE} are missing; copy or download"
            " its file again"
        )
    if lost:
        raise UserError(
            f"{lost[0]}: is {FP8}, but config.json: quantization_config.quant_method is not"
            f" {METHOD}; copy config.json of the same model"
        )


def _check(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> None:
    """Raise a UserError if a weight and its factors do not fit together."""
    if weight.dtype != FP8 or scale.dtype not in _SCALE_DTYPES:
        raise UserError(
            f"{name}: is {weight.dtype} with factors in {scale.dtype}; {FP8} with torch.float32 is"
            " read"
        )
    expected: tuple[int, ...] = ()
    if block is not None and weight.ndim >= 2:
        *stack, rows, columns = weight.shape
        expected = (*stack, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    is_matrix = weight.ndim >= 2
    fits = is_matrix and scale.shape == expected if block is not None else scale.numel() == 1
    if not fits:
        blocks = "one factor" if block is None else f"factors {expected} of blocks {block}"
        raise UserError(
            f"{name}{SCALE}: is {tuple(scale.shape)}, but a weight {tuple(weight.shape)} has"
            f" {blocks} ({_KEY})"
        )


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return the values of an FP8 weight, a row of blocks at a time.

    Args:
        weight: (…, rows, columns), e4m3.
        scale: (…, ceil(rows / block), ceil(columns / block)); one value without blocks.
        block: rows and columns of a block; None: `scale` is one value.

    Returns:
        (…, rows, columns), bf16.
    """
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    if block is None:
        return values.copy_(weight.float() * scale.float().reshape(()))
    height, width = block
    columns = weight.shape[-1]
    by_column = scale.float().repeat_interleave(min(width, columns), -1)[..., :columns]
    row_blocks = zip(weight.split(height, -2), values.split(height, -2), strict=True)
    for number, (packed, target) in enumerate(row_blocks):
        target.copy_(packed.float() * by_column[..., number : number + 1, :])
    return values

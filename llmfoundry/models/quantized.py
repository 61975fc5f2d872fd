"""Frozen weights of a decoder in bfloat16 or 4 bits (QLoRA), filled one tensor at a time.

`builders/trainer.py` calls `narrow_frozen` and `quantize_frozen` on the meta device, when it is
known which parameters are trained and before FSDP shards them. A quantized weight becomes a uint8
parameter (`ops.nf4`) with the same name. Loaders call `place` for each tensor as it is read, so
that at most one tensor is in memory in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmfoundry.models.adapter import is_added
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.layers import Linear
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.router import Router
from llmfoundry.models.tensor_parallel import stacked_rows
from llmfoundry.ops.nf4 import Nf4Layout, dequantize, quantize
from llmfoundry.ops.shard_layout import block_view, local_blocks, local_ranges
from llmfoundry.recipe.model import ModelConfig, ResolvedModelConfig


def narrow_frozen(model: Decoder, dtype: torch.dtype) -> None:
    """Convert frozen matrices to `dtype`, the dtype of the matmuls; on the meta device.

    Frozen parameters of an adapter (PiSSA), vectors and routers keep their dtype: vectors and
    routers are small and compute in fp32. In a transformers class only the linear layers of blocks
    are converted, as its residual stream has the dtype of the embedding.
    """
    is_decoder = isinstance(model, Decoder)
    modules = model.modules() if is_decoder else model.blocks.modules()
    for module in modules:
        if not is_decoder and type(module) is not nn.Linear:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = parameter.ndim > 1 and not isinstance(module, Router)
            if is_matrix and not is_added(name) and not parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))


def quantize_frozen(model: Decoder, *, double: bool) -> int:
    """Replace every frozen matrix of the blocks by a uint8 parameter; return their number.

    Embeddings, norms, biases, routers and the output head are not quantized.

    Args:
        model: on the meta device, with requires_grad as in training.
        double: quantize the scales, too (double quantization).
    """
    count = 0
    for module in model.blocks.modules():
        names = matrices(module)
        if not names or any(getattr(module, name).requires_grad for name in names):
            continue
        assert isinstance(module, Linear | ExpertWeights)
        copies = module.n if isinstance(module, ExpertWeights) else 1
        for name in names:
            weight = getattr(module, name)
            module.packing = Nf4Layout(weight.numel() // copies, double)
            data = weight.new_empty(copies * module.packing.nbytes, dtype=torch.uint8)
            setattr(module, name, nn.Parameter(data, requires_grad=False))
            count += 1
    return count


def is_quantized(model: nn.Module) -> bool:
    """Return whether any weight is quantized to 4 bits."""
    return any(getattr(module, "packing", None) is not None for module in model.modules())


def matrices(module: nn.Module) -> list[str]:
    """Return the names of a module's quantizable parameters. All or none of them are quantized."""
    if isinstance(module, Linear) and not isinstance(module, Router):
        return ["weight"]
    if isinstance(module, ExpertWeights):
        return [name for name in ExpertWeights.MATRICES if hasattr(module, name)]
    return []


def quantized_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the names of the quantized parameters and their original shapes."""
    for path, module in model.named_modules():
        if isinstance(module, Linear | ExpertWeights) and module.packing is not None:
            for name in matrices(module):
                yield f"{path}.{name}", _shape(module)


def as_held(model: nn.Module) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the names of the frozen matrices of lower precision, and a function that rounds to it.

    The function returns the value that the model computes with when it is given an original one.
    """
    packings = {
        f"{path}.{name}": module.packing
        for path, module in model.named_modules()
        if isinstance(module, Linear | ExpertWeights) and module.packing is not None
        for name in matrices(module)
    }
    for name, parameter in model.named_parameters():
        if name in packings:
            yield name, partial(_quantized_and_dequantized, packings[name])
        elif not parameter.requires_grad and not is_added(name):
            yield name, partial(_rounded, parameter.dtype)


def _quantized_and_dequantized(packing: Nf4Layout, weight: Tensor) -> Tensor:
    """Quantize and dequantize a matrix, or the stacked matrices of experts, in fp32."""
    results = []
    for matrix in weight.split(packing.values // weight.shape[1]):
        data = quantize(matrix, double=packing.double)
        results.append(dequantize(data, matrix.shape, torch.float32, double=packing.double))
    return torch.cat(results)


def _rounded(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype).to(weight.dtype)


def value_count(model: nn.Module) -> int:
    """Return the number of parameters; a quantized weight counts with its original size."""
    sizes = dict(quantized_shapes(model))
    return sum(
        sizes[name][0] * sizes[name][1] if name in sizes else parameter.numel()
        for name, parameter in model.named_parameters()
    )


def quantization(model: nn.Module) -> dict[str, str | bool]:
    """Return the values of `model.quantize` and `model.double_quantize` of a built model."""
    for module in model.modules():
        packing = getattr(module, "packing", None)
        if packing is not None:
            return {"model.quantize": "nf4", "model.double_quantize": packing.double}
    return {"model.quantize": "none"}


def _shape(module: Linear | ExpertWeights) -> tuple[int, int]:
    """Return the original shape of a matrix, or of the stacked matrices of experts."""
    if isinstance(module, ExpertWeights):
        return module.n * module.f, module.d
    return module.out_features, module.in_features


@torch.no_grad()
def place(model: nn.Module, name: str, tensor: Tensor, *, expert: int | None = None) -> None:
    """Fill a parameter, or this rank's shard of it, from its full value.

    The value of a quantized parameter is quantized on the parameter's device, one expert at a time.

    Args:
        model: the model to fill.
        name: name of the parameter.
        tensor: full value, in any floating-point dtype, on any device.
        expert: if given, `tensor` is the matrix (f, d) of this expert only.

    Raises:
        ValueError: a value to quantize is not finite.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = getattr(module, last)
    packing = getattr(module, "packing", None)
    if packing is None or last not in matrices(module):
        copies = module.n if expert is not None and isinstance(module, ExpertWeights) else 1
        config: ResolvedModelConfig | None = getattr(model, "config", None)
        stacked = stacked_rows(name, config) if isinstance(config, ModelConfig) else ()
        _write(parameter, tensor, copies, expert or 0, stacked)
        return
    copies = parameter.numel() // packing.nbytes
    parts = tensor.chunk(copies) if expert is None else [tensor]
    for index, part in enumerate(parts, start=expert or 0):
        if _holds(parameter, index * packing.nbytes, packing.nbytes):
            part = part.to(parameter.device)
            _write(parameter, quantize(part, double=packing.double), copies, index)


def _write(
    parameter: Tensor, value: Tensor, copies: int, index: int, stacked: Sequence[int] = ()
) -> None:
    """Fill one of several equal parts of a parameter's rows, as far as it is in the local shard.

    Args:
        parameter: sharded or not.
        value: full value of the part.
        copies: number of parts.
        index: of the part.
        stacked: as in `ops.shard_layout`.
    """
    height = parameter.shape[0] // copies
    assert value.shape == (height, *parameter.shape[1:]), (value.shape, parameter.shape, copies)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    start, stop = index * height, (index + 1) * height
    for block in local_blocks(parameter, stacked):
        (row, _), *across = block.local
        (begin, end), *columns = block.full
        low, high = max(begin, start), min(end, stop)
        if low < high:
            local_rows = (row + low - begin, row + high - begin)
            target = block_view(local.detach(), [local_rows, *across])
            target.copy_(block_view(value, [(low - start, high - start), *columns]))


def _holds(parameter: Tensor, begin: int, length: int) -> bool:
    return any(low < begin + length and begin < high for low, high in local_ranges(parameter, 0))

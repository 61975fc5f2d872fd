"""Frozen weights of a decoder in fewer bits, and how they get there, one tensor at a time.

`builders/trainer.py` calls `narrow_frozen` and `quantize_frozen` on the meta device, once it is
known what trains and before FSDP cuts parameters into shards. A quantized weight then is a
parameter of bytes (`ops.nf4`), under its own name. Whoever fills weights calls `place` for each
tensor as it is read, so that no more than one is held in full precision.
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
from llmfoundry.recipe.model import ModelConfig


def narrow_frozen(model: Decoder, dtype: torch.dtype) -> None:
    """Make frozen matrices `dtype`, which products compute in anyhow; on the meta device.

    What an adapter keeps beside what it trains stays as exact as that, and so do vectors and
    routers, which are small and compute in fp32. Of a class of transformers linear layers of blocks
    alone: its residual stream takes the embedding's dtype.
    """
    own = isinstance(model, Decoder)
    modules = model.modules() if own else model.blocks.modules()
    for module in modules:
        if not own and type(module) is not nn.Linear:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            narrow = parameter.ndim > 1 and not isinstance(module, Router) and not is_added(name)
            if narrow and not parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))


def quantize_frozen(model: Decoder, *, double: bool) -> int:
    """Make every frozen matrix of the blocks a parameter of bytes; how many there are.

    Embeddings, norms, biases, routers and the output head stay as they are.

    Args:
        model: on the meta device, its parameters frozen or not as they will be trained.
        double: scales are quantized again.
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
    """Whether any weight is kept in 4 bits."""
    return any(getattr(module, "packing", None) is not None for module in model.modules())


def matrices(module: nn.Module) -> list[str]:
    """Names of a module's parameters that may be quantized, which are so together or not at all."""
    if isinstance(module, Linear) and not isinstance(module, Router):
        return ["weight"]
    if isinstance(module, ExpertWeights):
        return [name for name in ExpertWeights.MATRICES if hasattr(module, name)]
    return []


def quantized_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names of the quantized parameters, and the shapes that they had."""
    for path, module in model.named_modules():
        if isinstance(module, Linear | ExpertWeights) and module.packing is not None:
            for name in matrices(module):
                yield f"{path}.{name}", _shape(module)


def as_held(model: nn.Module) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Names of a decoder's frozen matrices in fewer bits, and what those bits make of a value."""
    packings = {
        f"{path}.{name}": module.packing
        for path, module in model.named_modules()
        if isinstance(module, Linear | ExpertWeights) and module.packing is not None
        for name in matrices(module)
    }
    for name, parameter in model.named_parameters():
        if name in packings:
            yield name, partial(_there_and_back, packings[name])
        elif not parameter.requires_grad and not is_added(name):
            yield name, partial(_rounded, parameter.dtype)


def _there_and_back(packing: Nf4Layout, weight: Tensor) -> Tensor:
    """A matrix, or experts' one above the other, quantized and dequantized in fp32."""
    each = weight.split(packing.values // weight.shape[1])
    kept = ((quantize(part, double=packing.double), part.shape) for part in each)
    parts = [dequantize(b, shape, torch.float32, double=packing.double) for b, shape in kept]
    return torch.cat(parts)


def _rounded(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype).to(weight.dtype)


def value_count(model: nn.Module) -> int:
    """Parameters of a model, those of a quantized weight as those that it stands for."""
    sizes = dict(quantized_shapes(model))
    return sum(
        sizes[name][0] * sizes[name][1] if name in sizes else parameter.numel()
        for name, parameter in model.named_parameters()
    )


def quantization(model: nn.Module) -> dict[str, str | bool]:
    """`model.quantize` and `model.double_quantize` as a model shows them."""
    for module in model.modules():
        packing = getattr(module, "packing", None)
        if packing is not None:
            return {"model.quantize": "nf4", "model.double_quantize": packing.double}
    return {"model.quantize": "none"}


def _shape(module: Linear | ExpertWeights) -> tuple[int, int]:
    """Of a matrix that is not quantized, experts' one above the other."""
    if isinstance(module, ExpertWeights):
        return module.n * module.f, module.d
    return module.out_features, module.in_features


@torch.no_grad()
def place(model: nn.Module, name: str, tensor: Tensor, *, expert: int | None = None) -> None:
    """Fill the parameter `name`, whole or this process's shard of it, from its whole value.

    A quantized one is quantized first, experts one by one, on the parameter's device.

    Args:
        model: whose parameter it is.
        name: of the parameter in the model.
        tensor: its value, in any floating-point dtype, on any device.
        expert: `tensor` is the matrix of this expert alone, (f, d).

    Raises:
        ValueError: a value that is to be quantized is not finite.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = getattr(module, last)
    packing = getattr(module, "packing", None)
    if packing is None or last not in matrices(module):
        copies = module.n if expert is not None and isinstance(module, ExpertWeights) else 1
        config = getattr(model, "config", None)
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
    """Fill copy `index` of the equal parts that a parameter's rows are, as far as it is here."""
    height = parameter.shape[0] // copies
    assert value.shape == (height, *parameter.shape[1:]), (value.shape, parameter.shape, copies)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    start, stop = index * height, (index + 1) * height
    for block in local_blocks(parameter, stacked):
        (row, _), *across = block.local
        (begin, end), *columns = block.full
        low, high = max(begin, start), min(end, stop)
        if low < high:
            here = block_view(local.detach(), [(row + low - begin, row + high - begin), *across])
            here.copy_(block_view(value, [(low - start, high - start), *columns]))


def _holds(parameter: Tensor, begin: int, length: int) -> bool:
    return any(low < begin + length and begin < high for low, high in local_ranges(parameter, 0))

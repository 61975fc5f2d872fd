"""How weights start: each parameter's values are a function of (seed, its name), nothing else.

So every rank of every layout starts from the same numbers: a rank that holds a shard draws the
whole tensor and keeps its part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from llmfoundry.recipe.model import InitConfig, ModelConfig

RESIDUAL = ("out_proj.weight", "down_proj.weight")  # projections that write to the residual stream
EMBEDDINGS = ("wte.weight", "wpe.weight")


def kaiming_std(config: InitConfig, fan_in: int) -> float:
    """sqrt(2 / fan_in) (He et al., 2015, for ReLU)."""
    return math.sqrt(2 / fan_in)


def baseline_std(config: InitConfig, fan_in: int) -> float:
    """init_std, whatever the shape."""
    assert config.init_std is not None, "the recipe was not filled"
    return config.init_std


STDS: dict[str, Callable[[InitConfig, int], float]] = {
    "kaiming_normal_": kaiming_std,
    "baseline_": baseline_std,
}


def weight_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    """Standard deviation of the matrix `name` of shape (out, in)."""
    init = config.init_config
    if name.endswith(EMBEDDINGS) and init.emb_init_std is not None:
        return init.emb_init_std
    std = STDS[init.name](init, shape[1])
    if init.init_div_is_residual and name.endswith(RESIDUAL):
        std /= math.sqrt(2 * config.n_layers)
    return std


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place: matrices normal, norm weights 1, biases 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            _fill_normal(parameter, weight_std(name, parameter.shape, config), seed, name)


def _fill_normal(parameter: Tensor, std: float, seed: int, name: str) -> None:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "big"))
    whole = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
    whole.normal_(0.0, std, generator=generator)
    if isinstance(parameter, DTensor):
        # every rank has drawn the same numbers, so nothing needs to be sent
        local = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.copy_(local)
    else:
        parameter.copy_(whole)

"""Weight initialization: the values of a parameter are a function of (seed, its name) only.

Entry point: `init_weights`. Every layout therefore starts from the same weights: a rank with a
shard samples the full tensor and keeps its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmfoundry.models.tensor_parallel import stacked_rows
from llmfoundry.ops.devices import seed_of
from llmfoundry.ops.shard_layout import assign
from llmfoundry.recipe.model import ResolvedInitConfig, ResolvedModelConfig

# projections that write to the residual stream
RESIDUAL = ("out_proj.weight", "down_proj.weight", "experts.w2")
ROUTER = "router.weight"
EMBEDDINGS = ("wte.weight", "wpe.weight")
STACKED_HEADS = ("attn.Wqkv.weight", "attn.Wq.weight")
EXPERTS = ("experts.w1", "experts.v1")  # stacked by expert, each (outputs, inputs)
_ROWS = 4096  # rows of an embedding table that are summed at a time
TRANSPOSED_EXPERTS = ("experts.w2",)  # each (inputs, outputs)


@dataclass(frozen=True)
class Distribution:
    """The distribution of a tensor's elements.

    Attributes:
        std: standard deviation.
        uniform: uniform in mean ± sqrt(3) std; else normal.
        mean: mean.
    """

    std: float
    uniform: bool = False
    mean: float = 0.0


@torch.no_grad()
def init_weights(model: nn.Module, config: ResolvedModelConfig, seed: int) -> None:
    """Initialize every parameter in place.

    Matrices follow the scheme of the recipe, norm weights are 1, biases and sinks 0. Only
    `default_` also samples the biases of linear layers. Buffers (the routers' balancing biases) are
    0.
    """
    for buffer in model.buffers():
        buffer.zero_()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        distribution: Distribution | None = None
        if name.endswith("bias"):
            weight_name = _weight_of_bias(name)
            distribution = _bias_distribution(weight_name, parameters[weight_name], config)
        elif parameter.ndim > 1:
            distribution = weight_distribution(name, parameter, config)
        if distribution is not None:
            sample(parameter, distribution, seed, name, stacked_rows(name, config))
        else:
            parameter.fill_(0.0 if name.endswith(("bias", "sinks.weight")) else 1.0)


def _weight_of_bias(name: str) -> str:
    """Return the name of the weight of a bias: `a.weight` of `a.bias`, `w1` of `w1_bias`."""
    layer = name.removesuffix("bias")
    return layer.removesuffix("_") if layer.endswith("_") else f"{layer}weight"


def _bias_distribution(
    name: str, weight: Tensor, config: ResolvedModelConfig
) -> Distribution | None:
    """Return the distribution of the bias of the weight `name`; None: it is 0."""
    if config.init_config.name != "default_" or weight.ndim == 1:
        return None
    return Distribution(default_std(config, *_fans(name, weight, config)), uniform=True)


def weight_distribution(name: str, weight: Tensor, config: ResolvedModelConfig) -> Distribution:
    """Return the distribution of the matrix `name` (out, in), or of stacked experts."""
    init = config.init_config
    if name.endswith(EMBEDDINGS):
        distribution = _embedding_distribution(init)
        if distribution is not None:
            return distribution
    if name.endswith(ROUTER) and init.router_init_std is not None:
        return Distribution(init.router_init_std)
    std = STDS[init.name](config, *_fans(name, weight, config))
    if name.endswith(RESIDUAL):
        std /= residual_divisor(config)
    return Distribution(std, uniform=init.name in UNIFORM)


def _embedding_distribution(init: ResolvedInitConfig) -> Distribution | None:
    """Return the distribution that the recipe sets for embeddings only; None: it sets none."""
    if init.emb_init_std is not None:
        return Distribution(init.emb_init_std)
    if init.emb_init_uniform_lim is not None:
        limits = init.emb_init_uniform_lim
        low, high = limits if isinstance(limits, list) else (-limits, limits)
        return Distribution((high - low) / math.sqrt(12), uniform=True, mean=(low + high) / 2)
    return Distribution(1.0) if init.name == "default_" else None  # as nn.Embedding


def residual_divisor(config: ResolvedModelConfig) -> float:
    """Return the divisor of the std of projections that write to the residual stream."""
    init = config.init_config
    if init.name == "neox_init_":
        return config.n_layers / math.sqrt(10)
    if init.name == "default_" or not init.init_div_is_residual:
        return 1.0
    if init.init_div_is_residual is True:
        return math.sqrt(2 * config.n_layers)
    return float(init.init_div_is_residual)


def _fans(name: str, weight: Tensor, config: ResolvedModelConfig) -> tuple[int, int]:
    """Return fan-in and fan-out of a matrix: of one expert, and of one head as LLM Foundry does."""
    fan_out, fan_in = weight.shape
    if name.endswith(EXPERTS + TRANSPOSED_EXPERTS):
        width = fan_out // config.ffn_config.moe_num_experts
        return (width, fan_in) if name.endswith(TRANSPOSED_EXPERTS) else (fan_in, width)
    return fan_in, config.head_dim if name.endswith(STACKED_HEADS) else fan_out


def default_std(config: ResolvedModelConfig, fan_in: int, fan_out: int) -> float:
    """Default of nn.Linear: uniform in ± 1 / sqrt(fan_in)."""
    return math.sqrt(1 / (3 * fan_in))


def baseline_std(config: ResolvedModelConfig, fan_in: int, fan_out: int) -> float:
    """init_std, independent of the shape."""
    return config.init_config.init_std


def small_std(config: ResolvedModelConfig, fan_in: int, fan_out: int) -> float:
    """sqrt(2 / (5 d_model)) (Nguyen and Salazar, 2019)."""
    return math.sqrt(2 / (5 * config.d_model))


def kaiming_std(config: ResolvedModelConfig, fan_in: int, fan_out: int) -> float:
    """Gain / sqrt(fan) (He et al., 2015)."""
    init = config.init_config
    gain = nn.init.calculate_gain(init.init_nonlinearity, init.init_gain)  # type: ignore[arg-type]
    return gain / math.sqrt(fan_in if init.fan_mode == "fan_in" else fan_out)


def xavier_std(config: ResolvedModelConfig, fan_in: int, fan_out: int) -> float:
    """Gain * sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    return config.init_config.init_gain * math.sqrt(2 / (fan_in + fan_out))


STDS: dict[str, Callable[[ResolvedModelConfig, int, int], float]] = {
    "default_": default_std,
    "baseline_": baseline_std,
    "small_init_": small_std,
    "neox_init_": small_std,
    "kaiming_normal_": kaiming_std,
    "kaiming_uniform_": kaiming_std,
    "xavier_normal_": xavier_std,
    "xavier_uniform_": xavier_std,
}
UNIFORM = ("default_", "kaiming_uniform_", "xavier_uniform_")


def sample(
    parameter: Tensor,
    distribution: Distribution,
    seed: int,
    name: str,
    stacked: Sequence[int] = (),
) -> None:
    """Sample a parameter, sharded or not, with a generator seeded by `seed` and `name`.

    `stacked` is as in `ops.shard_layout`.
    """
    generator = torch.Generator(parameter.device).manual_seed(seed_of(seed, name))
    # sample in fp32, so that parameters of other dtypes are the rounded fp32 values
    full = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
    if distribution.uniform:
        half_width = math.sqrt(3) * distribution.std
        low, high = distribution.mean - half_width, distribution.mean + half_width
        full.uniform_(low, high, generator=generator)
    else:
        full.normal_(distribution.mean, distribution.std, generator=generator)
    assign(parameter, full, stacked)


def padded_rows(tokens: int) -> int:
    """Return the rows of an embedding that grows for so many tokens: a multiple of 64."""
    return -(-tokens // 64) * 64


@torch.no_grad()
def grown(table: Tensor, rows: int) -> Tensor:
    """Extend a table (V, ...) to `rows` rows. New rows are the mean of the old ones.

    The probability of a new token is then about the mean of the others (Hewitt, 2021, "Initializing
    new word embeddings for pretrained language models").
    """
    missing = rows - len(table)
    if missing <= 0:
        return table
    sums = [part.sum(0, dtype=torch.float64) for part in table.split(_ROWS)]
    mean = torch.stack(sums).sum(0) / len(table)
    return torch.cat([table, mean.to(table.dtype).expand(missing, *table.shape[1:])])

"""How weights start: each parameter's values are a function of (seed, its name), nothing else.

So every rank of every layout starts from the same numbers: a rank that holds a shard draws the
whole tensor and keeps its part.
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
from llmfoundry.recipe.model import InitConfig, ModelConfig

# projections that write to the residual stream
RESIDUAL = ("out_proj.weight", "down_proj.weight", "experts.w2")
ROUTER = "router.weight"
EMBEDDINGS = ("wte.weight", "wpe.weight")
STACKED_HEADS = ("attn.Wqkv.weight", "attn.Wq.weight")
EXPERTS = ("experts.w1", "experts.v1")  # stacked by expert, each (outputs, inputs)
_ROWS = 4096  # of a table that are added up at a time
TRANSPOSED_EXPERTS = ("experts.w2",)  # each (inputs, outputs)


@dataclass(frozen=True)
class Distribution:
    """The distribution of a tensor's elements.

    Attributes:
        std: standard deviation.
        uniform: over mean ± sqrt(3) std; else normal.
        mean: its centre.
    """

    std: float
    uniform: bool = False
    mean: float = 0.0


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place: matrices by the recipe's scheme, norm weights 1, biases 0.

    default_ alone draws biases too, those of linear layers. Buffers start at 0: they are the steps
    of routers' balancing biases.
    """
    for buffer in model.buffers():
        buffer.zero_()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        distribution: Distribution | None = None
        if name.endswith("bias"):
            distribution = _bias_distribution(*_weight_beside(name, parameters), config)
        elif parameter.ndim > 1:
            distribution = weight_distribution(name, parameter, config)
        if distribution is not None:
            draw(parameter, distribution, seed, name, stacked_rows(name, config))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _weight_beside(name: str, parameters: dict[str, nn.Parameter]) -> tuple[str, Tensor]:
    """Name and weight of the layer that the bias `name` belongs to: experts' are w1 and w1_bias."""
    layer = name.removesuffix("bias")
    weight = layer.removesuffix("_") if layer.endswith("_") else f"{layer}weight"
    return weight, parameters[weight]


def _bias_distribution(name: str, weight: Tensor, config: ModelConfig) -> Distribution | None:
    """The distribution of the bias beside the weight `name`; None: it is 0."""
    if config.init_config.name != "default_" or weight.ndim == 1:
        return None
    return Distribution(default_std(config, *_fans(name, weight, config)), uniform=True)


def weight_distribution(name: str, weight: Tensor, config: ModelConfig) -> Distribution:
    """The distribution of the matrix `name`, of shape (out, in), or of stacked experts'."""
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


def _embedding_distribution(init: InitConfig) -> Distribution | None:
    """What the recipe says of embeddings alone; None: nothing."""
    if init.emb_init_std is not None:
        return Distribution(init.emb_init_std)
    if init.emb_init_uniform_lim is not None:
        limits = init.emb_init_uniform_lim
        low, high = limits if isinstance(limits, list) else (-limits, limits)
        return Distribution((high - low) / math.sqrt(12), uniform=True, mean=(low + high) / 2)
    return Distribution(1.0) if init.name == "default_" else None  # nn.Embedding's own


def residual_divisor(config: ModelConfig) -> float:
    """What projections that write to the residual stream are divided by."""
    init = config.init_config
    if init.name == "neox_init_":
        return config.n_layers / math.sqrt(10)
    if init.name == "default_" or not init.init_div_is_residual:
        return 1.0
    if init.init_div_is_residual is True:
        return math.sqrt(2 * config.n_layers)
    return float(init.init_div_is_residual)


def _fans(name: str, weight: Tensor, config: ModelConfig) -> tuple[int, int]:
    """Inputs and outputs of a matrix: of one expert, and of one head as LLM Foundry counts."""
    assert config.head_dim is not None, "the recipe was not filled"
    out, into = weight.shape
    if name.endswith(EXPERTS + TRANSPOSED_EXPERTS):
        assert config.ffn_config.moe_num_experts is not None
        width = out // config.ffn_config.moe_num_experts
        return (width, into) if name.endswith(TRANSPOSED_EXPERTS) else (into, width)
    return into, config.head_dim if name.endswith(STACKED_HEADS) else out


def default_std(config: ModelConfig, fan_in: int, fan_out: int) -> float:
    """nn.Linear's own: uniform in ± 1 / sqrt(fan_in)."""
    return math.sqrt(1 / (3 * fan_in))


def baseline_std(config: ModelConfig, fan_in: int, fan_out: int) -> float:
    """init_std, whatever the shape."""
    assert config.init_config.init_std is not None, "the recipe was not filled"
    return config.init_config.init_std


def small_std(config: ModelConfig, fan_in: int, fan_out: int) -> float:
    """sqrt(2 / (5 d_model)) (Nguyen and Salazar, 2019)."""
    return math.sqrt(2 / (5 * config.d_model))


def kaiming_std(config: ModelConfig, fan_in: int, fan_out: int) -> float:
    """The gain over sqrt(fan) (He et al., 2015)."""
    init = config.init_config
    assert init.fan_mode and init.init_nonlinearity, "the recipe was not filled"
    gain = nn.init.calculate_gain(init.init_nonlinearity, init.init_gain)  # type: ignore[arg-type]
    return gain / math.sqrt(fan_in if init.fan_mode == "fan_in" else fan_out)


def xavier_std(config: ModelConfig, fan_in: int, fan_out: int) -> float:
    """The gain times sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    assert config.init_config.init_gain is not None, "the recipe was not filled"
    return config.init_config.init_gain * math.sqrt(2 / (fan_in + fan_out))


STDS: dict[str, Callable[[ModelConfig, int, int], float]] = {
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


def draw(
    parameter: Tensor,
    distribution: Distribution,
    seed: int,
    name: str,
    stacked: Sequence[int] = (),
) -> None:
    """Fill a parameter, whole or cut; the numbers follow from seed and name.

    `stacked` is as in `ops.shard_layout`.
    """
    generator = torch.Generator(parameter.device).manual_seed(seed_of(seed, name))
    # in fp32 whatever the parameter's dtype, which rounds it
    whole = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
    if distribution.uniform:
        half = math.sqrt(3) * distribution.std
        whole.uniform_(distribution.mean - half, distribution.mean + half, generator=generator)
    else:
        whole.normal_(distribution.mean, distribution.std, generator=generator)
    assign(parameter, whole, stacked)


@torch.no_grad()
def grown(table: Tensor, rows: int) -> Tensor:
    """A table (V, ...) with as many rows more as `rows` needs, each the mean of those it has.

    New tokens then begin as likely as the others are on average (Hewitt, 2021, "Initializing new
    word embeddings for pretrained language models").
    """
    more = rows - len(table)
    if more <= 0:
        return table
    sums = [part.sum(0, dtype=torch.float64) for part in table.split(_ROWS)]
    mean = torch.stack(sums).sum(0) / len(table)
    return torch.cat([table, mean.to(table.dtype).expand(more, *table.shape[1:])])

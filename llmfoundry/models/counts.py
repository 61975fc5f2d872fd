"""Parameters and FLOPs of a decoder, from its settings alone.

Convention (PaLM, Chowdhery et al., 2022, appendix B; LLM Foundry's): a multiply-add is two FLOPs,
the backward pass costs twice the forward pass, attention is counted over the whole row (neither
causality, nor sliding windows, nor borders of documents discounted), recomputation not counted.
Embedding look-ups are no matrix products. Of experts those count that a token visits. A layer that
takes another's keys and values is counted without their projection.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from llmfoundry.models.decoder import Block, Decoder
from llmfoundry.models.moe import MoE
from llmfoundry.models.quantized import quantized_shapes
from llmfoundry.recipe.hardware import GPUS, Gpu, known_gpu
from llmfoundry.recipe.model import HFModelConfig, ModelConfig

EXPERTS = "ffn.experts."  # in the names of what routers choose from


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    if isinstance(config, HFModelConfig):
        return config.hf_parameters
    return sum(count * p.numel() for _, p, count in _parameters(config))


def active_parameter_count(config: ModelConfig) -> int:
    """Parameters that one token meets: of the experts those it visits, of all else everything."""
    if isinstance(config, HFModelConfig):
        return config.hf_parameters
    return sum(count * _active(name, p, config) for name, p, count in _parameters(config))


def expert_parameter_count(config: ModelConfig) -> int:
    """Parameters of all experts that a router chooses from."""
    if isinstance(config, HFModelConfig):
        return 0
    return sum(count * p.numel() for name, p, count in _parameters(config) if EXPERTS in name)


def _parameters(config: ModelConfig) -> Iterator[tuple[str, Tensor, int]]:
    """Name, shape and number of the parameters; blocks that are alike are made once."""
    for module, count in parts(config):
        yield from ((name, p, count) for name, p in module.named_parameters())


def parts(config: ModelConfig) -> list[tuple[nn.Module, int]]:
    """On the meta device a decoder without blocks, then each kind of block, with their numbers.

    So the time does not grow with n_layers: a recipe of absurd depth is refused for its memory
    before it is built. Blocks differ in whether they take another's keys and values, or not. Those
    of the last models are kept, as a plan asks for the same ones thousands of times; nobody writes
    to them.
    """
    key = repr(config)
    if key not in _PARTS:
        if len(_PARTS) >= MOST_PARTS:
            _PARTS.clear()
        _PARTS[key] = _make_parts(config)
    return _PARTS[key]


_PARTS: dict[str, list[tuple[nn.Module, int]]] = {}
MOST_PARTS = 16  # models whose parts are kept


def _make_parts(config: ModelConfig) -> list[tuple[nn.Module, int]]:
    alike = dataclasses.replace(config, n_layers=1, block_overrides=None)
    layers = (alike if config.block_overrides is None else config).layers()
    takers = [i for i, layer in enumerate(layers) if layer.kv_from != i]
    kinds = [(0, config.n_layers - len(takers)), *((i, len(takers)) for i in takers[:1])]
    with torch.device("meta"):
        bare: nn.Module = Decoder(dataclasses.replace(alike, n_layers=0))
        blocks = [  # the first block takes from none
            (Block(config, index, layers[index], is_reused=False), count) for index, count in kinds
        ]
    return [(bare, 1), *blocks]


def _active(name: str, parameter: Tensor, config: ModelConfig) -> int:
    if EXPERTS not in name:
        return parameter.numel()
    return round(parameter.numel() * config.ffn_config.active_share)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token of a row of `seq_len`, forward and backward."""
    if isinstance(config, HFModelConfig):
        return 6 * (config.hf_matrices + _attention(config, seq_len))
    looked_up = {"wte.weight", "wpe.weight"}
    matrices = sum(
        count * _active(name, p, config)
        for name, p, count in _parameters(config)
        if p.ndim == 2 and name not in looked_up
    )
    assert config.vocab_size is not None
    if config.tie_word_embeddings:
        matrices += config.vocab_size * config.d_model
    return 3 * 2 * (matrices + _attention(config, seq_len))


def _attention(config: ModelConfig, seq_len: int) -> int:
    """Multiply-adds of one token's attention over a whole row."""
    assert config.head_dim is not None
    return config.n_layers * 2 * config.n_heads * config.head_dim * seq_len


def trained_flops_per_token(model: Decoder, seq_len: int) -> float:
    """FLOPs of training on one token of a row of `seq_len`, of a model as much of it as trains.

    A product costs 2 FLOPs a value of its matrix forward, 2 more for the gradient of the matrix
    where that trains, and 2 more for that of its input where anything before it trains: 6 where all
    trains, 4 through a frozen matrix, 2 before the first that trains. An adapter's products count
    as others do; what DoRA does once a pass, whatever its tokens, does not.
    """
    config, total = model.config, 0.0
    if isinstance(config, HFModelConfig):
        return flops_per_token(config, seq_len)
    assert config.head_dim is not None
    attention = 2 * config.n_heads * config.head_dim * seq_len
    named = dict(model.named_parameters())
    before = any(p.requires_grad for n, p in named.items() if n.startswith(_FIRST))
    if "wte.lora_B" in named:
        total += 6 * named["wte.lora_B"].numel()
    for block in model.blocks:
        assert isinstance(block, Block)
        for stage in _STAGES:
            total += _stage_flops(block, stage, config, before)
            before |= any(p.requires_grad for n, p in block.named_parameters() if stage.search(n))
            if stage is _LAST_BEFORE_ATTENTION:
                total += 2 * attention * (3 if before else 1)
    before |= any(p.requires_grad for n, p in named.items() if n.startswith("norm_f."))
    head = [(name, named[f"lm_head.{name}"]) for name in _FACTORS if f"lm_head.{name}" in named]
    if config.tie_word_embeddings:
        head = [("weight", named["wte.weight"])]
    return total + sum(_flops(name, p.numel(), p.requires_grad, before) for name, p in head)


_FIRST = ("wte.", "wpe.")
# In the order of a block's forward pass; those of one stage do not see each other.
_STAGES = [
    re.compile(pattern)
    for pattern in (
        r"^norm_1\.",
        r"^attn\.W",
        r"^attn\.[qk]_ln\.",
        r"^attn\.out_proj\.",
        r"^norm_2\.",
        r"(router|up_proj|gate_proj)\.|experts\.[wv]1",
        r"down_proj\.|experts\.w2",
    )
]
_LAST_BEFORE_ATTENTION = _STAGES[2]
_FACTORS = ("weight", "lora_A", "lora_B", "lora_A_init", "lora_B_init")


def _stage_flops(block: Block, stage: re.Pattern[str], config: ModelConfig, before: bool) -> float:
    """Of the products of a block's parameters that `stage` finds, for a token."""
    sizes, total = dict(quantized_shapes(block)), 0.0
    for name, parameter in block.named_parameters():
        shape = sizes.get(name, tuple(parameter.shape))
        if stage.search(name) and len(shape) == 2:
            values = math.prod(shape) * _visits(name, block, config)
            total += _flops(name, values, parameter.requires_grad, before)
    return total


def _visits(name: str, block: Block, config: ModelConfig) -> float:
    """How often a token meets each value of a matrix: experts' only if it visits them."""
    ffn = config.ffn_config
    if EXPERTS not in name:
        return 1.0
    assert isinstance(block.ffn, MoE) and ffn.moe_top_k
    lora = block.ffn.experts.lora.get(name.removeprefix(EXPERTS).partition("_")[0])
    if lora is not None and lora.shared and "_lora_" in name:
        return ffn.moe_top_k
    return ffn.active_share


def _flops(name: str, values: float, trains: bool, before: bool) -> float:
    """Of a product; an adapter's B has A's output before it, which trains."""
    return 2 * values * (1 + trains + (before or name.endswith("lora_B")))


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None where it is not known, as for every CPU."""
    gpu = gpu_here(device)
    return None if gpu is None else gpu.tflops * 1e12


def gpu_here(device: torch.device) -> Gpu | None:
    """The device's data sheet; None where it is not known, as for every CPU."""
    if device.type != "cuda":
        return None
    known = known_gpu(torch.cuda.get_device_name(device))
    return None if known is None else GPUS[known]

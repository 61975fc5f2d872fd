"""Parameter and FLOP counts of a decoder, from its configuration.

Conventions (PaLM, Chowdhery et al., 2022, appendix B; also LLM Foundry's):

- a multiply-add is two FLOPs, and the backward pass costs twice the forward pass;
- attention is counted over the full sequence: causality, sliding windows and document boundaries
  are not discounted;
- recomputation (activation checkpointing) and embedding lookups are not counted;
- of the experts, those that a token is routed to are counted;
- a layer that reuses keys and values is counted without their projection.
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
from llmfoundry.recipe.model import HFModelConfig, ResolvedModelConfig

EXPERTS = "ffn.experts."  # in the names of what routers choose from


def parameter_count(config: ResolvedModelConfig) -> int:
    """Return the number of parameters; a tied head is counted once."""
    if isinstance(config, HFModelConfig):
        return config.hf_parameters
    return sum(count * p.numel() for _, p, count in _parameters(config))


def active_parameter_count(config: ResolvedModelConfig) -> int:
    """Return the number of parameters used by one token: top-k experts and everything else."""
    if isinstance(config, HFModelConfig):
        return config.hf_parameters
    return sum(count * _active(name, p, config) for name, p, count in _parameters(config))


def expert_parameter_count(config: ResolvedModelConfig) -> int:
    """Return the number of parameters of all routed experts."""
    if isinstance(config, HFModelConfig):
        return 0
    return sum(count * p.numel() for name, p, count in _parameters(config) if EXPERTS in name)


def _parameters(config: ResolvedModelConfig) -> Iterator[tuple[str, Tensor, int]]:
    """Yield name, shape and multiplicity of the parameters; equal blocks are built once."""
    for module, count in parts(config):
        yield from ((name, p, count) for name, p in module.named_parameters())


def parts(config: ResolvedModelConfig) -> list[tuple[nn.Module, int]]:
    """Return a decoder without blocks and each kind of block, with their multiplicities.

    They are on the meta device. The time does not grow with n_layers, so a recipe of absurd depth
    is refused for its memory before it is built. Blocks compute keys and values or reuse them, and
    have experts or, in a mixture, none. Results are cached, as a plan requests the same
    models thousands of times. Callers must not modify them.
    """
    key = repr(config)
    if key not in _PARTS:
        if len(_PARTS) >= MOST_PARTS:
            _PARTS.clear()
        _PARTS[key] = _make_parts(config)
    return _PARTS[key]


_PARTS: dict[str, list[tuple[nn.Module, int]]] = {}
MOST_PARTS = 16  # models in the cache


def _make_parts(config: ResolvedModelConfig) -> list[tuple[nn.Module, int]]:
    n_dense = config.ffn_config.first_k_dense_replace or 0
    few = config
    if config.block_overrides is None:  # one layer of each kind, of as many as there are
        few = dataclasses.replace(config, n_layers=n_dense + 1)
    layers = few.layers()
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault((layer.kv_from != i, layer.is_dense), []).append(i)
    with torch.device("meta"):
        bare = dataclasses.replace(config, n_layers=0, block_overrides=None)
        without_blocks: nn.Module = Decoder(bare)
        result = [(without_blocks, 1)]
        for blocks in kinds.values():
            index, count = blocks[0], len(blocks)
            if index == len(layers) - 1:
                count += config.n_layers - len(layers)
            result.append((Block(config, index, layers[index], is_reused=False), count))
    return result


def _active(name: str, parameter: Tensor, config: ResolvedModelConfig) -> int:
    if EXPERTS not in name:
        return parameter.numel()
    return round(parameter.numel() * config.ffn_config.active_share)


def flops_per_token(config: ResolvedModelConfig, seq_len: int) -> float:
    """Return the FLOPs of training on one token of a sequence of `seq_len`."""
    if isinstance(config, HFModelConfig):
        return 6 * (config.hf_matrices + _attention(config, seq_len))
    lookups = {"wte.weight", "wpe.weight"}
    matrices = sum(
        count * _active(name, p, config)
        for name, p, count in _parameters(config)
        if p.ndim == 2 and name not in lookups
    )
    if config.tie_word_embeddings:
        matrices += config.vocab_size * config.d_model
    return 3 * 2 * (matrices + _attention(config, seq_len))


def _attention(config: ResolvedModelConfig, seq_len: int) -> int:
    """Return the multiply-adds of one token's attention over a full sequence."""
    width = config.head_dim + config.value_dim
    return config.n_layers * config.n_heads * width * seq_len


def trained_flops_per_token(model: Decoder, seq_len: int) -> float:
    """Return the FLOPs of training on one token of a partly frozen model.

    A matmul costs 2 FLOPs per weight in the forward pass, 2 for the gradient of the weight if it is
    trained, and 2 for the gradient of the input if anything before it is trained. This gives 6 if
    everything is trained, 4 through a frozen matrix, and 2 before the first trained parameter.
    Matmuls of adapters count in the same way. DoRA's norms, which do not depend on the number of
    tokens, are not counted.

    Args:
        model: with adapters and requires_grad as in training.
        seq_len: tokens of a sequence.
    """
    config, total = model.config, 0.0
    if isinstance(config, HFModelConfig):
        return flops_per_token(config, seq_len)
    attention = config.n_heads * (config.head_dim + config.value_dim) * seq_len
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
        if "wte.lora_B" in named:  # changed rows of tokens: the embedding's factors, transposed
            head += [("lora_A", named["wte.lora_B"]), ("lora_B", named["wte.lora_A"])]
    return total + sum(_flops(name, p.numel(), p.requires_grad, before) for name, p in head)


_FIRST = ("wte.", "wpe.")
# Parameters of a block in the order of its forward pass. Parameters of one stage are independent.
_STAGES = [
    re.compile(pattern)
    for pattern in (
        r"^norm_1\.",
        r"^attn\.W(?!\w+_b\.)",
        r"^attn\.(q_a|kv_a)_ln\.",
        r"^attn\.W\w+_b\.",
        r"^attn\.[qk]_ln\.",
        r"^attn\.out_proj\.",
        r"^norm_2\.",
        r"(router|up_proj|gate_proj)\.|experts\.[wv]1",
        r"down_proj\.|experts\.w2",
    )
]
_LAST_BEFORE_ATTENTION = _STAGES[4]
_FACTORS = ("weight", "lora_A", "lora_B", "lora_A_init", "lora_B_init")


def _stage_flops(
    block: Block, stage: re.Pattern[str], config: ResolvedModelConfig, before: bool
) -> float:
    """Return the FLOPs of a block's matmuls in one stage, per token."""
    sizes, total = dict(quantized_shapes(block)), 0.0
    for name, parameter in block.named_parameters():
        shape = sizes.get(name, tuple(parameter.shape))
        if stage.search(name) and len(shape) == 2:
            values = math.prod(shape) * _visits(name, block, config)
            total += _flops(name, values, parameter.requires_grad, before)
    return total


def _visits(name: str, block: Block, config: ResolvedModelConfig) -> float:
    """Return how often each weight of a matrix is used per token; below 1 for experts."""
    ffn = config.ffn_config
    if EXPERTS not in name:
        return 1.0
    assert isinstance(block.ffn, MoE) and ffn.moe_top_k
    lora = block.ffn.experts.lora.get(name.removeprefix(EXPERTS).partition("_")[0])
    if lora is not None and lora.shared and "_lora_" in name:
        return ffn.moe_top_k
    return ffn.active_share


def _flops(name: str, values: float, trains: bool, before: bool) -> float:
    """Return the FLOPs of a matmul. The input of an adapter's B is A's output, which is trained."""
    return 2 * values * (1 + trains + (before or name.endswith("lora_B")))


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if unknown, as for every CPU."""
    gpu = gpu_here(device)
    return None if gpu is None else gpu.tflops * 1e12


def gpu_here(device: torch.device) -> Gpu | None:
    """Return the device's data sheet; None if unknown, as for every CPU."""
    if device.type != "cuda":
        return None
    known = known_gpu(torch.cuda.get_device_name(device))
    return None if known is None else GPUS[known]

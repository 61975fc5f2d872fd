"""A filled recipe's model without its weights, its dtypes, and what its kernels refuse.

Whoever makes a model calls these: training, evaluation, generation, conversion, the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import torch

from llmfoundry.distributed.collectives import all_reduce_min
from llmfoundry.distributed.process_group import World
from llmfoundry.models.attention import attention_specs
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops import devices
from llmfoundry.ops.attention.select import refusal
from llmfoundry.ops.moe import mixture as moe
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.train import ResolvedTrainRecipe


def build_root(recipe: ResolvedTrainRecipe) -> Root:
    """The model on the meta device, in the dtype of its weights: shapes without memory."""
    if isinstance(recipe.model, HFModelConfig):
        from llmfoundry.hf.causal_lm import HFCausalLM

        model = cast(Decoder, HFCausalLM(recipe.model))  # of which it keeps the contract
    else:
        with torch.device("meta"):
            model = Decoder(recipe.model)
    model.loss_chunk = recipe.device_loss_chunk_tokens
    return Root(model).to(weight_dtype(recipe.precision))


def served_precision(precision: str, world: World, note: Callable[[str], None]) -> str:
    """The precision that is computed in: fp32 for amp_bf16 where any CPU of a run would emulate it.

    Both keep fp32 weights, so a run may resume in one from the other. `note` reports it.
    """
    if (
        precision != "amp_bf16"
        or world.device.type != "cpu"
        or all_reduce_min(world, devices.HAS_BF16)
    ):
        return precision
    its = "another machine's" if devices.HAS_BF16 else "this"
    note(
        f"precision: fp32 in place of amp_bf16; {its} processor has no bfloat16 instructions, and"
        " takes up to 100 times as long without"
    )
    return "fp32"


def weight_dtype(precision: str) -> torch.dtype:
    """What weights, gradients and the optimizer's state are kept in.

    With `bf16` microbatches' gradients are added up in bfloat16 too, except under FSDP, which adds
    them in fp32; losses of different microbatch sizes then agree to bfloat16's 8 bits only.
    """
    return torch.bfloat16 if precision == "bf16" else torch.float32


def matmul_dtype(precision: str) -> torch.dtype:
    """What matrix products, attention and experts compute in."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def attention_refusal(recipe: ResolvedTrainRecipe, device: torch.device) -> str | None:
    """Why the backend that a filled recipe names cannot serve all its layers; None: it can."""
    model, dtype = recipe.model, matmul_dtype(recipe.precision)
    if isinstance(model, HFModelConfig):
        return None  # transformers reports it itself
    for spec in attention_specs(model, model.layers(), device).values():
        impl = model.attn_config.attn_impl
        reason = refusal(impl, spec, device, dtype, head_dim=model.head_dim)
        if reason is not None:
            return reason
    return None


def experts_refusal(recipe: ResolvedTrainRecipe, device: torch.device) -> str | None:
    """Why the backend that a filled recipe names cannot serve its experts; None: it can."""
    model, ffn = recipe.model, recipe.model.ffn_config
    if ffn.ffn_type != "dmoe":
        return None
    dtype = matmul_dtype(recipe.precision)
    return moe.refusal(ffn.moe_impl, device.type, dtype, model.d_model, ffn.ffn_hidden_size)


def build_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context of a forward pass: bf16 matrix products over fp32 weights, or nothing.

    fp32 and bf16 need none: all computes in the weights' dtype, and norms, softmax, rotary
    positions and the loss turn to fp32 by themselves.
    """
    return partial(
        torch.autocast, device.type, dtype=torch.bfloat16, enabled=precision == "amp_bf16"
    )

"""Model of a recipe without weights, its dtypes, and the checks of its kernels.

Entry point: `build_root`, for training, evaluation, generation, conversion and planning.
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
    """Return the model on the meta device, in the dtype of its weights."""
    if isinstance(recipe.model, HFModelConfig):
        from llmfoundry.hf.causal_lm import HFCausalLM

        model = cast(Decoder, HFCausalLM(recipe.model))  # has the same interface
    else:
        with torch.device("meta"):
            model = Decoder(recipe.model)
        model.use_residual_dtype(residual_dtype(recipe))
    model.loss_chunk = recipe.device_loss_chunk_tokens
    return Root(model).to(weight_dtype(recipe.precision))


def residual_dtype(recipe: ResolvedTrainRecipe) -> torch.dtype:
    """Return the dtype of the residual stream under autocast."""
    return torch.bfloat16 if recipe.residual_dtype == "bf16" else torch.float32


def served_precision(precision: str, world: World, note: Callable[[str], None]) -> str:
    """Return the precision of inference: fp32 for amp_bf16 if any CPU would emulate bfloat16.

    Both keep fp32 weights, so a run may resume in one from the other. `note` reports the change.
    """
    if (
        precision != "amp_bf16"
        or world.device.type != "cpu"
        or all_reduce_min(world, devices.HAS_BF16)
    ):
        return precision
    location = "another machine's" if devices.HAS_BF16 else "this"
    note(
        f"precision: fp32 in place of amp_bf16; {location} processor has no bfloat16 instructions,"
        " and takes up to 100 times as long without"
    )
    return "fp32"


def loaded_precision(
    written: str | None, trained: str, world: World, note: Callable[[str], None]
) -> str:
    """Return the precision in which a model is loaded for evaluation and generation.

    Args:
        written: the user's choice; None: bf16 on a GPU, `trained` on a CPU.
        trained: precision of the run; fp32 for other models.
        world: this process.
        note: reports a default that differs from `trained`.
    """
    if written is None and world.device.type == "cuda" and trained != "bf16":
        note(
            f"precision: bf16, the default on a GPU (the weights are of {trained});"
            " precision=fp32 is for exact comparisons"
        )
        return "bf16"
    return served_precision(written or trained, world, note)


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, gradients and optimizer state.

    With `bf16`, gradients of microbatches are also accumulated in bfloat16, except under FSDP,
    which accumulates in fp32. Losses of different microbatch sizes then agree only to the 8 bits of
    bfloat16.
    """
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def matmul_dtype(precision: str) -> torch.dtype:
    """Return the dtype of matmuls, attention and experts."""
    return {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)


def attention_refusal(recipe: ResolvedTrainRecipe, device: torch.device) -> str | None:
    """Return why the recipe's attention backend does not support all layers; None: it does."""
    model, dtype = recipe.model, matmul_dtype(recipe.precision)
    if isinstance(model, HFModelConfig):
        return None  # transformers reports this
    for spec in attention_specs(model, model.layers(), device).values():
        impl = model.attn_config.attn_impl
        reason = refusal(impl, spec, device, dtype, head_dim=max(model.head_dim, model.value_dim))
        if reason is not None:
            return reason
    return None


def experts_refusal(recipe: ResolvedTrainRecipe, device: torch.device) -> str | None:
    """Return why the recipe's backend for experts does not support them; None: it does."""
    model, ffn = recipe.model, recipe.model.ffn_config
    if ffn.ffn_type != "dmoe":
        return None
    dtype = matmul_dtype(recipe.precision)
    return moe.refusal(ffn.moe_impl, device.type, dtype, model.d_model, ffn.ffn_hidden_size)


def build_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that creates the context of a forward pass: bf16 autocast, or none.

    With fp32 and bf16, everything runs in the dtype of the weights, and norms, softmax, rotary
    positions and the loss are computed in fp32 without autocast.
    """
    return partial(
        torch.autocast, device.type, dtype=torch.bfloat16, enabled=precision == "amp_bf16"
    )

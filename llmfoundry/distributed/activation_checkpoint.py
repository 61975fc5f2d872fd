"""Compilation, activation checkpointing and activation compression of each block, in this order.

Entry point: `wrap_blocks`, which `apply.py` calls on the meta device, before FSDP. It replaces the
`forward` method of each block in place. Parameter names therefore do not change, and FSDP's hooks,
which communicate, stay outside of compiled and recomputed code.

Only training uses the wrappers. Evaluation and generation call the plain forward pass: their
sequences have many lengths, and each length would be compiled separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Block, Root
from llmfoundry.models.moe import MoE
from llmfoundry.ops.compression import Compressor, restore
from llmfoundry.ops.torch_private import (
    compiler_errors,
    disable_ddp_graph_splits,
    selective_contexts,
    set_activation_memory_budget,
)
from llmfoundry.recipe.parallel import BLOCK, EXPERTS, ActivationMemory
from llmfoundry.recipe.train import GRAPH_ADVICE, GRAPH_MODES

Forward = Callable[..., Any]  # called with a block and its inputs
FP8_CAPABILITY = (8, 9)  # Triton has no e4m3 below Ada
BUILDERS = {"cpu": "g++ and Python's headers", "cuda": "triton and gcc"}  # tools of inductor


KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_flash_attention",  # each with its suffixes: _for_cpu, ...
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn",  # _forward and _varlen_forward
    "flash_attn_3::",
    "flex_attention",
    "llmfoundry::moe_forward",
    "aten::topk",  # expert choice of routers
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::all_reduce",
    "_c10d_functional::reduce_scatter_tensor",
)
"""Prefixes of the operators whose results selective activation checkpointing saves.

These are matmuls, attention, experts and collectives. All other operators are bound by memory
bandwidth, and are recomputed. (torchtitan does the same, but saves only every second matmul.)"""


def wrap_blocks(root: Root, memory: ActivationMemory, *, compile_mode: str | None) -> None:
    """Replace the training forward pass of every block, or of parts of it, in place.

    - Full activation checkpointing wraps the compiled function. A graph break inside a compiled
      checkpoint (attention document by document, on a CPU) would disable compilation entirely.
    - Checkpointing of parts of a block also wraps compiled functions, one for each part.
    - Selective checkpointing is inside the compiled function, because it must see operators. On a
      CPU, packed sequences are then not compiled.
    - Compression is outermost. It replaces everything that autograd saves, including the saved
      tensors of compiled graphs and the inputs of checkpoints.

    Args:
        root: the model, before FSDP or DDP wraps it.
        memory: activation memory settings, by block.
        compile_mode: mode of torch.compile; None: not compiled.
    """
    compress = _compressor(root, memory.compression)
    # compilation, with selective checkpointing inside
    if compile_mode is not None:
        set_activation_memory_budget(memory.budget)
        for layer in _shared_mixtures(root):
            # a graph cannot contain the host's wait for token counts, nor FSDP's hooks of experts
            layer.combine = torch.compiler.disable(layer.combine)  # type: ignore[method-assign]
    inner: Forward = _plain
    if memory.checkpointing == "selective":
        inner = _checkpointed(
            inner, _selection(root, compress, is_compiled=compile_mode is not None)
        )
    if compile_mode is not None:
        inner = _compiled(inner, compile_mode, len(root.model.blocks))
    for block, targets in zip(root.model.blocks, memory.targets, strict=True):
        # full checkpointing of the block, or of parts of it
        recompute = partial(_recomputed, compress=compress)
        forward = recompute(block, inner) if BLOCK in targets else inner
        for part in targets - {BLOCK}:
            for module in _modules(block, part):
                # a separately compiled function, which the block's graph calls
                outside = torch.compiler.disable(recompute(module, inner))
                module.forward = _while_training(module, outside)
        # compression around everything
        if compress is not None:
            forward = _compressed(forward, compress)
        if forward is not _plain:
            block.forward = _while_training(block, forward)


def _plain(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    return type(module).forward(module, *inputs, **named)


def _while_training(module: nn.Module, wrapped: Forward) -> Forward:
    def forward(*inputs: Any, **named: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            return wrapped(module, *inputs, **named)
        return _plain(module, *inputs, **named)

    return forward


def _modules(block: nn.Module, part: str) -> list[nn.Module]:
    """Return the modules of a block of this project that `part` names."""
    assert isinstance(block, Block), "limits: of other classes whole blocks are known alone"
    if part == "norm":
        return [block.norm_1, block.norm_2]
    if part == EXPERTS:
        return [block.ffn.experts] if isinstance(block.ffn, MoE) else []
    return [block.attn if part == "attention" else block.ffn]


def _compressor(root: Root, kind: str) -> Compressor | None:
    """Return the compressor of all blocks; None: no compression."""
    if kind == "none":
        return None
    model = root.model.config
    ffn = getattr(model, "ffn_config", None)
    scores = 0 if ffn is None else ffn.moe_num_experts or 0
    return Compressor(kind, exact=max(scores, getattr(model, "n_heads", 0)))


def _compressed(forward: Forward, compress: Compressor) -> Forward:
    """Wrap a forward pass so that autograd saves activations in 8 bits."""

    def wrapped(block: nn.Module, *inputs: Any, **named: Any) -> Any:
        with compress.hooks(block, inputs, named):
            return forward(block, *inputs, **named)

    return wrapped


def _recomputed(module: nn.Module, forward: Forward, *, compress: Compressor | None) -> Forward:
    """Wrap a module in full activation checkpointing.

    If its input is compressed, the choice of the router is saved instead of recomputed. From the
    rounded input the router would choose other experts for some tokens, and the collectives of
    ranks would not match.
    """
    may_route = any(isinstance(m, MoE) for m in module.modules()) or not _is_ours(module)
    if compress is None or not may_route:
        return _checkpointed(forward)
    return _checkpointed(forward, partial(selective_contexts, _is_choice))


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("llmfoundry.")


def _is_choice(op: Any, *args: Any) -> bool:
    return _name(op).startswith("aten::topk")


def _checkpointed(forward: Forward, contexts: Callable[[], Any] | None = None) -> Forward:
    """Wrap a forward pass in a checkpoint that saves its inputs and random state.

    Args:
        forward: the function that is recomputed in the backward pass.
        contexts: returns the contexts of forward pass and recomputation, which select the results
            that are saved; None: none are saved.
    """
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def wrapped(block: nn.Module, *inputs: Any, **named: Any) -> Any:
        return checkpoint(
            forward,
            block,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=True,
            **options,
            **named,
        )

    return wrapped


def _selection(root: Root, compress: Compressor | None, *, is_compiled: bool) -> Callable[[], Any]:
    """Return a factory of contexts that save the results of the operators in KEPT.

    The result of a feed-forward layer's last matmul is not saved, because the backward pass of the
    block does not use it. Neither are the outputs of experts, and the all-to-all that returns them.
    """
    model = root.model.config
    last = (model.ffn_config.ffn_hidden_size, model.d_model)

    def is_kept(op: Any, *args: Any) -> bool:
        name = _name(op)
        if not name.startswith(KEPT):
            return False
        if name.startswith(("aten::mm", "aten::addmm")):
            left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            return (left.shape[-1], right.shape[-1]) != last
        return True

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = is_kept(op, *args)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    ours = partial(selective_contexts, has_unread=_is_experts)
    if compress is not None and not is_compiled:
        return partial(ours, is_kept, compress.keep, restore)
    # FSDP's hooks of experts are inside, and PyTorch's contexts save all results of an operator
    if _shared_mixtures(root) or (not is_compiled and _has_experts(root)):
        return partial(ours, is_kept)
    return partial(create_selective_checkpoint_contexts, policy)


def _is_experts(op: Any) -> bool:
    return _name(op).startswith("llmfoundry::moe_forward")


def _has_experts(root: Root) -> bool:
    return any(isinstance(module, MoE) for module in root.modules())


def _name(op: Any) -> str:
    return op.name() if callable(getattr(op, "name", None)) else str(op)


def _shared_mixtures(root: Root) -> list[MoE]:
    """Return the layers with experts that have FSDP units inside the block."""
    mixtures = (m for m in root.modules() if isinstance(m, MoE))
    return [m for m in mixtures if m.group is not None or m.statistics_groups.tensor is not None]


def _compiled(forward: Forward, mode: str, n_blocks: int) -> Forward:
    """Compile one function for all blocks, so that identical blocks share graphs."""
    # Blocks with other windows, or with shared keys and values, need other graphs. Beyond the
    # limit (8), PyTorch would run them uncompiled and only warn.
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * n_blocks)
    disable_ddp_graph_splits()  # blocks are smaller than DDP's buckets
    return torch.compile(forward, mode=mode)


def check_graphs(mode: str | None, *, rows: int, microbatch: int) -> None:
    """Check that a mode that records CUDA graphs has one microbatch per step.

    Each replay of a graph writes gradients to the same memory and overwrites those of the previous
    microbatch. PyTorch would raise during the second microbatch.

    Args:
        mode: mode of torch.compile; None: not compiled.
        rows: sequences per step on this rank.
        microbatch: sequences per forward pass.

    Raises:
        UserError: a step has several microbatches.
    """
    if mode in GRAPH_MODES and rows > microbatch:
        raise UserError(
            f"compile_mode: {mode} records CUDA graphs, which overwrite the gradients of one"
            f" microbatch with the next's, and a step has {-(-rows // microbatch)}"
            f" ({rows} rows, {microbatch} at a time); {GRAPH_ADVICE}"
        )


def check_format(compression: str, device: torch.device) -> None:
    """Check that the device supports the format of activation compression.

    Raises:
        UserError: fp8 on a GPU without it.
    """
    if compression != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise UserError(
            "parallel.activation_compression: fp8 is for GPUs of compute capability"
            f" {'.'.join(map(str, FP8_CAPABILITY))} and above, and this one has"
            f" {'.'.join(map(str, capability))}; write int8"
        )


def check_compiler(mode: str, device: torch.device) -> None:
    """Compile one addition, to report a broken compiler in one line before the first step.

    Raises:
        UserError: kernels cannot be built here, or not in this mode.
    """
    if mode in GRAPH_MODES and device.type != "cuda":
        raise UserError(
            f"compile_mode: {mode} records CUDA graphs, and this run computes on a"
            f" {device.type.upper()}; {GRAPH_ADVICE}"
        )

    def add_one(x: Tensor) -> Tensor:
        return x + 1

    try:
        torch.compile(add_one)(torch.ones(8, device=device))
    except compiler_errors() as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"compile: torch.compile cannot build kernels here ({reason}); install"
            f" {BUILDERS[device.type]}, or write compile: false"
        ) from error

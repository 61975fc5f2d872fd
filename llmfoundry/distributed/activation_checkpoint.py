"""What goes around each block's forward pass: compilation, checkpointing, compression, in order.

`builders/trainer.py` calls `wrap_blocks` on the meta device, before FSDP: a block's own `forward`
is replaced in place, so names of parameters stay what they are, and FSDP's hooks, which wait for
other processes, stay outside of what is compiled and of what is recomputed.

Only training goes through the wraps. Evaluation and generation call the plain forward pass: their
rows have every length, and each would be compiled anew.
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

Forward = Callable[..., Any]  # of a block and its inputs
FP8_CAPABILITY = (8, 9)  # Triton has no e4m3 below Ada
BUILDERS = {"cpu": "g++ and Python's headers", "cuda": "triton and gcc"}  # what inductor runs


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
    "aten::topk",  # a router's choice
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::all_reduce",
    "_c10d_functional::reduce_scatter_tensor",
)
"""Operators, by how their names begin, whose results selective checkpointing keeps: matrix
products, attention, experts, and what other processes would have to take part in. All else is
bound by memory traffic, and recomputed (as torchtitan has it, which keeps every second product
alone)."""


def wrap_blocks(root: Root, memory: ActivationMemory, *, compile_mode: str | None) -> None:
    """Replace the training forward pass of every block, or of parts of it, in place.

    Checkpointing of whole blocks goes around the compiled function, not into it: a graph break
    inside a compiled checkpoint (attention of documents one by one, on a CPU) turns compilation off
    altogether. So does that of parts, each of which is compiled by itself. Selective checkpointing
    goes into it, for it must see operators: on a CPU packed rows are not compiled then. Compression
    goes around all of it: it takes what autograd saves, of compiled graphs and the inputs of
    checkpoints as well.

    Args:
        root: the model, before FSDP or DDP wrap it.
        memory: how activations are kept, by block.
        compile_mode: torch.compile's mode; None: not compiled.
    """
    compress = _compressor(root, memory.compression)
    if compile_mode is not None:
        set_activation_memory_budget(memory.budget)
        for layer in _shared_mixtures(root):
            # no graph has the host's waiting for how many rows come, nor FSDP's hooks of experts
            layer.combine = torch.compiler.disable(layer.combine)  # type: ignore[method-assign]
    inner: Forward = _plain
    if memory.checkpointing == "selective":
        inner = _checkpointed(
            inner, _selection(root, compress, is_compiled=compile_mode is not None)
        )
    if compile_mode is not None:
        inner = _compiled(inner, compile_mode, len(root.model.blocks))
    for block, targets in zip(root.model.blocks, memory.targets, strict=True):
        again = partial(_recomputed, compress=compress)
        forward = again(block, inner) if BLOCK in targets else inner
        for part in targets - {BLOCK}:
            for module in _modules(block, part):
                # a function of its own, which the block's graph calls
                outside = torch.compiler.disable(again(module, inner))
                module.forward = _while_training(module, outside)
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
    """What `part` names in a block of ours."""
    assert isinstance(block, Block), "limits: of other classes whole blocks are known alone"
    if part == "norm":
        return [block.norm_1, block.norm_2]
    if part == EXPERTS:
        assert isinstance(block.ffn, MoE), "limits: the model has experts"
        return [block.ffn.experts]
    return [block.attn if part == "attention" else block.ffn]


def _compressor(root: Root, kind: str) -> Compressor | None:
    """What compresses all blocks; None: nothing is compressed."""
    if kind == "none":
        return None
    model = root.model.config
    ffn = getattr(model, "ffn_config", None)
    scores = 0 if ffn is None else ffn.moe_num_experts or 0
    return Compressor(kind, exact=max(scores, getattr(model, "n_heads", 0)))


def _compressed(forward: Forward, compress: Compressor) -> Forward:
    """Save in 8 bits."""

    def wrapped(block: nn.Module, *inputs: Any, **named: Any) -> Any:
        with compress.hooks(block, inputs, named):
            return forward(block, *inputs, **named)

    return wrapped


def _recomputed(module: nn.Module, forward: Forward, *, compress: Compressor | None) -> Forward:
    """The checkpoint of a whole module.

    Where its input is compressed its router keeps its choice: of the rounded input it would choose
    other experts for some tokens, and other processes would wait for other rows.
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
    """Keep the inputs; the random state is kept too, so that dropout falls on the same elements.

    Args:
        forward: what is recomputed.
        contexts: of its first and its second time, which keep results; None: nothing is kept.
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
    """Contexts that keep the results of the operators that KEPT names.

    Not of a feed-forward layer's last product: nothing in the block needs it again.
    """
    model = root.model.config
    last = (model.ffn_config.ffn_hidden_size, model.d_model)

    def is_kept(op: Any, *args: Any) -> bool:
        name = _name(op)
        if not name.startswith(KEPT):
            return False
        if name.startswith(("aten::mm", "aten::addmm")):
            left, right = args[-2:]
            return (left.shape[-1], right.shape[-1]) != last
        return True

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = is_kept(op, *args)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    if compress is not None and not is_compiled:
        return partial(selective_contexts, is_kept, compress.keep, restore)
    if _shared_mixtures(root):
        return partial(selective_contexts, is_kept)  # FSDP's hooks of the experts are inside
    return partial(create_selective_checkpoint_contexts, policy)


def _name(op: Any) -> str:
    return op.name() if callable(getattr(op, "name", None)) else str(op)


def _shared_mixtures(root: Root) -> list[MoE]:
    """The layers in which FSDP has units of their own: experts, or all of a layer."""
    mixtures = (m for m in root.modules() if isinstance(m, MoE))
    return [m for m in mixtures if m.group is not None or m.statistics_groups.tensor is not None]


def _compiled(forward: Forward, mode: str, n_blocks: int) -> Forward:
    """One function for all blocks: identical ones share its graphs, compiled once."""
    # Blocks of other windows, or with others' keys, are other graphs; beyond the limit (8) PyTorch
    # would run them uncompiled and only warn.
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * n_blocks)
    disable_ddp_graph_splits()  # blocks are smaller than its buckets
    return torch.compile(forward, mode=mode)


def check_graphs(mode: str | None, *, rows: int, microbatch: int) -> None:
    """A mode that records CUDA graphs takes steps of one microbatch.

    A graph writes gradients to the same place each time it is replayed, so that those of one
    microbatch are gone in the next; PyTorch raises in the middle of the second.

    Args:
        mode: torch.compile's; None: not compiled.
        rows: of a step, on this process.
        microbatch: rows computed at a time.
    """
    if mode in GRAPH_MODES and rows > microbatch:
        raise UserError(
            f"compile_mode: {mode} records CUDA graphs, which overwrite the gradients of one"
            f" microbatch with the next's, and a step has {-(-rows // microbatch)}"
            f" ({rows} rows, {microbatch} at a time); {GRAPH_ADVICE}"
        )


def check_format(compression: str, device: torch.device) -> None:
    """Refuse 8-bit floating point where its kernels do not run.

    Raises:
        UserError: says what runs.
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
    """Compile one addition: seconds now in place of a traceback in the first step.

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

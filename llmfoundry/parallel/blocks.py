"""What goes around each block's forward pass: compilation, and around that checkpointing.

`assemble/trainer.py` calls `wrap_blocks` on the meta device, before FSDP: a block's own `forward`
is replaced in place, so names of parameters stay what they are, and FSDP's hooks, which wait for
other processes, stay outside of what is compiled and of what is computed again.

Only training goes through the wraps. Evaluation and generation call the plain forward pass: their
rows have every length, and each would be compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.ops.torch_private import compiler_errors, keep_graphs_whole_under_ddp
from llmfoundry.recipe.scripts.train import GRAPH_ADVICE, GRAPH_MODES

Forward = Callable[..., Any]  # of a block and its inputs
BUILDERS = {"cpu": "g++ and Python's headers", "cuda": "triton and gcc"}  # what inductor runs


def wrap_blocks(root: Root, *, checkpointing: bool, compile_mode: str | None) -> None:
    """Replace the training forward pass of every block, in place.

    Checkpointing goes around the compiled function, not into it: a graph break inside a compiled
    checkpoint (attention of documents one by one, on a CPU) turns compilation off altogether.

    Args:
        root: the model, before FSDP or DDP wrap it.
        checkpointing: keep a block's input only, and compute the block again in the backward pass.
        compile_mode: torch.compile's mode; None: not compiled.
    """
    if compile_mode is None and not checkpointing:
        return
    forward: Forward = _plain
    if compile_mode is not None:
        forward = _compiled(forward, compile_mode, len(root.model.blocks))
    if checkpointing:
        forward = _checkpointed(forward)
    for block in root.model.blocks:
        block.forward = _while_training(block, forward)


def _plain(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    return type(block).forward(block, *inputs, **named)


def _while_training(block: nn.Module, wrapped: Forward) -> Forward:
    def forward(*inputs: Any, **named: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return wrapped(block, *inputs, **named)
        return _plain(block, *inputs, **named)

    return forward


def _checkpointed(forward: Forward) -> Forward:
    """Keep the inputs; the random state is kept too, so that dropout falls on the same elements."""

    def wrapped(block: nn.Module, *inputs: Any, **named: Any) -> Any:
        return checkpoint(
            forward, block, *inputs, use_reentrant=False, preserve_rng_state=True, **named
        )

    return wrapped


def _compiled(forward: Forward, mode: str, n_blocks: int) -> Forward:
    """One function for all blocks: those that are alike share its graphs, compiled once."""
    # Blocks of other windows, or with others' keys, are other graphs; beyond the limit (8) PyTorch
    # would run them uncompiled and only warn.
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * n_blocks)
    keep_graphs_whole_under_ddp()  # blocks are smaller than its buckets
    return torch.compile(forward, mode=mode)


def check_graphs(mode: str | None, *, rows: int, microbatch: int) -> None:
    """A mode that records CUDA graphs takes steps of one microbatch.

    A graph writes gradients to the same place each time it is replayed, so that those of one
    microbatch are gone in the next; PyTorch raises in the middle of the second.

    Args:
        mode: torch.compile's; None: not compiled.
        rows: of a step, on this process.
        microbatch: rows computed at a time.

    Raises:
        UserError: there are several.
    """
    if mode in GRAPH_MODES and rows > microbatch:
        raise UserError(
            f"compile_mode: {mode} records CUDA graphs, which overwrite the gradients of one"
            f" microbatch with the next's, and a step has {-(-rows // microbatch)}"
            f" ({rows} rows, {microbatch} at a time); {GRAPH_ADVICE}"
        )


def check_compiler(mode: str, device: torch.device) -> None:
    """Compile one addition: seconds now in place of a traceback in the first step.

    Raises:
        UserError: kernels cannot be built here, or not as the mode asks.
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

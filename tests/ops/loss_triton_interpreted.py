"""Runs the Triton kernel of the loss on a CPU, by Triton's interpreter.

Not a test: `test_loss_triton.py` starts it as a process of its own, because TRITON_INTERPRET is
read when Triton is imported. It prints as JSON: the distances of losses and gradients from autograd
of the plain formula in float64; the bytes per logit that the kernel loads and stores; and rows with
NaN or inf whose loss is finite. On a GPU `test_kernels_on_gpus.py` calls `distances`.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from llmfoundry.ops import loss, loss_triton
from llmfoundry.ops.loss import HeadOptions, LogitLoss, VocabularyShard
from llmfoundry.ops.packed_layout import IGNORE

TOKENS = 8
CASES: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled, z-loss": {"scale": 0.3, "z_weight": 0.01},
    "capped": {"softcap": 2.5},
    "scaled and capped, z-loss": {"scale": 1.7, "softcap": 30.0, "z_weight": 0.01},
}
VOCABULARIES = ((50, None), (1000, TOKENS), (1024, 1))
"""Sizes, and how many upstream gradients there are: less than a tile, no gradients; two tiles, the
last one short; two full tiles, and one gradient expanded to all tokens."""


def make(vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (TOKENS, V) in fp32, labels and upstream gradients; one row is far, one is flat."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(TOKENS, vocabulary, generator=generator)
    logits[1] += 100
    logits[2] = -3.0
    logits[4, :7] = -math.inf
    labels = torch.randint(7, vocabulary, (TOKENS,), generator=generator)
    labels[::5] = IGNORE
    labels[3], labels[6] = vocabulary - 1, 0
    factor = torch.randn(TOKENS, 1, generator=generator)
    return logits.to(device), labels.to(device), factor.to(device)


def plain_formula(
    logits: Tensor, labels: Tensor, factor: Tensor | None, options: HeadOptions
) -> LogitLoss:
    """Autograd of the plain formula in float64, divided by the scale as the kernel's gradient."""
    leaf, scale, softcap = logits.double().requires_grad_(), options.scale, options.softcap
    capped = scale * leaf if softcap is None else softcap * torch.tanh(scale * leaf / softcap)
    nats = torch.nn.functional.cross_entropy(capped, labels, ignore_index=IGNORE, reduction="none")[
        :, None
    ]
    squares = torch.where(labels == IGNORE, 0, capped.logsumexp(-1).square())[:, None]
    z_loss = options.z_weight * squares
    total = ((nats + z_loss) * (1 if factor is None else factor.double())).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    return LogitLoss(nats.detach(), z_loss.detach(), grad / scale)


def distances(dtype: torch.dtype, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Largest error of losses and of gradients, in units of the larger of 1 and their magnitude."""
    found = {}
    for name, settings in CASES.items():
        options = HeadOptions(dtype, **settings)
        for vocabulary, upstreams in VOCABULARIES if dtype == torch.float32 else VOCABULARIES[1:2]:
            logits, labels, factor = make(vocabulary, device)
            upstream = None if upstreams is None else factor[:upstreams].expand_as(factor)
            exact = plain_formula(logits, labels, upstream, options)
            mine = loss._fused_loss(logits, labels, upstream, options, True)
            assert mine.grad is not None and exact.grad is not None
            assert mine.grad.dtype == dtype and mine.grad.data_ptr() == logits.data_ptr()
            assert not mine.grad[labels == IGNORE].any()
            assert torch.equal(mine.nats == 0, exact.nats == 0)
            assert exact.z_loss is not None and (mine.z_loss is None) == (not options.z_weight)
            losses = mine.nats if mine.z_loss is None else mine.nats + mine.z_loss
            exact_losses = exact.nats + exact.z_loss
            loss_error = (losses - exact_losses).abs() / exact_losses.abs().clamp_min(1)
            gap = (mine.grad.double() - exact.grad).abs() / exact.grad.abs().clamp_min(1)
            found[f"{name}, {vocabulary}"] = (float(loss_error.max()), float(gap.max()))
    return found


def finite_losses(device: str = "cpu") -> list[str]:
    """Values in a row that leave its loss and its gradient finite."""
    found = []
    for value in (math.nan, math.inf):
        for column in (0, 300, 999):
            logits, labels, _ = make(1000, device)
            logits[3, column] = value
            mine = loss._fused_loss(logits, labels, None, HeadOptions(torch.float32), True)
            assert mine.grad is not None
            others = torch.arange(TOKENS, device=device) != 3
            assert mine.nats[others].isfinite().all() and mine.grad[others].isfinite().all()
            if mine.nats[3].isfinite() or mine.grad[3].isfinite().all():
                found.append(f"{value} in column {column}")
    logits, labels, _ = make(1000, device)
    labels[3] = 1000
    if loss._fused_loss(logits, labels, None, HeadOptions(torch.float32), True).nats[3].isfinite():
        found.append("a label outside the vocabulary")
    return found


def bytes_per_logit(dtype: torch.dtype | None) -> float:
    """Bytes that the interpreted kernel loads and stores, masked lanes left out."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved = 0
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        nonlocal moved
        moved += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    logits, labels, factor = make(1000, "cpu")
    labels.clamp_(min=0)
    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        options = HeadOptions(dtype or torch.bfloat16, softcap=30.0)
        loss._fused_loss(logits, labels, factor, options, dtype is not None)
    return moved / logits.numel()


def of_head(shard: VocabularyShard | None, rows: slice) -> list[Tensor]:
    """Loss and log-probabilities with their gradients by the kernel, from rows of a head."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 16, generator=generator)
    weight = torch.randn(75, 16, generator=generator)[rows]
    labels = torch.randint(0, 75, (40,), generator=generator)
    labels[::3] = IGNORE
    factor = torch.randn(40, generator=generator)
    settings: dict[str, Any] = {"scale": -0.7}
    wide = shard is None  # the reference
    leaves = [x.double() if wide else x for x in (hidden, weight)]
    leaves = [x.requires_grad_() for x in leaves]
    if wide:
        total = loss.reference_cross_entropy(
            *leaves, labels, weights=factor, z_loss_weight=0.01, **settings
        )
        log_probs = loss.reference_log_probs(*leaves, labels, **settings)
    else:
        settings |= {"shard": shard, "chunk": 16}
        total = loss.linear_cross_entropy(
            *leaves, labels, weights=factor, z_loss_weight=0.01, **settings
        )
        log_probs = loss.linear_log_probs(*leaves, labels, **settings)
    grads = torch.autograd.grad(total, leaves)
    others = torch.autograd.grad((log_probs * factor).sum(), leaves)
    return [total.detach(), log_probs.detach(), *grads, *others]


def work(rank: int, folder: str) -> None:
    """One of two ranks with uneven shards of a head."""
    shrink()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    rows = slice(0, 38) if rank == 0 else slice(38, 75)
    shard = VocabularyShard(dist.group.WORLD, rows.start, 75)
    with mock.patch.object(loss, "has_kernel", lambda device, wide: True):
        torch.save(of_head(shard, rows), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def sharded_distance() -> float:
    """Largest distance of two ranks' results from the plain formula in float64."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=2)
        first, second = (torch.load(Path(folder) / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    mine = [first[0], first[1]]
    for i in (2, 4):
        mine += [first[i] + second[i], torch.cat([first[i + 1], second[i + 1]])]
    exact = of_head(None, slice(None))
    return max(float((a - b).abs().max()) for a, b in zip(mine, exact, strict=True))


def shrink() -> None:
    """Several tiles along a row, cheaply."""
    loss_triton.WIDTH, loss_triton.WARPS = 512, 1


if __name__ == "__main__":
    shrink()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    found: dict[str, Any] = {"distances": {}, "finite": finite_losses()}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        found["distances"] |= {f"{case} in {name}": far for case, far in distances(dtype).items()}
        found[f"bytes in {name}"] = bytes_per_logit(dtype)
    found |= {"bytes without gradient": bytes_per_logit(None), "sharded": sharded_distance()}
    print(json.dumps(found))

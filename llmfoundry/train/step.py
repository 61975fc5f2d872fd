"""One optimizer step: microbatches, exact global mean loss, clipping, guard, update.

Nothing here asks the device for a value: loss, norm and the guard stay tensors until the trainer
logs. The guard lives in the optimizer's fused kernel, which leaves weights and state alone while
`found_inf` is 1 (the switch that PyTorch's GradScaler uses); once 1, it stays so for the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.parallel.mesh import gradient_sync, sum_factor, whole
from llmfoundry.recipe.optimizer import GradientClippingConfig


@dataclass
class StepResult:
    """What one step leaves behind, on the device.

    Attributes:
        loss: mean cross-entropy over the global batch's labelled tokens, nats.
        grad_norm: global L2 norm of the gradient before clipping.
        count: labelled tokens of the global batch.
    """

    loss: Tensor
    grad_norm: Tensor
    count: Tensor


class Guard:
    """Remembers, on the device, the first step whose loss or gradient was not finite."""

    def __init__(self, device: torch.device) -> None:
        self.found_inf = torch.zeros((), device=device)
        self._first = torch.full((), -1, device=device, dtype=torch.int64)

    def observe(self, batch: int, result: StepResult) -> None:
        """Look at a step before its update."""
        bad = ~(torch.isfinite(result.loss) & torch.isfinite(result.grad_norm))
        self._first = torch.where(bad & (self._first < 0), batch, self._first)
        self.found_inf = (self._first >= 0).float()

    def first_bad(self) -> int | None:
        """The first bad step, if there was one; waits for the device."""
        first = int(self._first)
        return None if first < 0 else first


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    number: int,
    microbatch: int,
    autocast: Callable[[], AbstractContextManager[None]],
    clipping: GradientClippingConfig,
    guard: Guard,
) -> StepResult:
    """Run step `number` on this process's rows of the global batch.

    Args:
        module: the Root, as FSDP or DDP wrapped it.
        optimizer: a fused one.
        batch: this process's rows, on its device.
        number: of the step, from 0.
        microbatch: rows computed at a time.
        autocast: gives the context of the forward pass.
        clipping: bound on the gradient.
        guard: stops updates once a loss or gradient is not finite.
    """
    count = (batch.labels != IGNORE).sum()
    _sum_over_processes(count)
    loss = torch.zeros((), device=count.device)
    parts, factor = list(batch.split(microbatch)), sum_factor(module)
    for index, part in enumerate(parts):
        with gradient_sync(module, last=index == len(parts) - 1):
            with autocast():
                total = module(part.tokens, part.layout, _loss_of(part.labels))
            share = total / count.clamp(min=1)
            (share * factor).backward()
        loss += share.detach()
    _sum_over_processes(loss)
    parameters = [p for p in module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    CLIPPINGS[clipping.clipping_type](parameters, clipping.clipping_threshold, norm)
    result = StepResult(loss, whole(norm), count)
    guard.observe(number, result)
    optimizer.found_inf = guard.found_inf  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def clip_norm(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Scale all gradients so that their global L2 norm is at most `threshold`."""
    torch.nn.utils.clip_grads_with_norm_(parameters, threshold, norm)


def clip_value(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Clamp every element to [-threshold, threshold]."""
    torch.nn.utils.clip_grad_value_(parameters, threshold)


CLIPPINGS: dict[str, Callable[[list[nn.Parameter], float, Tensor], None]] = {
    "norm": clip_norm,
    "value": clip_value,
}


def _loss_of(labels: Tensor) -> Callable[[Decoder, Tensor], Tensor]:
    return lambda model, hidden: model.loss(hidden, labels)


def _sum_over_processes(value: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(value)

"""One optimizer step: microbatches, exact global mean loss, clipping, guard, update.

`Trainer` calls `train_step` with an `Objective` (`objective.py`), what the step minimizes. No value
is read from the device: loss, norm and what the guard (`spikes.py`) sees stay tensors until the
trainer logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.distributed.failures import failed_collective
from llmfoundry.errors import UserError, is_out_of_memory, what_was_asked
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.router import Routing, move_biases
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.ops.shard_layout import ShardLayout, l2_norms, local_shard, total_norm
from llmfoundry.ops.torch_private import Replicas
from llmfoundry.recipe.optimizer import GradientClippingConfig
from llmfoundry.telemetry import span
from llmfoundry.train.objective import CROSS_ENTROPY, Look, Objective, sum_over_processes
from llmfoundry.train.out_of_memory import release
from llmfoundry.train.spikes import Guard


@dataclass
class StepResult:
    """What one step leaves behind, on the device.

    Attributes:
        loss: all that was minimized: the mean cross-entropy over the global batch's labeled tokens
            in nats, and what routers add.
        grad_norm: global L2 norm of the gradient before clipping.
        count: labeled tokens of the global batch, or what else the objective divides by.
        parts: where routers add to it, the summands of `loss`: `loss`, which is the cross-entropy,
            and those of `Routing.losses`; else empty.
        routing: load and probability of every expert over the global batch; None without experts.
        reported: what else the objective reports, for its `metrics`: sums over the batch.
    """

    loss: Tensor
    grad_norm: Tensor
    count: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    routing: Routing | None = None
    reported: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSettings:
    """What all steps of a run have in common."""

    microbatch: int
    """Rows computed at a time."""
    autocast: Callable[[], AbstractContextManager[None]]
    """Makes the context of a forward pass."""
    clipping: GradientClippingConfig
    objective: Objective = CROSS_ENTROPY
    data_group: dist.ProcessGroup | None = None
    """The processes whose rows make up the global batch; None: all."""
    token_group: dist.ProcessGroup | None = None
    """Those whose tokens do, where several share each row; None: all."""
    shard_tokens: Callable[[Batch], Batch] | None = None
    """Of the rows of a microbatch, the tokens that are this process's; None: all are."""
    reduce_scatter_each: bool = True
    """FSDP does so after every microbatch, not after the last alone."""


def not_finite(model: nn.Module) -> str:
    """A parameter with numbers that are not finite in what this process holds; empty: none."""
    every = model.named_parameters()
    return next((name for name, p in every if not local_shard(p.detach()).isfinite().all()), "")


def not_a_step(model: nn.Module | None, batch: int) -> UserError:
    """Why a step that is not finite ends the run.

    Args:
        model: where it was the run's first, as the weights may be what is wrong; else None.
        batch: steps done before it.
    """
    if model is not None and (name := not_finite(model)):
        return UserError(
            f"{name}: the weights that the run began with are damaged: they hold numbers that"
            " are not finite; write others (model.pretrained, adapter.pretrained, load_path)"
        )
    return UserError(
        f"optimizer.lr: the loss or its gradient was not finite in step {batch + 1}; the"
        " optimizer did not see it, and what was saved before is sound; write a smaller lr, a"
        " longer schedule.t_warmup, or precision=fp32, and run the same command"
    )


@dataclass(frozen=True)
class StepHooks:
    """What a step calls on its way; None: nothing.

    Attributes:
        after_backward: when the gradients are there, on every process, with what this one had no
            memory for (else empty); what it raises leaves all as it was before the step.
        on_gradients: while parameters hold the step's gradients, before clipping.
        before_update: before the optimizer; what it raises leaves the weights as they were.
        can_redo: whether `after_backward` takes what there was no memory for; else it is raised.
    """

    after_backward: Callable[[str], None] | None = None
    on_gradients: Callable[[], None] | None = None
    before_update: Callable[[], None] | None = None
    can_redo: bool = False


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    settings: StepSettings,
    *,
    number: int,
    guard: Guard,
    hooks: StepHooks = StepHooks(),
) -> StepResult:
    """Run step `number`, from 0, on this process's rows of the global batch.

    Args:
        module: the Root, as FSDP or DDP wrapped it.
        optimizer: a fused one.
        batch: this process's rows, on its device.
        settings: of all steps.
        number: of the step, from 0.
        guard: decides, on the device, whether the optimizer leaves the weights as they are.
        hooks: what is called on the way.
    """
    objective, clipping, shard = settings.objective, settings.clipping, settings.shard_tokens
    batch = objective.prepare(batch, _forward_only(module, settings), settings.data_group)
    rows_at_once = batch.split(settings.microbatch)
    microbatches = [part if shard is None else shard(part) for part in rows_at_once]
    own = torch.stack([objective.count(part) for part in microbatches]).sum()
    count, rows = _over_processes(own, len(batch.tokens), settings.token_group)
    sums = _add_up(module, microbatches, settings, (torch.where(count > 0, count, 1), rows), hooks)
    losses, reported, routing = sums.over_processes(settings.token_group)
    loss = sum(losses.values(), torch.zeros_like(losses["loss"]))
    parameters = [p for p in module.parameters() if p.grad is not None]
    with span("optimizer"):
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
    if hooks.on_gradients is not None:
        hooks.on_gradients()
    with span("optimizer"):
        CLIPPINGS[clipping.clipping_type](parameters, clipping.clipping_threshold, norm)
    result = StepResult(loss, norm, count, losses if len(losses) > 1 else {}, routing, reported)
    guard.observe(number, loss, norm)
    optimizer.found_inf = guard.found_inf  # type: ignore[attr-defined]
    if hooks.before_update is not None:
        hooks.before_update()
    with span("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if routing is not None:
            move_biases(module, routing.load, held=guard.found_inf)
    return result


def _add_up(
    module: nn.Module,
    microbatches: list[Batch],
    settings: StepSettings,
    divisors: tuple[Tensor, Tensor],
    hooks: StepHooks,
) -> StepSums:
    """The sums and gradients of a step; all processes agree that they have them, or all raise."""
    sums, shortage = StepSums(), ""
    if isinstance(module, Replicas):
        module.begin_passes()
    try:
        _passes(module, microbatches, settings, divisors, sums)
    except (MemoryError, RuntimeError) as error:
        if not (hooks.can_redo and is_out_of_memory(error)) or failed_collective(error):
            raise
        shortage = what_was_asked(error)
    if shortage:  # the error is gone, and with it what its frames held
        del sums
        release(module)
        sums = StepSums()
    if hooks.after_backward is not None:
        hooks.after_backward(shortage)
    assert not shortage, "after_backward raises then"
    return sums


def _passes(
    module: nn.Module,
    microbatches: list[Batch],
    settings: StepSettings,
    divisors: tuple[Tensor, Tensor],
    sums: StepSums,
) -> None:
    """Forward and backward passes of the microbatches, whose losses are added to `sums`.

    `divisors`: of losses and of routers' losses.
    """
    factor, each = sum_factor(module), settings.reduce_scatter_each
    for part in microbatches:
        with gradient_sync(module, last=part is microbatches[-1], each=each):
            with span("forward"), settings.autocast():
                (total, reported), routing = module(
                    part.tokens, part.layout, settings.objective.of(part), routing=True
                )
            shares = [total / divisors[0]]
            shares += [loss / divisors[1] for loss in routing.losses.values()] if routing else []
            with span("backward"):
                (sum(shares) * factor).backward()
        sums.add(shares, reported, routing)


def sum_factor(module: nn.Module) -> int:
    """What a loss is multiplied by so that reduced gradients are sums: DDP's are means."""
    if isinstance(module, DistributedDataParallel):
        return torch.distributed.get_world_size(module.process_group)
    return 1


@contextmanager
def gradient_sync(module: nn.Module, *, last: bool, each: bool = True) -> Iterator[None]:
    """Around a microbatch: add its gradients up over processes, now or in the step's last one.

    Replicas always wait for the last one. Shards that waited too would each hold the gradients of
    the full model until then.

    Args:
        module: as FSDP or DDP wrapped it, or neither.
        last: whether this microbatch is the step's last.
        each: reduce-scatter gradients after every microbatch.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or each)
        module.set_requires_all_reduce(last)
    yield


def _over_processes(
    count: Tensor, rows: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Labeled tokens and rows of the global batch, of this process's.

    Tokens count once; a row counts for each process that shares it, as its routers' losses do.
    """
    counts = torch.stack([count, torch.full_like(count, rows)])
    count, total = sum_over_processes(counts, group).unbind()
    return count, total


def _forward_only(module: nn.Module, settings: StepSettings) -> Look:
    """Forward passes alone, of as many rows at a time as the step takes."""

    @torch.no_grad()
    def look(
        batch: Batch, finish: Callable[[Batch], Callable[[Decoder, Tensor], Tensor]]
    ) -> Tensor:
        was_training = module.training
        module.eval()
        found = []
        try:
            for part in batch.split(settings.microbatch):
                with settings.autocast():
                    found.append(module(part.tokens, part.layout, finish(part)))
        finally:  # one that does not fit is done again, with dropout
            module.train(was_training)
        return torch.cat(found)

    return look


class StepSums:
    """Losses and loads over microbatches, and then over processes, in one message."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._reported: list[str] = []
        self._routing: Routing | None = None

    def add(
        self, shares: list[Tensor], reported: dict[str, Tensor], routing: Routing | None
    ) -> None:
        """Add a microbatch: its shares of the losses, the objective's first, and what else."""
        values = [share.detach() for share in [*reported.values(), *shares]]
        values += [routing.load, routing.probability, routing.tokens] if routing else []
        if self._sums:
            values = [a + b for a, b in zip(self._sums, values, strict=True)]
        self._sums, self._reported, self._routing = values, [*reported], routing

    def over_processes(
        self, group: dist.ProcessGroup | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Routing | None]:
        """The losses by name, the objective's being `loss`, what it reported, the routing."""
        flat = torch.cat([value.flatten() for value in self._sums])
        flat = sum_over_processes(flat, group)
        sizes = [value.numel() for value in self._sums]
        values = [
            part.view(value.shape)
            for part, value in zip(flat.split(sizes), self._sums, strict=True)
        ]
        reported = dict(zip(self._reported, values[: len(self._reported)], strict=True))
        values = values[len(reported) :]
        if self._routing is None:
            return {"loss": values[0]}, reported, None
        names = ["loss", *self._routing.losses]
        losses = dict(zip(names, values[: len(names)], strict=True))
        return losses, reported, Routing(losses, *values[len(names) :])


def clip_norm(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Scale all gradients so that their global L2 norm is at most `threshold`."""
    if norm.device.type == "cpu" and norm <= threshold:
        return  # elsewhere the question would wait for the device
    share = (threshold / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_(_gradients(parameters), share)


def clip_value(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Clamp every element to [-threshold, threshold]."""
    for gradient in _gradients(parameters):
        gradient.clamp_(-threshold, threshold)


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """What this process holds of them; those of several meshes meet in no operation of DTensors."""
    return [local_shard(p.grad) for p in parameters if p.grad is not None]


def clip_adaptive(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Scale each row of a gradient to at most `threshold` times its weights' norm.

    Unit-wise adaptive clipping (Brock et al., 2021): a unit is an output row of a matrix, or a
    whole vector; weights' norms count as 1e-3 at least, so that a bias at 0 can leave it (which
    Composer lacks).
    """
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    for parameter in parameters:
        if parameter.ndim >= 2:
            assert parameter.grad is not None
            share = _share(_row_norms(parameter.detach()), _row_norms(parameter.grad), threshold)
            local_shard(parameter.grad).mul_(share)
    if vectors:
        gradients = [parameter.grad for parameter in vectors if parameter.grad is not None]
        shares = _share(l2_norms([p.detach() for p in vectors]), l2_norms(gradients), threshold)
        for gradient, share in zip(gradients, shares.unbind(), strict=True):
            local_shard(gradient).mul_(share)


def _row_norms(matrix: Tensor) -> Tensor:
    """(rows, 1, …), in fp32, of the local rows; over all columns also where those are sharded."""
    own, across = local_shard(matrix), ShardLayout.of(matrix).tensor
    dims = tuple(range(1, matrix.ndim))
    norms = torch.linalg.vector_norm(own, dim=dims, keepdim=True, dtype=torch.float32)
    if across is None or across.dim == 0:
        return norms
    return sum_over_processes(norms.square(), across.group).sqrt()


def _share(weights: Tensor, gradients: Tensor, threshold: float) -> Tensor:
    """What is kept of gradients of these norms."""
    return (weights.clamp(min=1e-3) * threshold / gradients).clamp(max=1.0)


CLIPPINGS: dict[str, Callable[[list[nn.Parameter], float, Tensor], None]] = {
    "norm": clip_norm,
    "value": clip_value,
    "adaptive": clip_adaptive,
}

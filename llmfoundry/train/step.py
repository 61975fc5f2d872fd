"""One optimizer step: microbatches, exact global mean loss, clipping, guard, update.

`Trainer` calls `train_step`, which minimizes an `Objective` (`objective.py`). The step never
synchronizes with the device: the loss, the gradient norm and the verdict of the guard
(`spikes.py`) stay tensors until the trainer logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.distributed.failures import failed_collective
from llmfoundry.errors import UserError, is_out_of_memory, requested_memory
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.moe import cast_experts, exact_exchanges
from llmfoundry.models.router import Routing, move_biases
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.ops.shard_layout import ShardLayout, l2_norms, local_shard, total_norm
from llmfoundry.ops.torch_private import Replicas
from llmfoundry.recipe.optimizer import GradientClippingConfig
from llmfoundry.telemetry import span
from llmfoundry.train.objective import (
    CROSS_ENTROPY,
    OWN_COUNT,
    Z_LOSS,
    Look,
    Objective,
    sum_over_processes,
)
from llmfoundry.train.out_of_memory import release
from llmfoundry.train.spikes import Guard


@dataclass
class StepResult:
    """Results of one step, as tensors on the device.

    Attributes:
        loss: (), the total loss: the objective's mean over the global batch (cross-entropy: nats
            per labeled token) plus the auxiliary losses of routers.
        grad_norm: (), global L2 norm of the gradient before clipping.
        count: (), labeled tokens of the global batch, or another divisor of the objective.
        parts: with auxiliary losses, the summands of `loss`: the objective's, named `loss`, those
            of `Routing.losses`, and `z_loss`, that of logits; else empty.
        routing: load and probability of every expert over the global batch; None without experts.
        reported: sums over the global batch that the objective's `metrics` are computed from.
        overflow: rows that exceeded parallel.expert_capacity on any rank, for which the passes of
            the step were repeated.
    """

    loss: Tensor
    grad_norm: Tensor
    count: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    routing: Routing | None = None
    reported: dict[str, Tensor] = field(default_factory=dict)
    overflow: int = 0


@dataclass(frozen=True)
class StepSettings:
    """Settings that all steps of a run share."""

    microbatch: int
    """Sequences per forward pass."""
    autocast: Callable[[], AbstractContextManager[None]]
    """Returns the autocast context of a forward pass."""
    clipping: GradientClippingConfig
    objective: Objective = CROSS_ENTROPY
    data_group: dist.ProcessGroup | None = None
    """Ranks whose sequences make up the global batch; None: all ranks."""
    token_group: dist.ProcessGroup | None = None
    """Ranks whose tokens make up the global batch, context-parallel ranks included; None: all."""
    shard_tokens: Callable[[Batch], Batch] | None = None
    """With context parallelism: selects this rank's tokens of a microbatch; None: all tokens."""
    reduce_scatter_each: bool = True
    """Whether FSDP reduce-scatters gradients after every microbatch, not only after the last."""


def not_finite(model: nn.Module) -> str:
    """Return the name of a parameter whose local shard has NaN or infinite values; empty: none."""
    for name, parameter in model.named_parameters():
        if not local_shard(parameter.detach()).isfinite().all():
            return name
    return ""


def not_a_step(model: nn.Module | None, batch: int, own_loss: str = "") -> UserError:
    """Return the error that ends the run after a step with a loss or gradient that is not finite.

    Args:
        model: given if the step was the run's first, to check the initial weights; else None.
        batch: number of steps before it.
        own_loss: name of the loss if a plugin or a program has it; empty: it is the project's.
    """
    if model is not None and (name := not_finite(model)):
        return UserError(
            f"{name}: the weights that the run began with are damaged: they hold numbers that"
            " are not finite; write others (model.pretrained, adapter.pretrained, load_path)"
        )
    if own_loss:
        return UserError(
            f"loss: {own_loss}, or its gradient, was not finite in step {batch + 1}; the optimizer"
            " did not see it, and what was saved before is sound; look for logarithms and divisions"
            " by 0 in it, or write a smaller optimizer.lr"
        )
    return UserError(
        f"optimizer.lr: the loss or its gradient was not finite in step {batch + 1}; the"
        " optimizer did not see it, and what was saved before is sound; write a smaller lr, a"
        " longer schedule.t_warmup, or precision=fp32, and run the same command"
    )


@dataclass(frozen=True)
class StepHooks:
    """Functions that a step calls between its stages; None: nothing is called.

    Attributes:
        after_backward: called on every rank after the backward passes, with the text of this
            rank's out-of-memory error (empty: none). If it raises, weights and optimizer state are
            those before the step.
        on_gradients: called while parameters hold the step's gradients, before clipping.
        before_update: called before the optimizer. If it raises, the weights are unchanged.
        can_redo: whether an out-of-memory error is passed to `after_backward`; else it is raised.
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
    """Run one optimizer step on this rank's part of the global batch.

    Args:
        module: the `Root`, as wrapped by FSDP or DDP.
        optimizer: a fused optimizer.
        batch: this rank's sequences, on its device.
        settings: settings shared by all steps.
        number: index of the step, from 0.
        guard: decides, on the device, whether the optimizer skips the update.
        hooks: functions called between the stages.

    Returns:
        Losses, gradient norm and routing statistics of the global batch.
    """
    # split this rank's part of the global batch into microbatches
    objective, clipping, shard = settings.objective, settings.clipping, settings.shard_tokens
    batch = objective.prepare(batch, _forward_only(module, settings), settings.data_group)
    microbatches = list(batch.split(settings.microbatch))
    if shard is not None:
        microbatches = [shard(microbatch) for microbatch in microbatches]

    # the divisors of the losses are needed before the first backward pass
    local_counts = torch.stack([objective.count(microbatch) for microbatch in microbatches])
    local_count, local_sequences = local_counts.sum(), len(batch.tokens)
    count, sequences = _global_counts(local_count, local_sequences, settings.token_group)
    divisors = (torch.where(count > 0, count, 1), sequences)

    # forward and backward passes, then one all-reduce of the losses
    sums, overflow = _compute_gradients(module, microbatches, settings, divisors, hooks)
    losses, reported, routing = sums.over_processes(settings.token_group)
    parameters = [p for p in module.parameters() if p.grad is not None]
    if OWN_COUNT in reported:
        count = reported.pop(OWN_COUNT)
        losses["loss"] = _correct_divisor(parameters, losses["loss"], divisors[0], count)
    loss = sum(losses.values(), torch.zeros_like(losses["loss"]))
    if Z_LOSS in reported:
        losses[Z_LOSS] = reported.pop(Z_LOSS) / divisors[0]
        losses["loss"] = losses["loss"] - losses[Z_LOSS]

    # clip the gradients
    with span("optimizer"):
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
    if hooks.on_gradients is not None:
        hooks.on_gradients()
    with span("optimizer"):
        CLIPPINGS[clipping.clipping_type](parameters, clipping.clipping_threshold, norm)
    parts = losses if len(losses) > 1 else {}
    result = StepResult(loss, norm, count, parts, routing, reported, overflow)

    # update the weights; a fused optimizer skips the update where found_inf is 1
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


def _compute_gradients(
    module: nn.Module,
    microbatches: list[Batch],
    settings: StepSettings,
    divisors: tuple[Tensor, Tensor],
    hooks: StepHooks,
) -> tuple[StepSums, int]:
    """Return the sums of `_accumulate`, and by how many rows the experts' capacity overflowed.

    After an overflow, gradients are NaN on some ranks, and are computed again without a capacity.
    """
    sums = _accumulate(module, microbatches, settings, divisors, hooks)
    overflow = sums.overflow()
    if overflow:
        module.zero_grad(set_to_none=True)
        with exact_exchanges(module):
            sums = _accumulate(module, microbatches, settings, divisors, hooks)
    return sums, overflow


def _accumulate(
    module: nn.Module,
    microbatches: list[Batch],
    settings: StepSettings,
    divisors: tuple[Tensor, Tensor],
    hooks: StepHooks,
) -> StepSums:
    """Accumulate losses and gradients over microbatches.

    With `hooks.after_backward`, all ranks agree that every rank succeeded, or all raise.
    """
    sums, shortage = StepSums(), ""
    if isinstance(module, Replicas):
        module.begin_passes()
    try:
        shared = cast_experts(module) if len(microbatches) > 1 else nullcontext()
        with shared:
            _run_microbatches(module, microbatches, settings, divisors, sums)
    except (MemoryError, RuntimeError) as error:
        if not (hooks.can_redo and is_out_of_memory(error)) or failed_collective(error):
            raise
        shortage = requested_memory(error)
    if shortage:  # the handled error is freed, and with it the tensors that its frames held
        del sums
        release(module)
        sums = StepSums()
    if hooks.after_backward is not None:
        hooks.after_backward(shortage)
    assert not shortage, "after_backward raises then"
    return sums


def _run_microbatches(
    module: nn.Module,
    microbatches: list[Batch],
    settings: StepSettings,
    divisors: tuple[Tensor, Tensor],
    sums: StepSums,
) -> None:
    """Run the forward and backward passes of all microbatches and add their losses to `sums`.

    `divisors` are those of the objective's loss and of the routers' losses.
    """
    loss_divisor, routing_divisor = divisors
    factor, each = sum_factor(module), settings.reduce_scatter_each
    for microbatch in microbatches:
        with gradient_sync(module, last=microbatch is microbatches[-1], each=each):
            with span("forward"), settings.autocast():
                finish = settings.objective.of(microbatch)
                (total, reported), routing = module(
                    microbatch.tokens, microbatch.layout, finish, routing=True
                )
            if OWN_COUNT in reported and routing is not None and routing.losses:
                raise UserError(
                    "loss: the routers of this model add losses with a divisor of their own; return"
                    " losses (B, T) for tokens"
                )
            losses = [total / loss_divisor]
            if routing is not None:
                losses += [loss / routing_divisor for loss in routing.losses.values()]
            with span("backward"):
                (sum(losses) * factor).backward()
        sums.add(losses, reported, routing)


def _correct_divisor(
    parameters: list[nn.Parameter], loss: Tensor, divisor: Tensor, count: Tensor
) -> Tensor:
    """Divide gradients and loss by `count` in place of `divisor`; by a count of 0 they become 0.

    Returns:
        The loss; gradients are changed in place.
    """
    factor = torch.where(count > 0, divisor / count, 0.0)
    torch._foreach_mul_(_local_gradients(parameters), factor)
    return loss * factor


def sum_factor(module: nn.Module) -> int:
    """Return the factor on the loss that turns reduced gradients into sums: DDP averages them."""
    if isinstance(module, DistributedDataParallel):
        return torch.distributed.get_world_size(module.process_group)
    return 1


@contextmanager
def gradient_sync(module: nn.Module, *, last: bool, each: bool = True) -> Iterator[None]:
    """Reduce the gradients of the enclosed microbatch over ranks now, or in the last microbatch.

    DDP, and the replica dimension of HSDP, reduce once per step, in the last microbatch. If FSDP
    also waited, each rank would hold the unsharded gradients of the full model until then.

    Args:
        module: the model, as wrapped by FSDP, DDP or neither.
        last: whether this microbatch is the last of the step.
        each: whether FSDP reduce-scatters gradients after every microbatch.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or each)
        module.set_requires_all_reduce(last)
    yield


def _global_counts(
    count: Tensor, sequences: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Sum this rank's labeled tokens and sequences over the global batch.

    Each token counts once. A sequence counts once per context-parallel rank, as the losses of its
    routers do.
    """
    counts = torch.stack([count, torch.full_like(count, sequences)])
    global_count, global_sequences = sum_over_processes(counts, group).unbind()
    return global_count, global_sequences


def _forward_only(module: nn.Module, settings: StepSettings) -> Look:
    """Return a `Look` that runs the forward pass microbatch by microbatch."""

    @torch.no_grad()
    def look(
        batch: Batch, finish: Callable[[Batch], Callable[[Decoder, Tensor], Tensor]]
    ) -> Tensor:
        was_training = module.training
        module.eval()
        results = []
        try:
            for microbatch in batch.split(settings.microbatch):
                with settings.autocast():
                    result = module(microbatch.tokens, microbatch.layout, finish(microbatch))
                    results.append(result)
        finally:  # a step that ran out of memory is repeated, with dropout
            module.train(was_training)
        return torch.cat(results)

    return look


class StepSums:
    """Losses and expert loads, summed over microbatches and then, in one all-reduce, over ranks."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._reported: list[str] = []
        self._routing: Routing | None = None
        self._overflow: Tensor | None = None

    def add(
        self, losses: list[Tensor], reported: dict[str, Tensor], routing: Routing | None
    ) -> None:
        """Add a microbatch.

        Args:
            losses: its shares of the mean losses: the objective's, then those of `routing`.
            reported: sums that the objective reports.
            routing: statistics of its routers; None without experts.
        """
        values = [value.detach() for value in [*reported.values(), *losses]]
        values += [routing.load, routing.probability, routing.tokens] if routing else []
        if self._sums:
            values = [a + b for a, b in zip(self._sums, values, strict=True)]
        self._sums, self._reported, self._routing = values, [*reported], routing
        if routing is not None and routing.overflow is not None:
            more = 0 if self._overflow is None else self._overflow
            self._overflow = routing.overflow.detach() + more

    def overflow(self) -> int:
        """Return the rows of all ranks that exceeded parallel.expert_capacity.

        With a capacity, the host waits for the passes of the step here, and nowhere else.
        """
        if self._overflow is None:
            return 0
        return int(sum_over_processes(self._overflow, None))

    def over_processes(
        self, group: dist.ProcessGroup | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Routing | None]:
        """Sum over the ranks of a group; None: over all ranks.

        Returns:
            The losses by name (the objective's is `loss`), the reported sums, and the routing
            statistics.
        """
        # one all-reduce of all values
        flat = torch.cat([value.flatten() for value in self._sums])
        flat = sum_over_processes(flat, group)
        sizes = [value.numel() for value in self._sums]
        pieces = zip(flat.split(sizes), self._sums, strict=True)
        values = [piece.view(local.shape) for piece, local in pieces]

        # unpack in the order of `add`: reported sums, losses, routing statistics
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
        return  # on a GPU, the comparison would synchronize with the device
    factor = (threshold / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_(_local_gradients(parameters), factor)


def clip_value(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Clamp every element to [-threshold, threshold]."""
    for gradient in _local_gradients(parameters):
        gradient.clamp_(-threshold, threshold)


def _local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the local shards of the gradients.

    DTensor operations reject a list whose tensors are on several device meshes.
    """
    return [local_shard(p.grad) for p in parameters if p.grad is not None]


def clip_adaptive(parameters: list[nn.Parameter], threshold: float, norm: Tensor) -> None:
    """Scale the gradient of each unit so that its norm is at most `threshold` times the weights'.

    Unit-wise adaptive clipping (Brock et al., 2021). A unit is one output row of a matrix, or one
    vector. The norm of the weights is taken as at least 1e-3, so that a bias at 0 can move away
    from 0 (Composer has no such minimum).
    """
    # matrices: one factor per output row
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    for parameter in parameters:
        if parameter.ndim >= 2:
            assert parameter.grad is not None
            weight_norms = _row_norms(parameter.detach())
            factors = _adaptive_factors(weight_norms, _row_norms(parameter.grad), threshold)
            local_shard(parameter.grad).mul_(factors)

    # vectors: one factor each, with the norms of all of them in one call
    if vectors:
        gradients = [parameter.grad for parameter in vectors if parameter.grad is not None]
        weight_norms = l2_norms([parameter.detach() for parameter in vectors])
        factors = _adaptive_factors(weight_norms, l2_norms(gradients), threshold)
        for gradient, factor in zip(gradients, factors.unbind(), strict=True):
            local_shard(gradient).mul_(factor)


def _row_norms(matrix: Tensor) -> Tensor:
    """Return the fp32 L2 norms (rows, 1, …) of the local rows.

    Where tensor parallelism shards the columns, the norms are those of full rows.
    """
    shard, tensor_shards = local_shard(matrix), ShardLayout.of(matrix).tensor
    dims = tuple(range(1, matrix.ndim))
    norms = torch.linalg.vector_norm(shard, dim=dims, keepdim=True, dtype=torch.float32)
    if tensor_shards is None or tensor_shards.dim == 0:
        return norms
    return sum_over_processes(norms.square(), tensor_shards.group).sqrt()


def _adaptive_factors(weight_norms: Tensor, gradient_norms: Tensor, threshold: float) -> Tensor:
    """Return the factors (at most 1) that adaptive clipping scales gradients by."""
    return (weight_norms.clamp(min=1e-3) * threshold / gradient_norms).clamp(max=1.0)


CLIPPINGS: dict[str, Callable[[list[nn.Parameter], float, Tensor], None]] = {
    "norm": clip_norm,
    "value": clip_value,
    "adaptive": clip_adaptive,
}

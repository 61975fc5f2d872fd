"""Cross-entropy and log-probabilities of an output head, without materializing all logits.

Entry points: `linear_losses` for training, `linear_cross_entropy` for validation,
`linear_log_probs` for preference tuning; `distillation.py` adds a teacher. The idea: a `HeadPass`
computes the logits of one chunk of tokens at a time. While they are in memory, it computes the loss
and adds the chunk's part to the gradients. The backward pass of the cross-entropy only scales these
gradients. For log-probabilities the upstream gradient differs per token and is known only in the
backward pass, which recomputes the logits of each chunk. This costs a fourth matmul over the head
and no memory.

Between the matmuls, PyTorch operations (`_plain_loss`) or, on CUDA, one kernel of `loss_triton.py`
(`_fused_loss`) turn the logits of a chunk into losses and gradients. `has_kernel` selects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmfoundry.ops.devices import kind_of, planned
from llmfoundry.ops.packed_layout import IGNORE

CHUNK_LOGITS = 1 << 22  # logits per chunk on a CPU: 16 MiB in fp32, about half of its cache
PART = 1 << 18  # values summed at a time on a CPU
MIN_CHUNK = 256  # tokens; a smaller matmul does not use the device fully
CUDA_CHUNK_BYTES = 2 << 30  # fp32 logits per chunk on a GPU
CUDA_MAX_CHUNK = 8192
"""Largest chunk on a GPU, in tokens.

Each chunk reads the head twice, and reads and writes its gradient: 12 bytes per weight, whose
matmuls take 6 operations per token. On an H100 (3.35 TB/s, 800 TFLOP/s), this traffic takes 1.9
times the time of the matmuls at 256 tokens, 0.12 at 4,096 and 0.06 at 8,192."""
CUDA_TILE = 128  # tokens that a kernel computes together: chunks are multiples of it


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    """Return the sum of the cross-entropy, (), with the settings of `linear_losses`."""
    return linear_losses(hidden, weight, labels, **settings)[0]


def linear_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
    z_loss_weight: float = 0.0,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropy and z-loss, and the z-loss, each (), in fp32.

    With the logits y = cap(hidden @ weight.T), the losses of a labeled token are
    -log softmax(y)[label] and z_loss_weight * logsumexp(y)^2. The z-loss keeps the log-sum-exp near
    0, on which the cross-entropy does not depend (PaLM: Chowdhery et al., 2022, section 5). The
    second result is for logs and has no gradient.

    Matmuls run in autocast's dtype if it is enabled; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; tokens with IGNORE are not in the loss.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
        weights: (...), loss weight of each token; None: 1.
        z_loss_weight: factor on the squared log-sum-exp; 0: no z-loss.
        chunk: tokens whose logits are in memory at a time; None: chosen for the device.
        shard: the rows of the head in `weight`, under tensor parallelism; None: all rows. Every
            rank passes the same tokens and gets the same result, but only its summand of the
            gradient of the hidden states.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    weights = None if weights is None else weights.flatten()
    labeled = labelled_places(labels)
    if labeled is not None:
        hidden, labels = hidden[labeled], labels[labeled]
        weights = None if weights is None else weights[labeled]
    options = HeadOptions(product_dtype(hidden), scale, softcap, chunk, shard, z_loss_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels, weights, options)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy whose forward pass also computes the gradients of the sum, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        wants = ctx.needs_input_grad[:2]
        run = HeadPass(hidden, weight, labels, options, wants=wants)
        total = hidden.new_zeros((), dtype=run.wide)
        z_total = torch.zeros_like(total)
        for part in run.parts():
            factor = None if weights is None else weights[part, None]
            nats, z_loss = run.losses(part, factor)
            total += (nats if factor is None else nats * factor).sum()
            if z_loss is not None:
                z_total += (z_loss if factor is None else z_loss * factor).sum()
        if options.z_weight:
            total += z_total
        save_gradients(ctx, run, weight.dtype, options.scale)
        ctx.mark_non_differentiable(z_total)
        return total, z_total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *saved_gradients(ctx, grads[0]), None, None, None


def save_gradients(ctx: Any, run: HeadPass, weight_dtype: torch.dtype, scale: float) -> None:
    """Save the gradients of a pass for `saved_gradients`."""
    ctx.save_for_backward(run.grad_hidden, run.grad_weight)
    ctx.weight_dtype, ctx.scale = weight_dtype, scale


def saved_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the saved gradients of hidden states and head, times the loss's gradient, ()."""
    scale = grad * ctx.scale  # the factor on the logits, applied once per gradient
    grad_hidden, grad_weight = ctx.saved_tensors
    if grad_hidden is not None:  # multiply in fp32: a bf16 scale has an error of up to 0.4 %
        grad_hidden = (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype)
    if grad_weight is not None:
        grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
    return grad_hidden, grad_weight


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return (...), fp32: log softmax(cap(hidden @ weight.T))[label]; 0 for tokens without a label.

    Matmuls run in autocast's dtype if it is enabled; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE: no label.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
        chunk: tokens whose logits are in memory at a time; None: chosen for the device.
        shard: the rows of the head in `weight`, as in `linear_cross_entropy`.
    """
    shape, options = labels.shape, HeadOptions(product_dtype(hidden), scale, softcap, chunk, shard)
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    labeled = labelled_places(labels)
    with torch.autocast(hidden.device.type, enabled=False):
        if labeled is None:
            return _LinearLogProbs.apply(hidden, weight, labels, options).view(shape)
        log_probs = _LinearLogProbs.apply(hidden[labeled], weight, labels[labeled], options)
        return log_probs.new_zeros(labels.shape).index_put((labeled,), log_probs).view(shape)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities computed in chunks in both passes; only the inputs are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: HeadOptions,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = options
        run = HeadPass(hidden, weight, labels, options, wants=(False, False))
        log_probs = hidden.new_empty(len(hidden), dtype=run.wide)
        for part in run.parts():
            log_probs[part] = -run.losses(part)[0][:, 0]
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        run = HeadPass(hidden, weight, labels, ctx.options, wants=ctx.needs_input_grad[:2])
        factor = -ctx.options.scale * grad[:, None]
        for part in run.parts():
            run.losses(part, factor[part])
        grad_weight = None if run.grad_weight is None else run.grad_weight.to(weight.dtype)
        return run.grad_hidden, grad_weight, None, None


def cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scale logits and, with a cap c, return c * tanh(logits / c); computed in fp32 or wider."""
    if scale == 1 and softcap is None:
        return logits
    wide = scale * (logits if logits.dtype == torch.float64 else logits.float())
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    return wide.to(logits.dtype)


def chunk_tokens(vocab_size: int, device: torch.device, asked: int | None = None) -> int:
    """Return the number of tokens whose logits are in memory at a time; `asked` if it is not None.

    On CUDA: CUDA_CHUNK_BYTES / (4 * V), in multiples of CUDA_TILE and at most CUDA_MAX_CHUNK. This
    is 8,192 tokens up to a vocabulary of 65,536, and 4,096 at 131,072. It does not depend on free
    memory: otherwise losses would differ in the last bit between machines. Elsewhere:
    CHUNK_LOGITS / V.
    """
    if asked is not None:
        return asked
    if kind_of(device) != "cuda":
        return max(MIN_CHUNK, CHUNK_LOGITS // vocab_size)
    tokens = CUDA_CHUNK_BYTES // (4 * vocab_size) // CUDA_TILE * CUDA_TILE
    return min(CUDA_MAX_CHUNK, max(MIN_CHUNK, tokens))


def logit_bytes(device: torch.device, *, capped: bool) -> int:
    """Return the peak memory in bytes per logit of a chunk.

    The kernel writes the gradient over the fp32 logits. PyTorch operations hold logits and their
    softmax, later the softmax and its bf16 copy for the matmuls of the gradient, and with a softcap
    also its derivative. On a CPU, the softmax overwrites the logits, and scratch memory is added.
    """
    if has_kernel(device, torch.float32):
        return 4
    return 8 if kind_of(device) == "cuda" and not capped else 12


def logit_traffic(grad_dtype: torch.dtype | None) -> int:
    """Return the bytes per logit that the kernel reads and writes: 10 with bf16 gradients.

    Args:
        grad_dtype: dtype of the gradients; None: only the loss is computed.
    """
    return 4 if grad_dtype is None else 4 + 4 + grad_dtype.itemsize


def has_kernel(device: torch.device, wide: torch.dtype) -> bool:
    """Return whether the kernel computes the loss: on CUDA with Triton, unless in float64."""
    if kind_of(device) != "cuda" or wide != torch.float32:
        return False
    return planned() is not None or _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matmuls of `dtype` can write fp32 (PyTorch's `out_dtype`, CUDA only)."""
    low = dtype in (torch.bfloat16, torch.float16)
    return low and kind_of(device) == "cuda" and torch.version.hip is None


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of matmuls over hidden states: autocast's dtype if it is enabled."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def labelled_places(labels: Tensor) -> Tensor | None:
    """Return (n,), the indices of labeled tokens, so that a CPU can skip the other tokens.

    None if all tokens are labeled or none is, and on other devices, where the number of labeled
    tokens would require a synchronization.
    """
    if kind_of(labels.device) != "cpu" or planned() is not None:
        return None
    indices = (labels != IGNORE).nonzero()[:, 0]
    return indices if 0 < len(indices) < len(labels) else None


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of an output head that is sharded by vocabulary.

    Attributes:
        group: the ranks that share the head. All of them process the same tokens.
        first: token id of this rank's first row.
        size: V, size of the full vocabulary.
    """

    group: dist.ProcessGroup
    first: int
    size: int

    def meet(self, log_sum: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce values to the full vocabulary, by one all-gather of 4 bytes per value (fp32).

        Args:
            log_sum: (n, a), log of the sum of exp(logits) over this rank's rows; one column for
                each of the a forms of the logits.
            at_target: (n, b), the logits of b tokens where this rank has their rows, else 0.

        Returns:
            Log-sum-exp over the full vocabulary (n, a), and the logits of the tokens (n, b).
        """
        local = torch.cat([log_sum, at_target], 1)  # (n, a + b)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, local, group=self.group)
        values, n_sums = torch.stack(gathered), log_sum.shape[1]  # (ranks, n, a + b)
        return values[..., :n_sums].logsumexp(0), values[..., n_sums:].sum(0)


@dataclass(frozen=True)
class HeadOptions:
    """Settings for logits from hidden states (N, D) and an output head (V, D).

    Attributes:
        dtype: dtype of matmuls.
        scale: factor on the logits.
        softcap: as in `cap`.
        chunk: tokens per chunk; None: the result of `chunk_tokens`.
        shard: this rank's rows of a head sharded by vocabulary; the gradient of hidden states is
            then this rank's summand. None: all rows.
        z_weight: factor on the squared log-sum-exp of the logits; 0: no z-loss.
    """

    dtype: torch.dtype
    scale: float = 1.0
    softcap: float | None = None
    chunk: int | None = None
    shard: VocabularyShard | None = None
    z_weight: float = 0.0


class HeadPass:
    """One pass over all chunks. For each chunk, call `losses`.

    Attributes:
        wide: dtype of softmax and sums: fp32 or float64.
        grad_hidden: (N, D), accumulated gradient of the hidden states; None: not computed.
        grad_weight: (V, D), accumulated gradient of the head, in `wide`; None: not computed.
        wants: whether any gradient is computed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: HeadOptions,
        *,
        wants: tuple[bool, bool],
    ) -> None:
        """Allocate the gradients and scratch memory.

        Args:
            hidden: (N, D).
            weight: (V, D), the output head.
            labels: (N,), int64; IGNORE: not in the loss.
            options: settings for the logits.
            wants: whether to compute the gradients of hidden states and of the head.
        """
        dtype = options.dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.grad_hidden = torch.empty_like(hidden) if wants[0] else None
        self.grad_weight = torch.zeros_like(weight, dtype=self.wide) if wants[1] else None
        self._hidden, self._labels, self._weight = hidden, labels, weight.to(dtype)
        self._chunk = chunk_tokens(weight.shape[0], weight.device, options.chunk)
        self._options, self.wants = options, any(wants)
        self._products: _Wide | _Scratch = (
            _Wide(dtype)
            if sums_wide(weight.device, dtype)
            else _Scratch(min(self._chunk, len(hidden)), weight, dtype, self.wide)
        )

    def parts(self) -> Iterator[slice]:
        """Yield the chunks of tokens, in order."""
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, start + self._chunk)

    def losses(self, part: slice, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the losses of a chunk, and add its gradients if any are wanted.

        Args:
            part: the chunk.
            factor: (n, 1), upstream gradient of the losses; None: 1. The caller applies the factor
                `scale` of the logits to the gradients.

        Returns:
            (n, 1), -log softmax(cap(hidden @ weight.T))[label], and the z-loss (n, 1), None without
            one; 0 if unlabeled.
        """
        target, options = self._labels[part], self._options
        is_fused = has_kernel(self._weight.device, self.wide)
        # no variable holds the logits, so that PyTorch operations can free them
        loss = (_fused_loss if is_fused else _plain_loss)(
            self.logits(part), target, factor, options, self.wants
        )
        if loss.grad is not None:
            self.add_gradients(part, loss.grad, is_fused=is_fused)
        return loss.nats, loss.z_loss

    def logits(self, part: slice) -> Tensor:
        """Return the uncapped logits (n, V) of a chunk, in `wide`; the caller may overwrite them.

        They are valid until the next call.
        """
        self._low_hidden = self._hidden[part].to(self._weight.dtype)
        return self._products.logits(self._low_hidden, self._weight)

    def add_gradients(self, part: slice, grad: Tensor, *, is_fused: bool = False) -> None:
        """Add the gradients of the chunk whose `logits` were computed last.

        Args:
            part: the chunk.
            grad: (n, V), as in `LogitLoss`.
            is_fused: whether the kernel computed `grad`.
        """
        low_hidden = self._low_hidden
        low_grad = grad if is_fused else self._products.narrow(grad)
        # PyTorch operations do not mask unlabeled tokens in tensors of width V; it is cheaper in D
        keep = None if is_fused else (self._labels[part] != IGNORE)[:, None]
        if self.grad_hidden is not None:
            grad_hidden = torch.mm(low_grad, self._weight)
            self.grad_hidden[part] = grad_hidden if keep is None else grad_hidden * keep
        if self.grad_weight is not None:
            low_hidden = low_hidden if keep is None else low_hidden * keep
            self._products.add_product(self.grad_weight, low_grad, low_hidden)


class LogitLoss(NamedTuple):
    """Loss of a chunk of n tokens.

    Attributes:
        nats: (n, 1), -log softmax(capped logits)[label]; 0 if unlabeled.
        z_loss: (n, 1), z_weight * logsumexp(capped logits)^2; 0 if unlabeled. None: no z-loss.
        grad: (n, V), gradient of the capped and scaled logits, divided by the scale: in the dtype
            of matmuls from the kernel, in that of the logits from PyTorch operations, where rows of
            unlabeled tokens are undefined. None: not computed.
    """

    nats: Tensor
    z_loss: Tensor | None
    grad: Tensor | None


def _plain_loss(
    logits: Tensor, labels: Tensor, factor: Tensor | None, options: HeadOptions, wants: bool
) -> LogitLoss:
    """Return the loss of uncapped logits (n, V), which are overwritten, in PyTorch operations."""
    slope = cap_in_place(logits, options.scale, options.softcap)

    # the column of each label, if this rank has it
    shard, keep, column = options.shard, (labels != IGNORE)[:, None], labels[:, None]
    mine = keep
    if shard is not None:
        column = column - shard.first
        mine = keep & (column >= 0) & (column < logits.shape[1])
    index = torch.where(mine, column, 0)
    at_target, peak = logits.gather(1, index), logits.amax(-1, keepdim=True)

    # softmax, in place on a CPU; PyTorch does not guarantee that on other devices
    on_cpu = kind_of(logits.device) == "cpu"
    shares = torch.softmax(logits, -1, out=logits if on_cpu else None)
    del logits
    # log-sum-exp from the largest probability, which is never zero
    log_sum = peak - shares.amax(-1, keepdim=True).log()

    # with a sharded head, over all ranks
    if shard is not None:
        local_log_sum = log_sum
        local_target = torch.where(mine, at_target, 0)
        log_sum, at_target = shard.meet(local_log_sum, local_target)
        shares.mul_((local_log_sum - log_sum).exp())
    nats, z_loss = torch.where(keep, log_sum - at_target, 0.0), _z_loss(log_sum, keep, options)
    if not wants:
        return LogitLoss(nats, z_loss, None)

    # gradient of the logits: softmax - 1 at the label; one index per row is deterministic
    if options.z_weight:
        shares.mul_(1 + 2 * options.z_weight * log_sum)
    one = 1 if shard is None else mine.to(shares.dtype)
    shares.scatter_(1, index, shares.gather(1, index) - one)
    if slope is not None:
        shares.mul_(slope)
    if factor is not None:
        shares.mul_(factor)
    return LogitLoss(nats, z_loss, shares)


def _z_loss(log_sum: Tensor, keep: Tensor, options: HeadOptions) -> Tensor | None:
    """Return the z-loss (n, 1) of tokens with a label; None if there is none."""
    if not options.z_weight:
        return None
    return torch.where(keep, options.z_weight * log_sum.square(), 0.0)


def _fused_loss(
    logits: Tensor, labels: Tensor, factor: Tensor | None, options: HeadOptions, wants: bool
) -> LogitLoss:
    """Return the loss of uncapped fp32 logits (n, V), which are overwritten, by the kernel.

    With a sharded head it runs twice, as the log-sum-exp needs communication.
    """
    run, shard, grad_dtype = torch.ops.llmfoundry.logit_pass, options.shard, options.dtype
    first = None if shard is None else shard.first
    settings = (first, options.scale, options.softcap, options.z_weight)
    local_dtype = grad_dtype if wants and shard is None else None
    log_sum, at_target = run(logits, labels, factor, None, *settings, local_dtype)
    if shard is not None:
        log_sum, at_target = shard.meet(log_sum, at_target)
        if wants:
            run(logits, labels, factor, log_sum, *settings, grad_dtype)
    keep = (labels != IGNORE)[:, None]
    nats, z_loss = torch.where(keep, log_sum - at_target, 0.0), _z_loss(log_sum, keep, options)
    if not wants:
        return LogitLoss(nats, z_loss, None)
    return LogitLoss(nats, z_loss, logits.view(grad_dtype)[:, : logits.shape[1]])


@torch.library.custom_op(
    "llmfoundry::logit_pass",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor labels, Tensor? factor, Tensor? log_sum, int? first,"
    " float scale, float? softcap, float z_weight, ScalarType? grad_dtype) -> (Tensor, Tensor)",
)
def logit_pass(
    logits: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    log_sum: Tensor | None,
    first: int | None,
    scale: float,
    softcap: float | None,
    z_weight: float,
    grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel over uncapped logits; an operator, so that it runs on fake tensors, too.

    Args:
        logits: (n, V), fp32. Gradients are written to the start of each row.
        labels: (n,), int64.
        factor: (n, 1), upstream gradient; None: 1.
        log_sum: (n, 1), log-sum-exp over the vocabulary of all ranks; None: it is computed.
        first: token id of the first column of a sharded head; None: the head is not sharded.
        scale: factor on the logits.
        softcap: as in `cap`.
        z_weight: factor on the squared log-sum-exp, for the gradient.
        grad_dtype: dtype of the gradients; None: they are not computed.

    Returns:
        Log-sum-exp and the label's logit over these columns, (n, 1) each; both undefined if
        `log_sum` is passed, and 0 for unlabeled tokens.
    """
    from llmfoundry.ops import loss_triton

    return loss_triton.logit_pass(
        logits, labels, factor, log_sum, first, scale, softcap, z_weight, grad_dtype
    )


@logit_pass.register_fake
def _(
    logits: Tensor, labels: Tensor, factor: Tensor | None, log_sum: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), 1), logits.new_empty(len(logits), 1)


class _Wide:
    """Matmuls of 16-bit matrices with fp32 results, without intermediate rounding (CUDA).

    New tensors cost nothing, as they come from the caching allocator. `addmm` can add to fp32 since
    PyTorch 2.10 (pytorch#167931).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def logits(self, low_hidden: Tensor, low_weight: Tensor) -> Tensor:
        """Return the logits (n, V) of n tokens, fp32."""
        return torch.mm(low_hidden, low_weight.T, out_dtype=torch.float32)

    def narrow(self, logits: Tensor) -> Tensor:
        """Cast `logits` (n, V) to the dtype of matmuls."""
        return logits.to(self._dtype)

    def add_product(self, total: Tensor, low_grad: Tensor, low_hidden: Tensor) -> None:
        """Add low_grad.T @ low_hidden to total (V, D), fp32."""
        torch.addmm(total, low_grad.T, low_hidden, out_dtype=torch.float32, out=total)


class _Scratch:
    """Scratch memory that all chunks reuse: on a CPU, new memory costs more than writing to it.

    Attributes:
        wide: (chunk, V), logits in fp32 or wider.
        low: (chunk, V), logits in the dtype of matmuls; `wide` itself if the dtypes are equal.
    """

    def __init__(self, chunk: int, weight: Tensor, dtype: torch.dtype, wide: torch.dtype) -> None:
        self.wide = weight.new_empty(chunk, weight.shape[0], dtype=wide)
        self.low = self.wide if dtype == wide else torch.empty_like(self.wide, dtype=dtype)
        self._product: Tensor | None = None

    def logits(self, low_hidden: Tensor, low_weight: Tensor) -> Tensor:
        """Return the logits (n, V) of n tokens, in fp32 or wider."""
        n = len(low_hidden)
        torch.mm(low_hidden, low_weight.T, out=self.low[:n])
        return self.wide[:n] if self.low is self.wide else self.wide[:n].copy_(self.low[:n])

    def narrow(self, logits: Tensor) -> Tensor:
        """Cast the result of `logits` (n, V) to the dtype of matmuls."""
        return logits if self.low is self.wide else self.low[: len(logits)].copy_(logits)

    def add_product(self, total: Tensor, low_grad: Tensor, low_hidden: Tensor) -> None:
        """Add low_grad.T @ low_hidden to total (V, D), in fp32 or wider."""
        if self.low is self.wide:
            torch.addmm(total, low_grad.T, low_hidden, out=total)
            return
        if self._product is None:
            self._product = torch.empty_like(total, dtype=low_grad.dtype)
        torch.mm(low_grad.T, low_hidden, out=self._product)
        # a CPU casts the summand into new memory: split it, so that the same memory is reused
        rows = len(total) if total.is_cuda else max(1, PART // total.shape[1])
        for total_part, part in zip(total.split(rows), self._product.split(rows), strict=True):
            total_part += part


def cap_in_place(logits: Tensor, scale: float, softcap: float | None) -> Tensor | None:
    """Scale and cap logits in place; return the cap's derivative 1 - tanh^2, None without a cap."""
    if softcap is None:
        if scale != 1:
            logits.mul_(scale)
        return None
    logits.mul_(scale / softcap).tanh_()
    slope = 1 - logits * logits
    logits.mul_(softcap)
    return slope


def reference_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
    z_loss_weight: float = 0.0,
) -> Tensor:
    """Return `linear_losses` computed with all logits at once, as a reference for tests."""
    logits, labels = cap(hidden.flatten(0, -2) @ weight.T, scale, softcap), labels.flatten()
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    nats = nats + z_loss_weight * torch.where(labels == IGNORE, 0, logits.logsumexp(-1).square())
    return (nats if weights is None else nats * weights.flatten()).sum()


def reference_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return `linear_log_probs` computed with all logits at once, as a reference for tests."""
    log_shares = torch.log_softmax(cap(hidden @ weight.T, scale, softcap), -1)
    keep = labels != IGNORE
    return log_shares.gather(-1, torch.where(keep, labels, 0)[..., None])[..., 0] * keep

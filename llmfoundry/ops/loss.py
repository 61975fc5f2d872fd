"""Cross-entropy and log-probabilities of an output head, without the whole logits in memory.

Training and validation call `linear_cross_entropy`, preference tuning `linear_log_probs`. The idea:
nobody needs all logits at once. A `HeadPass` makes those of a chunk of tokens, takes nats from
them, and, while they exist, adds what the chunk gives to the gradients; the backward pass of the
cross-entropy only scales these. What a log-probability counts is known only in the backward pass:
there the logits of a chunk are made again, which costs a fourth product over the head and no
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmfoundry.ops.devices import kind_of, planned
from llmfoundry.ops.packed_layout import IGNORE

CHUNK_LOGITS = 1 << 22  # logits held at a time: 16 MiB in fp32, which a CPU's cache half holds
PART = 1 << 18  # values added at a time on a CPU
MIN_CHUNK = 256  # tokens; below it a matrix product no longer fills the machine
CUDA_CHUNK_BYTES = 2 << 30  # of fp32 logits held at a time
CUDA_MAX_CHUNK = 8192
"""Tokens. Each chunk reads the head twice and reads and writes its gradient, 12 bytes of a value
whose products are 6 operations a token: on an H100 (3.35 TB/s, 800 TFLOP/s) 1.9 times the products'
time at 256 tokens, 0.12 at 4,096, 0.06 at 8,192."""
CUDA_TILE = 128  # a chunk is a multiple of it: rows that a kernel computes together


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Sum of -log softmax(cap(hidden @ weight.T))[label] over labelled tokens, an fp32 scalar.

    Matrix products run in autocast's dtype where it is on; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE counts nothing.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
        weights: (...), what each token's summand is multiplied by; None: 1.
        chunk: tokens whose logits are held at a time; None: as many as suit the device.
        shard: which rows of the head `weight` is; every process has the same tokens, gets the same
            result, and a summand of the gradient of hidden states. None: all.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    weights = None if weights is None else weights.flatten()
    kept = labelled_places(labels)
    if kept is not None:
        hidden, labels = hidden[kept], labels[kept]
        weights = None if weights is None else weights[kept]
    options = HeadOptions(product_dtype(hidden), scale, softcap, chunk, shard)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels, weights, options)


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked forward that leaves gradients of the sum behind for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        options: HeadOptions,
    ) -> Tensor:
        wants = ctx.needs_input_grad[:2]
        run = HeadPass(hidden, weight, labels, options, wants=wants)
        total = hidden.new_zeros((), dtype=run.wide)
        for part in run.parts():
            nats = run.nats(part)
            factor = None if weights is None else weights[part, None]
            total += (nats if factor is None else nats * factor).sum()
            if any(wants):
                run.add_gradients(part, factor)
        ctx.save_for_backward(run.grad_hidden, run.grad_weight)
        ctx.weight_dtype, ctx.scale = weight.dtype, options.scale
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0] * ctx.scale  # the logits' own factor, at no cost for each of them
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:  # in bf16 the scale itself would be off by up to 0.4 %
            grad_hidden = (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


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
    """(...): log softmax(cap(hidden @ weight.T))[label] of each token, fp32, 0 without a label.

    Matrix products run in autocast's dtype where it is on; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE: none is asked.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
        chunk: tokens whose logits are held at a time; None: as many as suit the device.
        shard: which rows of the head `weight` is; every process has the same tokens, gets the same
            result, and a summand of the gradient of hidden states. None: all.
    """
    shape, options = labels.shape, HeadOptions(product_dtype(hidden), scale, softcap, chunk, shard)
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    kept = labelled_places(labels)
    with torch.autocast(hidden.device.type, enabled=False):
        if kept is None:
            return _LinearLogProbs.apply(hidden, weight, labels, options).view(shape)
        found = _LinearLogProbs.apply(hidden[kept], weight, labels[kept], options)
        return found.new_zeros(labels.shape).index_put((kept,), found).view(shape)


class _LinearLogProbs(torch.autograd.Function):
    """Chunked in both passes; nothing but the inputs waits between them."""

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
        found = hidden.new_empty(len(hidden), dtype=run.wide)
        for part in run.parts():
            found[part] = -run.nats(part)[:, 0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        run = HeadPass(hidden, weight, labels, ctx.options, wants=ctx.needs_input_grad[:2])
        factor = -ctx.options.scale * grad[:, None]
        for part in run.parts():
            run.nats(part)
            run.add_gradients(part, factor[part])
        grad_weight = None if run.grad_weight is None else run.grad_weight.to(weight.dtype)
        return run.grad_hidden, grad_weight, None, None


def cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits times scale and then, with a cap c, c * tanh(logits / c); in fp32 or wider within."""
    if scale == 1 and softcap is None:
        return logits
    wide = scale * (logits if logits.dtype == torch.float64 else logits.float())
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    return wide.to(logits.dtype)


def chunk_tokens(vocab_size: int, device: torch.device, asked: int | None = None) -> int:
    """Tokens whose logits are held at a time; `asked`, where it is given.

    On CUDA CUDA_CHUNK_BYTES / (4 * V), in whole tiles and at most CUDA_MAX_CHUNK: 8,192 tokens to
    a vocabulary of 65,536, 4,096 at 131,072. Not by what memory is free, or a run's losses would
    differ in their last bit from one machine to the next. Elsewhere CHUNK_LOGITS / V.
    """
    if asked is not None:
        return asked
    if kind_of(device) != "cuda":
        return max(MIN_CHUNK, CHUNK_LOGITS // vocab_size)
    tokens = CUDA_CHUNK_BYTES // (4 * vocab_size) // CUDA_TILE * CUDA_TILE
    return min(CUDA_MAX_CHUNK, max(MIN_CHUNK, tokens))


def logit_bytes(device: torch.device, *, capped: bool) -> int:
    """Bytes held at once for each logit of a chunk.

    fp32 logits and their softmax, then the softmax and its bf16 copy for the gradient's products;
    with a softcap the slope of it too. A CPU's softmax takes the logits' place, and its scratch
    memory stays.
    """
    return 8 if kind_of(device) == "cuda" and not capped else 12


def sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` can be written in fp32: PyTorch's `out_dtype`, CUDA alone."""
    low = dtype in (torch.bfloat16, torch.float16)
    return low and kind_of(device) == "cuda" and torch.version.hip is None


def product_dtype(hidden: Tensor) -> torch.dtype:
    """What matrix products over hidden states run in: autocast's dtype where it is on."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def labelled_places(labels: Tensor) -> Tensor | None:
    """(n,): places of the tokens that have a label, where a CPU can leave out others; else None.

    None too where all have one, or none has. Elsewhere their number would have to be waited for.
    """
    if kind_of(labels.device) != "cpu" or planned() is not None:
        return None
    kept = (labels != IGNORE).nonzero()[:, 0]
    return kept if 0 < len(kept) < len(labels) else None


@dataclass(frozen=True)
class VocabularyShard:
    """Rows of an output head that one of several processes has; all have the same tokens.

    Attributes:
        group: the processes.
        first: the token that this one's first row is for.
        size: V, tokens of the whole vocabulary.
    """

    group: dist.ProcessGroup
    first: int
    size: int

    def meet(self, log_sum: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
        """Both (n, 1) over the whole vocabulary, in one message of 8 bytes a token in fp32.

        Args:
            log_sum: log of the sum of exp(logits) over this process's rows.
            at_target: the label's logit where this process has it, else 0.
        """
        own = torch.cat([log_sum, at_target], 1)  # (n, 2)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, own, group=self.group)
        sums, targets = torch.stack(every).unbind(-1)  # (processes, n) each
        return sums.logsumexp(0)[:, None], targets.sum(0)[:, None]


@dataclass(frozen=True)
class HeadOptions:
    """How logits are made of hidden states (N, D) and an output head (V, D).

    Attributes:
        dtype: of the matrix products.
        scale: factor on the logits.
        softcap: as in `cap`.
        chunk: tokens at a time; None: as many as `chunk_tokens` gives.
        shard: which rows of the head are here, on every process others: the gradient of hidden
            states then is a summand of theirs; None: all.
    """

    dtype: torch.dtype
    scale: float = 1.0
    softcap: float | None = None
    chunk: int | None = None
    shard: VocabularyShard | None = None


class HeadPass:
    """One pass over tokens: `nats` of a chunk, then, where wanted, `add_gradients` of it.

    Attributes:
        wide: the dtype of softmax and sums: fp32, or float64.
        grad_hidden: (N, D), of hidden states, so far; None: not wanted.
        grad_weight: (V, D), of the head, so far, in `wide`; None: not wanted.
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
        """Begin one.

        Args:
            hidden: (N, D).
            weight: (V, D), the output head.
            labels: (N,), int64; IGNORE counts nothing.
            options: how logits are made.
            wants: whether gradients of hidden states and of the head are wanted.
        """
        dtype, self._shard = options.dtype, options.shard
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.grad_hidden = torch.empty_like(hidden) if wants[0] else None
        self.grad_weight = torch.zeros_like(weight, dtype=self.wide) if wants[1] else None
        self._hidden, self._labels, self._weight = hidden, labels, weight.to(dtype)
        self._chunk = chunk_tokens(weight.shape[0], weight.device, options.chunk)
        self._cap = (options.scale, options.softcap)
        self._products: _Wide | _Scratch = (
            _Wide(dtype)
            if sums_wide(weight.device, dtype)
            else _Scratch(min(self._chunk, len(hidden)), weight, dtype, self.wide)
        )
        self._low_hidden = self._shares = self._nothing = hidden.new_empty(0)
        self._keep = self._mine = self._index = labels.new_empty(0)
        self._slope: Tensor | None = None

    def parts(self) -> Iterator[slice]:
        """Chunks of the tokens, in order."""
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, start + self._chunk)

    def nats(self, part: slice) -> Tensor:
        """(n, 1): -log softmax(cap(hidden @ weight.T))[label] of a chunk, 0 without a label."""
        target = self._labels[part]
        self._shares, self._slope = self._nothing, None  # the last chunk's memory, for this one
        self._low_hidden = self._hidden[part].to(self._weight.dtype)
        logits = self._products.logits(self._low_hidden, self._weight)
        self._slope = _cap_in_place(logits, *self._cap)
        self._keep = (target != IGNORE)[:, None]
        self._mine, place = self._keep, target[:, None]
        if self._shard is not None:
            place = place - self._shard.first
            self._mine = self._keep & (place >= 0) & (place < len(self._weight))
        self._index = torch.where(self._mine, place, 0)
        at_target, peak = logits.gather(1, self._index), logits.amax(-1, keepdim=True)
        # in the logits' memory; no other device promises that
        on_cpu = kind_of(logits.device) == "cpu"
        shares = self._shares = torch.softmax(logits, -1, out=logits if on_cpu else None)
        # log of the sum of exp(logits), by the largest share: that one is never zero
        log_sum = peak - shares.amax(-1, keepdim=True).log()
        if self._shard is not None:
            own = log_sum
            log_sum, at_target = self._shard.meet(own, torch.where(self._mine, at_target, 0))
            shares.mul_((own - log_sum).exp())
        return torch.where(self._keep, log_sum - at_target, 0.0)

    def add_gradients(self, part: slice, factor: Tensor | None) -> None:
        """Add what the chunk of the last `nats` gives; `factor` (n, 1) on its nats, None: 1.

        The logits' own scale is left to the caller.
        """
        shares, keep = self._shares, self._keep
        # softmax - 1 at the target; one place a row: deterministic
        one = 1 if self._shard is None else self._mine.to(shares.dtype)
        shares.scatter_(1, self._index, shares.gather(1, self._index) - one)
        if self._slope is not None:
            shares.mul_(self._slope)
        if factor is not None:
            shares.mul_(factor)
        low_grad = self._products.narrow(shares)
        # what has no label is left out where rows are D wide, not V
        if self.grad_hidden is not None:
            self.grad_hidden[part] = torch.mm(low_grad, self._weight) * keep
        if self.grad_weight is not None:
            self._products.add_product(self.grad_weight, low_grad, self._low_hidden * keep)


class _Wide:
    """Products of 16-bit matrices in fp32, as the device sums them: nothing is rounded between.

    Fresh memory is the caching allocator's, and costs nothing. `addmm` adds to fp32 since PyTorch
    2.10 (pytorch#167931).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def logits(self, low_hidden: Tensor, low_weight: Tensor) -> Tensor:
        """(n, V) of n tokens, fp32."""
        return torch.mm(low_hidden, low_weight.T, out_dtype=torch.float32)

    def narrow(self, logits: Tensor) -> Tensor:
        """`logits` (n, V) in the dtype of the products."""
        return logits.to(self._dtype)

    def add_product(self, total: Tensor, low_grad: Tensor, low_hidden: Tensor) -> None:
        """Add low_grad.T @ low_hidden to total (V, D), fp32."""
        torch.addmm(total, low_grad.T, low_hidden, out_dtype=torch.float32, out=total)


class _Scratch:
    """Memory that all chunks use: fresh memory costs a CPU more than what is written there.

    Attributes:
        wide: (chunk, V), logits, in fp32 or wider.
        low: the same in the dtype of the matrix products; `wide` itself where they are one.
    """

    def __init__(self, chunk: int, weight: Tensor, dtype: torch.dtype, wide: torch.dtype) -> None:
        self.wide = weight.new_empty(chunk, weight.shape[0], dtype=wide)
        self.low = self.wide if dtype == wide else torch.empty_like(self.wide, dtype=dtype)
        self._product: Tensor | None = None

    def logits(self, low_hidden: Tensor, low_weight: Tensor) -> Tensor:
        """(n, V) of n tokens."""
        n = len(low_hidden)
        torch.mm(low_hidden, low_weight.T, out=self.low[:n])
        return self.wide[:n] if self.low is self.wide else self.wide[:n].copy_(self.low[:n])

    def narrow(self, logits: Tensor) -> Tensor:
        """What `logits` gave back, (n, V), now in the dtype of the products."""
        return logits if self.low is self.wide else self.low[: len(logits)].copy_(logits)

    def add_product(self, total: Tensor, low_grad: Tensor, low_hidden: Tensor) -> None:
        """Add low_grad.T @ low_hidden to total (V, D), which is wide."""
        if self.low is self.wide:
            total.addmm_(low_grad.T, low_hidden)
            return
        if self._product is None:
            self._product = torch.empty_like(total, dtype=low_grad.dtype)
        torch.mm(low_grad.T, low_hidden, out=self._product)
        # a CPU casts what it adds into fresh memory: by parts, small enough to be used again
        rows = len(total) if total.is_cuda else max(1, PART // total.shape[1])
        for mine, part in zip(total.split(rows), self._product.split(rows), strict=True):
            mine += part


def _cap_in_place(logits: Tensor, scale: float, softcap: float | None) -> Tensor | None:
    """Scale and cap logits in their memory; the cap's slope, 1 - tanh^2, None without one."""
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
) -> Tensor:
    """The same sum with all logits at once, in the inputs' dtype: what tests compare with."""
    logits = cap(hidden.flatten(0, -2) @ weight.T, scale, softcap)
    nats = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
    return (nats if weights is None else nats * weights.flatten()).sum()


def reference_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """The same with all logits at once, in the inputs' dtype: what tests compare with."""
    log_shares = torch.log_softmax(cap(hidden @ weight.T, scale, softcap), -1)
    keep = labels != IGNORE
    return log_shares.gather(-1, torch.where(keep, labels, 0)[..., None])[..., 0] * keep

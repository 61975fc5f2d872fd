"""Loss, perplexity and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.batch import IGNORE, Batch


@torch.no_grad()
def validate(
    root: Root,
    batches: Iterable[Batch],
    token_bytes: Tensor,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    data_group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Sums over the batches of all that read other rows, then their ratios.

    Bits per byte is total nats / ln 2 / bytes of text; the end-of-text symbol costs nats and has
    no bytes. It compares models of different tokenizers, and with compressors such as gzip.

    Args:
        root: the model; every process must bring the same number of batches.
        batches: this process's share of the held-out rows.
        token_bytes: (V,) UTF-8 bytes of each token, on `device`.
        device: where to compute.
        autocast: gives the context of the forward pass.
        data_group: the processes that have the other shares; None: all processes.
    """
    sums = torch.zeros(3, device=device, dtype=torch.float64)  # nats, tokens, bytes
    for batch in batches:
        batch = batch.to(device)
        labels = batch.labels

        def loss(model: Decoder, hidden: Tensor, labels: Tensor = labels) -> Tensor:
            return model.loss(hidden, labels)

        with autocast():
            nats = root(batch.tokens, batch.layout, loss)
        keep = labels != IGNORE
        length = token_bytes[labels[keep]].sum()
        sums += torch.stack([nats.double(), keep.sum().double(), length.double()])
    if dist.is_initialized():
        dist.all_reduce(sums, group=data_group)
    nats, tokens, length = sums.tolist()
    mean = nats / max(tokens, 1)
    return {
        "metrics/eval/LanguageCrossEntropy": mean,
        "metrics/eval/LanguagePerplexity": math.exp(min(mean, 700)),
        "metrics/eval/bits_per_byte": nats / math.log(2) / max(length, 1),
    }

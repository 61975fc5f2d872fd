"""Exponential moving average of the trained weights (`ema.decay`).

Entry point: `AveragedWeights`, which the trainer updates after each step. The average of a weight
is an fp32 tensor with the sharding of the weight, so an update needs no communication, and a
checkpoint stores both in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from llmfoundry.models.decoder import Root
from llmfoundry.ops.shard_layout import local_shard


class AveragedWeights:
    """Average of a model's trained weights, on the device and in the shards of the weights.

    Frozen weights and integers, such as the biases of routers, have no average.
    """

    def __init__(self, root: Root, decay: float) -> None:
        """Allocate the average; `restart` or a checkpoint fills it.

        Args:
            root: sharded model with allocated weights.
            decay: share of its value that the average keeps in a late step.
        """
        self._root, self._decay = root, decay
        # a tied weight has several names in a checkpoint, and one average
        parameters = root.model.named_parameters(remove_duplicate=False)
        trained = {name: p for name, p in parameters if p.requires_grad}
        saved = get_model_state_dict(root.model).keys()
        self._weights = {name: p for name, p in trained.items() if name in saved}
        each = {id(p): torch.empty_like(p, dtype=torch.float32) for p in self._weights.values()}
        self._averages = {name: each[id(p)].detach() for name, p in self._weights.items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The averages by parameter name, as a checkpoint holds them."""
        return self._averages

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights."""
        for average, weight in self._pairs():
            average.copy_(weight)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps (from 1) to the average."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        pairs = self._pairs()
        wide = [(a, w) for a, w in pairs if w.dtype == torch.float32]
        if wide:
            averages, weights = zip(*wide, strict=True)
            torch._foreach_lerp_(averages, weights, share)
        for average, weight in pairs:
            if weight.dtype != torch.float32:  # one copy in fp32 at a time
                average.lerp_(weight.float(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights within a context.

        The weights are copied, in the memory that gradients occupy during a step.
        """
        with torch.no_grad():
            weights = [(weight, weight.clone()) for _, weight in self._pairs()]
            for average, weight in self._pairs():
                weight.copy_(average)
        self._reshard()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in weights:
                    weight.copy_(value)
            self._reshard()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's shard of each average and of its weight, each once."""
        pairs = {id(w): (self._averages[name], w) for name, w in self._weights.items()}
        return [(local_shard(a), local_shard(w.detach())) for a, w in pairs.values()]

    def _reshard(self) -> None:
        """Free gathered weights, which FSDP would otherwise use in the next forward pass."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

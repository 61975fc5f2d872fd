"""Tensor parallelism inside the decoder: which dimension is sharded, and sequence parallelism.

`distributed/tensor.py` sets a decoder's `TensorRanks`, which selects this rank's tokens and heads.
Norms, dropout and the residual stream are sequence-parallel (Korthikanti et al., 2022): each rank
computes them for its tokens only. A sequence whose length the ranks do not divide is padded with
tokens that nothing attends to, and the padding is removed again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from llmfoundry.ops.loss import VocabularyShard
from llmfoundry.ops.shard_layout import local_ranges
from llmfoundry.recipe.model import ModelConfig, ResolvedModelConfig

_ROWS = re.compile(
    r"(^|\.)(wte|lm_head)\.weight$|attn\.W(?!\w+_a\.)\w+\.(weight|bias)$"
    r"|attn\.sinks\.weight$"
    r"|(up|gate)_proj\.(weight|bias)$"
)
_COLUMNS = re.compile(r"(attn\.out_proj|ffn\.down_proj)\.weight$")
_STACKED = ("attn.Wqkv.weight", "attn.Wqkv.bias")


def tensor_parallel_dim(name: str) -> int | None:
    """Return the dimension along which tensor parallelism shards a parameter, if it does.

    `distributed/tensor.py` asserts it, and `plan/parameter_shards.py` counts memory with it.
    """
    if _ROWS.search(name):
        return 0
    return 1 if _COLUMNS.search(name) else None


def stacked_rows(name: str, config: ResolvedModelConfig) -> tuple[int, ...]:
    """Return the row counts of the matrices that are fused in a parameter (Wqkv).

    Each tensor rank has a shard of each of them. Empty: the parameter is sharded as one matrix.
    """
    if not name.endswith(_STACKED) or config.head_dim is None:
        return ()
    kv_heads = config.attn_config.kv_n_heads
    kv_width = kv_heads * config.head_dim
    return (config.n_heads * config.head_dim, kv_width, kv_width)


def all_stacked_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return `stacked_rows` of the fused parameters by name; empty for a transformers class."""
    config: ResolvedModelConfig | None = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return {}
    all_rows = {name: stacked_rows(name, config) for name, _ in model.named_parameters()}
    return {name: rows for name, rows in all_rows.items() if rows}


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel ranks of one model replica.

    Attributes:
        mesh: one-dimensional device mesh of the ranks.
    """

    mesh: DeviceMesh

    @property
    def n(self) -> int:
        """Number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Index of this rank on the tensor axis."""
        return self.mesh.get_local_rank()

    def heads(self, count: int) -> slice:
        """Return the slice of `count` heads that this rank computes."""
        heads_per_rank = count // self.n
        return slice(self.rank * heads_per_rank, (self.rank + 1) * heads_per_rank)

    def padded(self, x: Tensor) -> Tensor:
        """Pad x (B, T, ...) with zeros to a multiple of the number of ranks along T."""
        missing = -x.shape[1] % self.n
        return F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing]) if missing else x

    def local_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, S, ...) of x (B, T, ...), with S = T / n rounded up."""
        x = self.padded(x)
        tokens_per_rank = x.shape[1] // self.n
        return x.narrow(1, self.rank * tokens_per_rank, tokens_per_rank)

    def local_indices(self, batch_size: int, tokens: int, indices: Tensor | None) -> Tensor | None:
        """Return the flat indices b * S + s of this rank's tokens that are not padding.

        Args:
            batch_size: B.
            tokens: T, length of a sequence.
            indices: (M,) on the host, flat indices b * T + t of the tokens of all ranks that are
                not padding; None: there is no padding.

        Returns:
            (N,) on the host; None: this rank has no padding.
        """
        if indices is None and tokens % self.n == 0:
            return None
        mask = torch.ones(batch_size, tokens, dtype=torch.bool)
        if indices is not None:
            mask = torch.zeros(batch_size * tokens, dtype=torch.bool)
            mask[indices] = True
        return self.local_tokens(mask.view(batch_size, tokens)).flatten().nonzero()[:, 0]

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Return embeddings (B, S, D) of this rank's tokens.

        Each rank looks up the tokens in its shard of the vocabulary. A reduce-scatter sums the
        lookups, of which one is not zero, onto the rank that has the token. DTensor's embedding
        does the same, but materializes the gradient of the full table on every rank.

        Args:
            weight: (V, D) table, sharded by rows.
            tokens: (B, T), the tokens of all ranks.
        """
        table, shard = self.local_vocabulary(weight)
        row = self.padded(tokens) - shard.first  # (B, n S)
        is_local = (row >= 0) & (row < len(table))
        lookup = F.embedding(torch.where(is_local, row, 0), table)
        lookup = lookup.masked_fill(~is_local[..., None], 0)
        full = DTensor.from_local(lookup, self.mesh, [Partial()], run_check=False)
        return full.redistribute(placements=[Shard(1)]).to_local()

    def all_gather(self, x: Tensor, tokens: int) -> Tensor:
        """Gather x (B, S, D) of all ranks to (B, T, D). The backward pass sums gradients."""
        full = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)
        full = full.redistribute(placements=[Replicate()])
        return full.to_local(grad_placements=[Partial()])[:, :tokens]

    def local_vocabulary(self, weight: Tensor) -> tuple[Tensor, VocabularyShard]:
        """Return this rank's rows (V', D) of an output head (V, D), and their location."""
        assert isinstance(weight, DTensor)
        (rows,) = local_ranges(weight, 0)
        return weight.to_local(), VocabularyShard(self.mesh.get_group(), rows[0], weight.shape[0])

    def all_logits(self, logits: Tensor, shard: VocabularyShard) -> Tensor:
        """Gather logits (..., V') of all ranks to (..., V)."""
        shape = torch.Size((*logits.shape[:-1], shard.size))
        stride = torch.empty(shape, device="meta").stride()
        full = DTensor.from_local(
            logits, self.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=shape, stride=stride
        )
        return full.redistribute(placements=[Replicate()]).to_local()

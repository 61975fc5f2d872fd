"""The decoder's side of tensor parallelism: how matrices are sharded, and tokens between them.

`distributed/tensor.py` gives a decoder its `TensorRanks`, which selects this process's tokens and
heads. The idea (Korthikanti et al., 2022): what is not a matrix product, norms, dropout
and the residual stream, is done once for each token, on the process that has it. A row whose length
the processes do not divide is padded with tokens that none attends to and that are removed again.
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
from llmfoundry.recipe.model import ModelConfig

_ROWS = re.compile(
    r"(^|\.)(wte|lm_head)\.weight$|attn\.W\w+\.(weight|bias)$|(up|gate)_proj\.(weight|bias)$"
)
_COLUMNS = re.compile(r"(attn\.out_proj|ffn\.down_proj)\.weight$")
_STACKED = ("attn.Wqkv.weight", "attn.Wqkv.bias")


def tensor_parallel_dim(name: str) -> int | None:
    """The dimension along which tensor parallelism shards a parameter of a dense layer, if any.

    `distributed/tensor.py` asserts that it did; `plan/parameter_shards.py` counts so.
    """
    if _ROWS.search(name):
        return 0
    return 1 if _COLUMNS.search(name) else None


def stacked_rows(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Heights of the matrices that a parameter stacks, of which each tensor rank has its part.

    Empty: it is sharded as one matrix.
    """
    if not name.endswith(_STACKED) or config.head_dim is None:
        return ()
    kv_heads = config.attn_config.kv_n_heads
    assert kv_heads is not None, "the recipe was not filled"
    kv_width = kv_heads * config.head_dim
    return (config.n_heads * config.head_dim, kv_width, kv_width)


def all_stacked_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """`stacked_rows` of those parameters that stack some, by name; of our decoder alone."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return {}
    found = {name: stacked_rows(name, config) for name, _ in model.named_parameters()}
    return {name: rows for name, rows in found.items() if rows}


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel processes of one copy of the model.

    Attributes:
        mesh: of one dimension.
    """

    mesh: DeviceMesh

    @property
    def n(self) -> int:
        """How many there are."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This one's number among them."""
        return self.mesh.get_local_rank()

    def heads(self, count: int) -> slice:
        """Those of `count` heads that this process computes."""
        each = count // self.n
        return slice(self.rank * each, (self.rank + 1) * each)

    def padded(self, x: Tensor) -> Tensor:
        """X (B, T, ...) padded with zeros, so that the processes divide the length of its rows."""
        more = -x.shape[1] % self.n
        return F.pad(x, [0, 0] * (x.ndim - 2) + [0, more]) if more else x

    def local_tokens(self, x: Tensor) -> Tensor:
        """(B, S, ...): this process's tokens of x (B, T, ...), S = T / n rounded up."""
        x = self.padded(x)
        each = x.shape[1] // self.n
        return x.narrow(1, self.rank * each, each)

    def local_places(self, rows: int, tokens: int, real: Tensor | None) -> Tensor | None:
        """(N,) on the host: flat places b * S + s of this process's tokens that are no padding.

        Args:
            rows: B.
            tokens: T, of a row.
            real: (M,) on the host, flat places b * T + t that are no padding; None: all are.

        Returns:
            None: all are.
        """
        if real is None and tokens % self.n == 0:
            return None
        mask = torch.ones(rows, tokens, dtype=torch.bool)
        if real is not None:
            mask = torch.zeros(rows * tokens, dtype=torch.bool)
            mask[real] = True
        return self.local_tokens(mask.view(rows, tokens)).flatten().nonzero()[:, 0]

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """(B, S, D): embeddings of this process's tokens, of tokens (B, T) and a table (V, D).

        Each process looks up the tokens of its own rows; their sum, of which one summand is not
        zero, goes to the process that has the token. DTensor's own embedding does as much, but
        gives every process the gradient of the full table.
        """
        rows, shard = self.local_vocabulary(weight)
        place = self.padded(tokens) - shard.first  # (B, n S)
        mine = (place >= 0) & (place < len(rows))
        found = F.embedding(torch.where(mine, place, 0), rows).masked_fill(~mine[..., None], 0)
        full = DTensor.from_local(found, self.mesh, [Partial()], run_check=False)
        return full.redistribute(placements=[Shard(1)]).to_local()

    def all_gather(self, x: Tensor, tokens: int) -> Tensor:
        """(B, T, D) of every process's x (B, S, D); gradients of all of them are added up."""
        full = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)
        full = full.redistribute(placements=[Replicate()])
        return full.to_local(grad_placements=[Partial()])[:, :tokens]

    def local_vocabulary(self, weight: Tensor) -> tuple[Tensor, VocabularyShard]:
        """The rows (V', D) that this process has of an output head (V, D), and which they are."""
        assert isinstance(weight, DTensor)
        (rows,) = local_ranges(weight, 0)
        return weight.to_local(), VocabularyShard(self.mesh.get_group(), rows[0], weight.shape[0])

    def all_logits(self, logits: Tensor, shard: VocabularyShard) -> Tensor:
        """(..., V) of every process's logits (..., V')."""
        shape = torch.Size((*logits.shape[:-1], shard.size))
        stride = torch.empty(shape, device="meta").stride()
        full = DTensor.from_local(
            logits, self.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=shape, stride=stride
        )
        return full.redistribute(placements=[Replicate()]).to_local()

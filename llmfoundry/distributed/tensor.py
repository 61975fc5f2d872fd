"""Tensor parallelism: processes share each matrix, and between the matrices the tokens of each row.

`apply.py` calls `apply_tensor_parallel` on the meta device, before FSDP. DTensor's own plans do the
layers (Shoeybi et al., 2019; Korthikanti et al., 2022): queries, keys and values and the up
projections are sharded by rows (heads, inner width), what leads back to the residual stream by
columns, and norms see this process's tokens alone. What no plan knows is elsewhere: a fused Wqkv
whose rows lie head by head (`ops/shard_layout.py`), rows of any length
(`models/tensor_parallel.py`), the loss over a head sharded by its vocabulary (`ops/loss.py`).
Layers with experts are not: each process routes its own tokens, and FSDP shards their weights over
tensor ranks too.

What a process sends and receives, in elements, of B rows of T tokens, n tensor ranks, width D, in
the dtype of matrix products: what a norm computes in fp32 is rounded before it is gathered, as the
product that takes it would, and so is its gradient. An all-gather and a reduce-scatter move
g = (n - 1) / n * B * T * D each (T rounded up to a multiple of n).

- A block with a dense feed-forward layer, forward: 2 all-gathers (before attention, before the
  feed-forward layer) and 2 reduce-scatters: 4 g. Backward: the same the other way round, 4 g, and
  the all-gather's results are kept, not gathered again. Checkpointing of whole blocks repeats the
  forward pass: 4 g more; selective checkpointing its all-gathers: 2 g more.
- A block with experts: half of that, plus what expert parallelism sends of B * T / n tokens.
- Embedding: a reduce-scatter forward, an all-gather backward: 2 g. Head: an all-gather of hidden
  states forward, a reduce-scatter backward: 2 g; and 2 values (fp32) of each labeled token from
  each process.
- Parameters that all have and apply to their own tokens (norms, positions): an all-reduce of their
  gradients a microbatch.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmfoundry.distributed.mesh import Meshes
from llmfoundry.errors import UserError
from llmfoundry.models.adapter import is_added
from llmfoundry.models.attention import Attention
from llmfoundry.models.decoder import Block, Decoder, Root
from llmfoundry.models.layers import FFN
from llmfoundry.models.moe import MoE
from llmfoundry.models.quantized import quantization
from llmfoundry.models.tensor_parallel import TensorRanks, tensor_parallel_dim
from llmfoundry.ops.devices import to_autocast_dtype
from llmfoundry.recipe.parallel import Degrees, tensor_adapters

KEY = "parallel.tensor_parallel_degree"


def apply_tensor_parallel(root: Root, meshes: Meshes | None) -> None:
    """Give each process of the tensor dimension its part of the dense layers."""
    if meshes is None or meshes.tensor is None:
        return
    model, mesh = root.model, meshes.tensor
    if not isinstance(model, Decoder):
        raise UserError(
            f"{KEY}: {mesh.size()}, but the model is of a class of transformers' own, whose layers"
            " are not cut; write 1"
        )
    _check(model, mesh)
    model.tensor_ranks = TensorRanks(mesh)
    plan: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),  # for its rows: see `TensorRanks`
        "norm_f": _norm(),
    }
    if model.config.learned_pos_emb:
        plan["wpe"] = _norm()
    if not model.config.tie_word_embeddings:
        plan["lm_head"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)
    _round(model.norm_f)
    for block in model.blocks:
        assert isinstance(block, Block)
        _share_block(block, mesh)
    outside = {p for m in model.modules() if isinstance(m, MoE) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in outside:
            assert isinstance(parameter, DTensor), f"{name} is in no plan"
            (placement,) = parameter.placements
            assert getattr(placement, "dim", None) == tensor_parallel_dim(name), name


def _check(model: Decoder, mesh: DeviceMesh) -> None:
    vocabulary, n = model.config.vocab_size, mesh.size()
    quantize = str(quantization(model)["model.quantize"])
    adapter = "some" if any(map(is_added, model.state_dict())) else "none"
    problems = list(tensor_adapters(adapter, quantize, Degrees(tensor=n)))
    if problems:  # of a degree that was written as -1
        raise UserError(*problems)
    if -(-vocabulary // n) * (n - 1) >= vocabulary:
        raise UserError(
            f"{KEY}: {n} leaves a process no row of the {vocabulary} of model.vocab_size"
        )


def _norm() -> SequenceParallel:
    """A layer that sees single tokens: each process has its own, and all have its parameters."""
    return SequenceParallel(sequence_dim=1, use_local_output=True)


def _round(norm: nn.Module) -> None:
    """Let what a norm gives, which is gathered next, be in the dtype of matrix products."""
    norm.register_forward_hook(lambda module, given, made: to_autocast_dtype(made))


def _share_block(block: Block, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {"norm_1": _norm(), "norm_2": _norm()}
    plan |= {f"attn.{name}": style for name, style in _attention_plan(block.attn).items()}
    if not isinstance(block.ffn, MoE):  # of which `experts.py` knows whose tokens count
        assert isinstance(block.ffn, FFN)
        plan |= _ffn_plan(block.ffn)
    parallelize_module(block, mesh, plan)
    _round(block.norm_1)
    if not isinstance(block.ffn, MoE):
        _round(block.norm_2)
    block.attn.widths = tuple(width // mesh.size() for width in block.attn.widths)


def _attention_plan(attn: Attention) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "Wqkv" if attn.owns_kv else "Wq": ColwiseParallel(input_layouts=Shard(1)),
        "out_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for name in ("q_ln", "k_ln"):
        if getattr(attn, name) is not None:
            assert attn.per_head, "checked before"
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)  # (B, T, H, hd)
    return plan


def _ffn_plan(ffn: nn.Module) -> dict[str, ParallelStyle]:
    """The tokens of all processes are gathered once for both up projections."""
    plan: dict[str, ParallelStyle] = {
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.up_proj": ColwiseParallel(),
        "ffn.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    if ffn.gate_proj is not None:
        plan["ffn.gate_proj"] = ColwiseParallel()
    return plan

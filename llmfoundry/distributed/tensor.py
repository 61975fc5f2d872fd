"""Tensor parallelism with sequence parallelism: ranks shard matrices, and tokens between them.

Entry point: `apply_tensor_parallel`, which `apply.py` calls on the meta device, before FSDP. The
layers use DTensor's plans (Shoeybi et al., 2019; Korthikanti et al., 2022). Projections of queries,
keys and values and the up projections are sharded by rows (heads, inner width). The projections
back to the residual stream are sharded by columns. Norms process this rank's tokens only. Three
cases have no plan in DTensor: a fused Wqkv whose rows are ordered by head (`ops/shard_layout.py`),
sequences of any length (`models/tensor_parallel.py`), and the loss over a head sharded by
vocabulary (`ops/loss.py`). Layers with experts are not tensor parallel: each rank routes its own
tokens, and FSDP shards their weights over tensor ranks too.

Communication per rank, in elements, for B sequences of T tokens, n tensor ranks and width D. The
dtype is that of matmuls: fp32 outputs of norms are cast before the all-gather, and so are their
gradients. An all-gather or reduce-scatter moves g = (n - 1) / n * B * T * D elements (T rounded up
to a multiple of n).

- Block with a dense feed-forward layer, forward: 2 all-gathers (before attention and before the
  feed-forward layer) and 2 reduce-scatters, 4 g. Backward: the reverse, 4 g; the gathered inputs
  are saved, not gathered again. Full activation checkpointing repeats the forward pass, 4 g more.
  Selective checkpointing repeats the all-gathers, 2 g more.
- Block with experts: half of that, plus the communication of expert parallelism for B * T / n
  tokens.
- Embedding: a reduce-scatter forward and an all-gather backward, 2 g. Head: an all-gather of hidden
  states forward and a reduce-scatter backward, 2 g, plus 2 fp32 values per labeled token and rank.
- Replicated parameters that process local tokens (norms, positions): an all-reduce of their
  gradients per microbatch.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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
from llmfoundry.models.attention import Attention, Sinks
from llmfoundry.models.decoder import Block, Decoder, Root
from llmfoundry.models.latent_attention import LatentAttention
from llmfoundry.models.layers import FFN
from llmfoundry.models.moe import MoE
from llmfoundry.models.quantized import quantization
from llmfoundry.models.tensor_parallel import TensorRanks, tensor_parallel_dim
from llmfoundry.ops.devices import to_autocast_dtype
from llmfoundry.recipe.parallel import Degrees, tensor_adapters

KEY = "parallel.tensor_parallel_degree"


def apply_tensor_parallel(root: Root, meshes: Meshes | None) -> None:
    """Shard the dense layers over the mesh's tensor dimension."""
    if meshes is None or meshes.tensor is None:
        return
    model, mesh = root.model, meshes.tensor

    # check that the model can be sharded
    if not isinstance(model, Decoder):
        raise UserError(
            f"{KEY}: {mesh.size()}, but the model is of a class of transformers' own, whose layers"
            " are not cut; write 1"
        )
    _check(model, mesh)
    model.tensor_ranks = TensorRanks(mesh)

    # embeddings, final norm and head, then the blocks
    plan: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),  # by vocabulary: see `TensorRanks`
        "norm_f": _norm(),
    }
    if model.config.learned_pos_emb:
        plan["wpe"] = _norm()
    if not model.config.tie_word_embeddings:
        plan["lm_head"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)
    _cast_output(model.norm_f)
    for block in model.blocks:
        assert isinstance(block, Block)
        _shard_block(block, mesh)

    # every parameter outside of layers with experts must be in a plan
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
    if problems:  # not checked earlier if the recipe's degree is -1
        raise UserError(*problems)
    if -(-vocabulary // n) * (n - 1) >= vocabulary:
        raise UserError(
            f"{KEY}: {n} leaves a process no row of the {vocabulary} of model.vocab_size"
        )


def _norm() -> SequenceParallel:
    """Return the style of a layer that processes local tokens with replicated parameters."""
    return SequenceParallel(sequence_dim=1, use_local_output=True)


def _cast_output(norm: nn.Module) -> None:
    """Cast the output of a norm to the dtype of matmuls, before it is gathered."""
    norm.register_forward_hook(lambda module, inputs, output: to_autocast_dtype(output))


def _shard_block(block: Block, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {"norm_1": _norm(), "norm_2": _norm()}
    attn = block.attn
    of_attention = (
        _latent_plan(attn) if isinstance(attn, LatentAttention) else _attention_plan(attn)
    )
    plan |= {f"attn.{name}": style for name, style in of_attention.items()}
    if not isinstance(block.ffn, MoE):  # `experts.py` handles layers with experts
        assert isinstance(block.ffn, FFN)
        plan |= _ffn_plan(block.ffn)
    parallelize_module(block, mesh, plan)
    _cast_output(block.norm_1)
    if not isinstance(block.ffn, MoE):
        _cast_output(block.norm_2)
    if isinstance(attn, Attention):
        attn.widths = tuple(width // mesh.size() for width in attn.widths)


def _attention_plan(attn: Attention) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "Wqkv" if attn.owns_kv else "Wq": ColwiseParallel(input_layouts=Shard(1)),
        "out_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for name in ("q_ln", "k_ln"):
        if getattr(attn, name) is not None:
            assert attn.per_head, "checked before"
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)  # (B, T, H, hd)
    if attn.sinks is not None:
        plan["sinks"] = _ByHead()
    return plan


class _ByHead(ParallelStyle):
    """Style of a layer with one value per head, which is called without arguments."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Sinks)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        return module


def _latent_plan(attn: LatentAttention) -> dict[str, ParallelStyle]:
    """Return the plan of latent attention.

    Each rank computes the latent vectors of its tokens, which are gathered: they are narrower than
    the residual stream. The projections from them are sharded by head.
    """
    to_latents = ("Wq_a", "q_a_ln", "Wkv_a", "kv_a_ln")
    plan: dict[str, ParallelStyle] = {name: _norm() for name in to_latents if hasattr(attn, name)}
    plan["Wq_b" if hasattr(attn, "Wq_b") else "Wq"] = ColwiseParallel(input_layouts=Shard(1))
    plan["gather"] = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    plan["Wkv_b"] = ColwiseParallel()
    plan["out_proj"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def _ffn_plan(ffn: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plan of a feed-forward layer; both up projections share one all-gather."""
    plan: dict[str, ParallelStyle] = {
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.up_proj": ColwiseParallel(),
        "ffn.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    if ffn.gate_proj is not None:
        plan["ffn.gate_proj"] = ColwiseParallel()
    return plan

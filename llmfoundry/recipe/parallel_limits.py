"""What a model cannot be spread over: checked with the recipe, and again once -1 is known."""

from __future__ import annotations

from collections.abc import Iterator

from llmfoundry.recipe.activation_memory import BLOCK, EXPERTS, read_targets
from llmfoundry.recipe.architecture.hf_model import HFModelConfig
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.parallel import AXES, EXPERT, Degrees, ParallelConfig, recomputation
from llmfoundry.recipe.values.checks import divides


def limits(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    """Lines for degrees that this model cannot have, with the nearest that it can.

    Args:
        model: filled or not; what is not known yet is not compared.
        parallel: the section.
        degrees: its degrees as written, or of all processes.
    """
    yield from _recomputed(model, parallel)
    if isinstance(model, HFModelConfig):
        yield from _transformers(degrees)
        return
    if degrees.expert > 1:
        yield from _expert(model, degrees)
    if degrees.context > 1:
        yield from _context(model, parallel, degrees)
    if degrees.tensor > 1:
        yield from _tensor(model, degrees)


def _recomputed(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Of `activation_checkpointing_target`: blocks and parts that the model has not."""
    key = "parallel.activation_checkpointing_target"
    written = parallel.activation_checkpointing_target
    if written is None:
        return
    try:
        targets = read_targets(written, getattr(model, "n_layers", None), key)
    except ValueError as error:
        yield str(error)
        return
    parts = frozenset[str]().union(*targets)
    if isinstance(model, HFModelConfig) and parts != {BLOCK}:
        yield (
            f"{key}: {', '.join(sorted(parts - {BLOCK}))}, but the model is of a class of"
            " transformers' own, of which blocks alone are known; write block"
        )
    elif EXPERTS in parts and model.ffn_config.ffn_type != "dmoe":
        yield f"{key}: the model has no experts; write feed_forward"


def compiled_limits(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Lines for what cannot be done to the activations of this model where it is compiled."""
    again = recomputation(parallel.activation_checkpointing)
    if again != "whole" or parallel.activation_compression == "none":
        return
    target = parallel.activation_checkpointing_target
    parts = frozenset[str]().union(
        *read_targets(target, getattr(model, "n_layers", None), "target")
    )
    may_route = isinstance(model, HFModelConfig) or model.ffn_config.ffn_type == "dmoe"
    if may_route and parts & {BLOCK, "feed_forward"}:
        yield (
            f"parallel.activation_compression: {parallel.activation_compression} with compile: true"
            " and routers computed again (activation_checkpointing: whole) would choose other"
            " experts the second time; write compile: false, or activation_checkpointing_target:"
            " [attention, experts]"
        )


def _transformers(degrees: Degrees) -> Iterator[str]:
    for key in (*AXES[2:], EXPERT):
        degree = getattr(degrees, key.removesuffix("_parallel_degree"))
        if degree > 1:
            yield (
                f"parallel.{key}: {degree}, but the model is of a class of transformers' own, which"
                " FSDP alone cuts; write 1, and data_parallel_shard_degree: -1"
            )


def _expert(model: ModelConfig, degrees: Degrees) -> Iterator[str]:
    key, experts = "parallel.expert_parallel_degree", model.ffn_config.moe_num_experts
    if model.ffn_config.ffn_type != "dmoe":
        yield f"{key}: {degrees.expert}, but the model has no experts; write 1"
    elif experts is not None:
        yield from divides(key, degrees.expert, "model.ffn_config.moe_num_experts", experts)
    if model.ffn_config.moe_impl == "megablocks":
        yield (
            "model.ffn_config.moe_impl: megablocks wants rows for its experts, and a process that"
            f" shares them ({key}: {degrees.expert}) may get none; write grouped_mm"
        )


def _context(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    key, heads = "parallel.context_parallel_degree", model.n_heads // degrees.tensor
    if parallel.context_parallel_method == "ulysses" and heads % degrees.context:
        of = "model.n_heads" if degrees.tensor == 1 else "the heads of a tensor-parallel process"
        *_, line = divides(key, degrees.context, of, heads)
        yield f"{line}, or context_parallel_method: all_gather"


def context_method(model: ModelConfig, parallel: ParallelConfig, degrees: Degrees) -> str:
    """How attention sees whole rows that processes share: the method written, or the default."""
    if parallel.context_parallel_method is not None:
        return parallel.context_parallel_method
    heads = model.n_heads // degrees.tensor
    return "all_gather" if heads % degrees.context else "ulysses"


def _tensor(model: ModelConfig, degrees: Degrees) -> Iterator[str]:
    key, attn, ffn = "parallel.tensor_parallel_degree", model.attn_config, model.ffn_config
    yield from divides(key, degrees.tensor, "model.n_heads", model.n_heads)
    if attn.kv_n_heads is not None:
        name = "model.attn_config.kv_n_heads"
        yield from divides(key, degrees.tensor, name, attn.kv_n_heads)
    if ffn.ffn_type != "dmoe" and ffn.ffn_hidden_size is not None:
        name = "model.ffn_config.ffn_hidden_size"
        yield from divides(key, degrees.tensor, name, ffn.ffn_hidden_size)
    if attn.qk_ln:
        yield (
            f"{key}: {degrees.tensor}, but model.attn_config.qk_ln normalizes queries and keys over"
            " all heads, which lie on several processes; write 1, or qk_gn in its place"
        )


def tensor_adapters(adapter: str, quantize: str, degrees: Degrees) -> Iterator[str]:
    """Lines for what fine-tuning adds to a model whose matrices processes would share."""
    key, instead = "parallel.tensor_parallel_degree", "write 1, and data_parallel_shard_degree: -1"
    if degrees.tensor > 1 and adapter != "none":
        yield f"{key}: {degrees.tensor}, but an adapter's layers are not cut; {instead}"
    if degrees.tensor > 1 and quantize != "none":
        yield f"{key}: {degrees.tensor}, but matrices in 4 bits are not cut; {instead}"

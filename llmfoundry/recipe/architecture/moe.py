"""What the keys of a mixture of experts in `model.ffn_config` may be, and what they default to.

The keys have LLM Foundry's and megablocks' names where the meaning is theirs; `ffn.py` declares
them, because they stand flat beside the other keys of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmfoundry.recipe.values.checks import fill, inert

if TYPE_CHECKING:
    from llmfoundry.recipe.architecture.ffn import FFNConfig

OTHER_NAMES = {  # LLM Foundry's, of which each is something else
    "torch_dmoe": "is LLM Foundry's name of a mixture without a balancing loss; write dmoe",
    "mb_dmoe": "is LLM Foundry's name of megablocks' mixture; write dmoe",
    "mb_moe": "is LLM Foundry's name of a mixture that drops tokens, which dmoe never does; write"
    " dmoe",
}
MLP_TYPES = ("mlp", "glu")
BALANCING = ("loss", "bias", "none")
SCOPES = ("row", "microbatch")
IMPLS = ("grouped_mm", "torch", "megablocks")

KEYS = (  # that have no effect without experts
    "moe_num_experts",
    "moe_top_k",
    "mlp_type",
    "moe_normalize_expert_weights",
    "moe_jitter_eps",
    "moe_balancing",
    "moe_loss_weight",
    "moe_lbl_scope",
    "moe_bias_update_rate",
    "moe_zloss_weight",
    "shared_expert_hidden_size",
    "uniform_expert_assignment",
    "moe_force_balance",
    "moe_impl",
    "moe_compress_activations",
)


def check(key: str, ffn: FFNConfig) -> Iterator[str]:
    """Lines for values that cannot be, contradict each other, or have no effect."""
    if ffn.ffn_type != "dmoe":
        yield from inert(key, ffn, KEYS, "without ffn_type: dmoe")
        return
    yield from _check_router(key, ffn)
    yield from _check_balancing(key, ffn)
    if ffn.moe_impl not in (None, "grouped_mm"):
        yield from inert(key, ffn, ["moe_compress_activations"], f"with moe_impl: {ffn.moe_impl}")


def _check_router(key: str, ffn: FFNConfig) -> Iterator[str]:
    if ffn.moe_num_experts is None:
        yield f"{key}moe_num_experts: ffn_type: dmoe needs it; write a number of experts"
    elif ffn.moe_top_k is not None and ffn.moe_top_k > ffn.moe_num_experts:
        yield (
            f"{key}moe_top_k: {ffn.moe_top_k} is more than moe_num_experts"
            f" ({ffn.moe_num_experts}); write at most that"
        )
    eps = ffn.moe_jitter_eps
    if eps is not None and not 0 < eps < 1:
        yield f"{key}moe_jitter_eps: {eps}; write a number between 0 and 1, or remove it"
    if ffn.uniform_expert_assignment and ffn.moe_force_balance:
        yield (
            f"{key}moe_force_balance: and uniform_expert_assignment exclude each other; set one of"
            " them to false"
        )


def _check_balancing(key: str, ffn: FFNConfig) -> Iterator[str]:
    chosen = ffn.moe_balancing or "loss"
    if chosen != "loss":
        why = f"with moe_balancing: {chosen}"
        yield from inert(key, ffn, ["moe_loss_weight", "moe_lbl_scope"], why)
    if chosen != "bias":
        why = "without moe_balancing: bias"
        yield from inert(key, ffn, ["moe_bias_update_rate"], why)


def fill_defaults(ffn: FFNConfig) -> None:
    """Write derived values in place."""
    fill(ffn, moe_top_k=1, mlp_type="mlp", moe_balancing="loss", moe_impl="grouped_mm")
    fill(ffn, uniform_expert_assignment=False, moe_force_balance=False)
    if ffn.moe_balancing == "loss":
        fill(ffn, moe_loss_weight=0.01, moe_lbl_scope="row")
    if ffn.moe_balancing == "bias":
        fill(ffn, moe_bias_update_rate=1e-3)
    if ffn.moe_impl == "grouped_mm":
        fill(ffn, moe_compress_activations=False)

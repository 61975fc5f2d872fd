"""Every line that the keys of a mixture of experts can yield, and what they default to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.model import OTHER_MOE_NAMES, FFNConfig, ModelConfig
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.schema import Only, Schema
from llmfoundry.recipe.train import TrainRecipe

KEY = "model.ffn_config."
MOE_KEYS = [name for name, key in Schema.of(FFNConfig).keys.items() if key.rule(Only)]
LINES = {  # beside ffn_type: dmoe, moe_num_experts: 4
    "moe_top_k: 5": "moe_top_k: 5 is more than moe_num_experts (4); write at most that",
    "moe_top_k: 0": "moe_top_k: 0 is too small; write 1 or more",
    "moe_num_experts: null": "moe_num_experts: ffn_type: dmoe needs it; write a number of experts",
    "moe_num_experts: 0": "moe_num_experts: 0 is too small; write 1 or more",
    "mlp_type: gul": "mlp_type: 'gul' is not a choice; did you mean 'glu'?",
    "moe_impl: grouped": "moe_impl: 'grouped' is not a choice",
    "moe_normalize_expert_weights: 0": "moe_normalize_expert_weights: 0.0 must be greater than 0",
    "moe_jitter_eps: 1": "moe_jitter_eps: 1.0; write a number between 0 and 1, or remove it",
    "moe_balancing: losses": "moe_balancing: 'losses' is not a choice; did you mean 'loss'?",
    "moe_loss_weight: 0": "moe_loss_weight: 0.0 must be greater than 0",
    "moe_lbl_scope: rows": "moe_lbl_scope: 'rows' is not a choice; did you mean 'row'?",
    "moe_zloss_weight: -1": "moe_zloss_weight: -1.0 must be greater than 0",
    "shared_expert_hidden_size: 0": "shared_expert_hidden_size: 0 is too small; write 1 or more",
    "moe_bias_update_rate: 1": "moe_bias_update_rate: has no effect without model.ffn_config."
    "moe_balancing: bias; remove it",
    "moe_balancing: bias, moe_loss_weight: 1": "moe_loss_weight: has no effect with model.ffn_"
    "config.moe_balancing: bias, only with loss; remove it",
    "moe_balancing: none, moe_lbl_scope: row": "moe_lbl_scope: has no effect with model.ffn_co",
    "uniform_expert_assignment: true, moe_force_balance: true": "moe_force_balance: and uniform_exp"
    "ert_assignment exclude each other; set one of them to false",
}


def problems(values: str) -> tuple[str, ...]:
    try:
        checked(TrainRecipe, None, ["run_name=x", f"model.ffn_config={{{values}}}"])
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("values", LINES)
def test_a_mistake_is_one_line_that_names_its_key(values: str) -> None:
    experts = "" if "moe_num_experts" in values else "moe_num_experts: 4, "
    found = problems(f"ffn_type: dmoe, {experts}{values}")
    assert len(found) == 1 and found[0].startswith(KEY + LINES[values])


@pytest.mark.parametrize("name", OTHER_MOE_NAMES)
def test_llm_foundrys_names_are_answered_with_ours(name: str) -> None:
    (line,) = problems(f"ffn_type: {name}, moe_num_experts: 4")
    assert line.startswith(f"{KEY}ffn_type: {name} is ") and line.endswith("; write dmoe")


VALUES = {"mlp_type": "glu", "moe_balancing": "bias", "moe_lbl_scope": "row", "moe_impl": "torch"}
VALUES |= {"moe_scoring_func": "sigmoid"}


@pytest.mark.parametrize("key", MOE_KEYS)
def test_a_key_of_experts_has_no_effect_without_them(key: str) -> None:
    types = {field.name: str(field.type) for field in dataclasses.fields(FFNConfig)}
    value = "true" if "bool" in types[key] else VALUES.get(key, "1")
    assert problems(f"{key}: {value}") == (
        f"{KEY}{key}: has no effect with {KEY}ffn_type: mptmlp, only with dmoe; remove it",
    )


def test_every_key_of_experts_is_listed() -> None:
    fields = {field.name for field in dataclasses.fields(FFNConfig)}
    assert fields - set(MOE_KEYS) == {"ffn_type", "ffn_act_fn", "ffn_hidden_size", "glu_limit"}


def test_defaults_are_written_and_no_mistakes() -> None:
    def filled(**values: object) -> dict[str, object]:
        config = FFNConfig(ffn_type="dmoe", moe_num_experts=4, **values)  # type: ignore[arg-type]
        config.fill()
        assert list(config.check(KEY)) == []
        return {k: v for k, v in vars(config).items() if v is not None and k in MOE_KEYS[1:]}

    always = {
        "moe_top_k": 1,
        "mlp_type": "mlp",
        "moe_scoring_func": "softmax",
        "uniform_expert_assignment": False,
        "moe_force_balance": False,
    }
    kernel = {"moe_impl": "grouped_mm"}
    by_loss = {"moe_balancing": "loss", "moe_loss_weight": 0.01, "moe_lbl_scope": "row"}
    by_bias = {"moe_balancing": "bias", "moe_bias_update_rate": 0.001}
    assert filled() == always | kernel | by_loss
    assert filled(moe_balancing="bias") == always | kernel | by_bias
    assert filled(moe_balancing="none", moe_impl="torch") == always | {
        "moe_balancing": "none",
        "moe_impl": "torch",
    }


def test_a_dense_model_has_none_of_the_keys() -> None:
    config = ModelConfig().resolve().ffn_config
    assert all(getattr(config, key) is None for key in MOE_KEYS)
    assert config.active_share == 1


@pytest.mark.parametrize("path", sorted((YAMLS / "model").glob("dbrx*.yaml")), ids=lambda p: p.stem)
def test_dbrx_models_visit_4_of_16_experts(path: Path) -> None:
    recipe = checked(TrainRecipe, YAMLS / "quickstart.yaml", [f"model={path.stem}"])
    recipe = recipe.resolve()
    ffn = recipe.model.ffn_config
    if path.stem == "dbrx-tiny-dense":
        experts = checked(TrainRecipe, YAMLS / "quickstart.yaml", ["model=dbrx-tiny"]).model
        assert ffn.ffn_hidden_size == 4 * (experts.ffn_config.ffn_hidden_size or 0)
        same = dataclasses.replace(recipe.model, ffn_config=experts.ffn_config)
        experts = experts.resolve(max_seq_len=recipe.max_seq_len)
        experts.init_config.router_init_std = None  # it has no router
        assert same == dataclasses.replace(experts, ffn_config=same.ffn_config)
    else:
        assert (ffn.moe_num_experts, ffn.moe_top_k, ffn.mlp_type) == (16, 4, "glu")
        assert ffn.active_share == 0.25

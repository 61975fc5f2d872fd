"""No option of the `model` section without a test: each is in SETTINGS, or in ELSEWHERE."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.recipe.attention import ATTN_TYPES, NORMS, ROPE_TYPES
from llmfoundry.recipe.model import FFN_TYPES, ModelConfig
from llmfoundry.recipe.schema import options
from tests.models.test_decoder import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
_HERE, _INIT = "tests/models/test_options.py", "tests/models/test_init.py"
_MOE = "tests/models/test_moe.py"
ELSEWHERE = {  # fields that no comparison of logits shows, and the test that does
    "name": "tests/recipe/test_recipe_checks.py::test_training_recipe",
    "d_model": "tests/models/test_counts.py::test_parameter_counts_are_mpts",
    "vocab_size": "tests/models/test_counts.py::test_parameter_counts_are_mpts",
    "emb_pdrop": f"{_HERE}::test_embeddings_are_dropped_after_positions_are_added",
    "resid_pdrop": f"{_HERE}::test_what_attention_and_ffn_add_is_dropped",
    "ffn_config.moe_jitter_eps": f"{_MOE}::test_jitter_reaches_the_router_alone",
    "ffn_config.moe_balancing": f"{_MOE}::test_biases_balance_a_skewed_router",
    "ffn_config.moe_loss_weight": f"{_MOE}::test_losses_are_weighted_and_averaged_over_layers",
    "ffn_config.moe_lbl_scope": f"{_MOE}::test_balancing_loss_is_megablocks_formula_over_its_scope",
    "ffn_config.moe_bias_update_rate": f"{_MOE}::test_a_bias_chooses_and_does_not_weigh",
    "ffn_config.moe_zloss_weight": f"{_MOE}::test_losses_are_weighted_and_averaged_over_layers",
    "ffn_config.uniform_expert_assignment": f"{_MOE}::test_benchmarks_can_have_equal_loads",
    "ffn_config.moe_force_balance": f"{_MOE}::test_benchmarks_can_have_equal_loads",
    "ffn_config.moe_impl": f"{_MOE}::test_outputs_and_gradients_are_the_definitions",
    "attn_config.attn_pdrop": f"{_HERE}::test_dropped_attention_is_the_undropped_in_the_mean",
    "init_config.name": f"{_INIT}::test_matrices_follow_torch_nn_init",
    "init_config.fan_mode": f"{_INIT}::test_matrices_follow_torch_nn_init",
    "init_config.init_nonlinearity": f"{_INIT}::test_kaiming_takes_the_gain_of_its_nonlinearity",
    "init_config.init_gain": f"{_INIT}::test_matrices_follow_torch_nn_init",
    "init_config.init_std": f"{_INIT}::test_matrices_follow_torch_nn_init",
    "init_config.emb_init_std": f"{_INIT}::test_embeddings_may_have_a_law_of_their_own",
    "init_config.emb_init_uniform_lim": f"{_INIT}::test_embeddings_may_have_a_law_of_their_own",
    "init_config.router_init_std": f"{_INIT}::test_routers_may_have_a_law_of_their_own",
    "init_config.init_div_is_residual": f"{_INIT}::test_residual_projections_are_divided",
}
CHOICES = {  # keys of few values, each of which a setting must have; the default always is one
    "attn_config.attn_type": ATTN_TYPES,
    "attn_config.rope_hf_config.type": ROPE_TYPES,
    "ffn_config.ffn_type": FFN_TYPES,
    "norm_type": tuple(NORMS),
}


def fields(schema: Any, key: str = "") -> Iterator[str]:
    """Dotted names of all values below a section; lists and names of one's own are left out."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        sections = list(_sections(hints[field.name]))
        name = f"{key}{field.name}"
        if not sections or schema in sections:
            yield name
        for section in sections:
            if section is not schema:
                yield from fields(section, f"{name}.")


def _sections(hint: Any) -> Iterator[type]:
    """Dataclasses in a type, those in its lists and dicts too."""
    for option in options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            yield option
        elif typing.get_origin(option) in (list, dict):
            yield from _sections(typing.get_args(option)[-1])


def given(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names that a setting gives, as `fields` writes them, and their values."""
    yield key, values
    if key == "block_overrides.overrides":  # names of one's own, which `fields` leaves out
        values = list(values.values())
    for item in values if isinstance(values, list) else []:
        for name, value in item.items():
            yield from given(value, f"{key}.{name}")
    for name, value in values.items() if isinstance(values, dict) else []:
        yield from given(value, f"{key}.{name}".removeprefix("."))


GIVEN = [pair for settings in SETTINGS.values() for pair in given(settings)]


def test_every_option_has_a_test() -> None:
    known = set(fields(ModelConfig))
    tested = {key for key, _ in GIVEN}
    assert len(known) > 45, "the schema was not walked"
    assert known - tested - ELSEWHERE.keys() == set(), "options without a test"
    assert ELSEWHERE.keys() - known == set(), "tests of options that do not exist"


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_tests_of_other_files_exist(place: str) -> None:
    path, name = place.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), place


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_is_in_a_setting(key: str) -> None:
    default = CHOICES[key][0]
    assert set(CHOICES[key]) == {value for name, value in GIVEN if name == key} | {default}

"""Composition gives OmegaConf only what interpolations concern; the result is that of all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from llmfoundry.errors import UserError
from llmfoundry.recipe.compose import Composed, compose
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_dict

SCHEMA = Schema.of(TrainRecipe)
CASES = {
    "no interpolation": ("model: {d_model: 48}", ["model.n_layers=3", "seed=5", "run_name=x"]),
    "of a section without one": ("max_seq_len: '${model.d_model}'\nmodel: {d_model: 48}", []),
    "of an overridden key": (
        "optimizer: {lr: 0.1}\nschedule: {alpha_f: '${optimizer.lr}'}",
        ["optimizer.lr=0.5"],
    ),
    "within another": (
        "run_name: model\nmax_seq_len: '${${run_name}.d_model}'\nmodel: {d_model: 48}",
        [],
    ),
    "within another, with a default": (
        "run_name: model\nmax_seq_len: '${oc.select:${run_name}.d_model,7}'\nmodel: {d_model: 48}",
        [],
    ),
    "relative": ("data: {remote: there, local: '${.remote}/here'}", []),
    "of the command line": ("model: {d_model: 48}", ["max_seq_len=${model.d_model}"]),
    "escaped": ("run_name: 'a\\${b}'\nsave_folder: x", []),
    "a list": ("optimizer: {betas: [0.1, 0.2]}", ["optimizer.betas=[0.8,0.9]"]),
    "a mapping": ("model: {attn_config: {rope: true}}", ["model.attn_config={kv_n_heads: 2}"]),
    "no section": ("model: {d_model: 48}", ["model.attn_config=null", "data=null"]),
    "keys that there are not": ("other: {key: 1}", ["another=2", "model.unknown=3"]),
}


def composed(folder: Path, text: str, words: list[str]) -> Composed:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return compose(SCHEMA, file, words)


def by_omegaconf(text: str, words: list[str]) -> Any:
    """The same of OmegaConf alone, which reads the command line's values as YAML."""
    config = OmegaConf.merge(to_dict(TrainRecipe()), OmegaConf.create(text))
    for word in words:
        key, _, value = word.partition("=")
        loaded = OmegaConf.create(f"value: {value}")._get_node("value")
        OmegaConf.update(config, key, loaded, merge=True, force_add=True)
    return config


@pytest.mark.parametrize("case", CASES)
def test_values_and_their_order_are_those_of_omegaconf_alone(case: str, tmp_path: Path) -> None:
    text, words = CASES[case]
    result, expected = composed(tmp_path, text, words), by_omegaconf(text, words)
    plain, resolved = (OmegaConf.to_container(expected, resolve=each) for each in (False, True))
    assert str(result.raw()) == str(plain)
    values, missing = result.resolved()
    assert (str(values), missing) == (str(resolved), {})


def test_what_a_caller_changes_stays_the_callers(tmp_path: Path) -> None:
    result = composed(tmp_path, "optimizer: {betas: [0.1, 0.2]}", [])
    for values in (result.raw(), result.resolved()[0]):
        values["optimizer"]["betas"].append(0.3)
        values["model"].clear()
    assert result.raw()["optimizer"]["betas"] == [0.1, 0.2] and result.raw()["model"]


def test_hydras_own_groups_change_nothing_and_their_options_are_checked(tmp_path: Path) -> None:
    text = "defaults: [model: mpt-125m, override hydra/job_logging: {}]"
    plain = composed(tmp_path, "defaults: [model: mpt-125m]", []).raw()
    assert composed(tmp_path, text.format("disabled"), []).raw() == plain
    with pytest.raises(UserError, match=r"could not find 'hydra/job_logging/nothing'"):
        composed(tmp_path, text.format("nothing"), [])
    with pytest.raises(UserError, match="hydra/launcher appears more than once"):
        composed(tmp_path, "defaults: [hydra/launcher: basic]", [])
    (tmp_path / "below.yaml").write_text(text.format("disabled"))
    assert composed(tmp_path, "defaults: [below]", []).raw() == plain


def test_a_list_in_place_of_a_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.attn_config: a section cannot replace a list"):
        composed(tmp_path, "model: {d_model: 48}", ["model.attn_config=[1]"])

"""What a run minimises: kto's rows must be of both kinds, other runs have no objective but text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmfoundry.builders.evaluation import build_objective
from llmfoundry.builders.preference import check_sides
from llmfoundry.data.order import Order
from llmfoundry.data.sources import OrderedStream
from llmfoundry.data.supervised.packed_examples import SupervisedSource
from llmfoundry.errors import UserError
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.train import TrainRecipe


class Labelled(SupervisedSource):
    """Rows of which only the labels are asked."""

    def __init__(self, labels: list[int]) -> None:
        self.name, self.n_rows, self._labels = "rows", len(labels), np.array(labels, np.int8)

    @property
    def sides(self) -> np.ndarray:
        return self._labels


def data(*streams: list[int]) -> Any:
    order = Order(np.array([1]), seed=0, shuffle=False)
    return SimpleNamespace(streams=[OrderedStream(Labelled(s), order) for s in streams])


def tuned(name: str) -> FinetuneRecipe:
    recipe = FinetuneRecipe()
    recipe.preference.name = name
    return recipe.resolve()


@pytest.mark.parametrize(
    ("labels", "there", "missing"), [([1, 1], "true", "false"), ([-1], "false", "true")]
)
def test_rows_of_one_kind_are_refused_with_the_label_that_lacks(
    labels: list[int], there: str, missing: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_sides(data(labels, labels), tuned("kto"))
    (line,) = refused.value.problems
    assert f"the label of every row is {there}" in line and line.endswith(f"label: {missing}")


def test_both_kinds_may_be_in_streams_of_their_own() -> None:
    check_sides(data([1, 1], [-1]), tuned("kto"))
    check_sides(data([1, -1, 1]), tuned("kto"))


def test_other_methods_do_not_ask_for_labels() -> None:
    check_sides(data([1]), tuned("dpo"))
    check_sides(data([1]), TrainRecipe())


def test_only_preference_recipes_have_an_objective() -> None:
    job: Any = SimpleNamespace(root=SimpleNamespace(model=None))
    for recipe in (TrainRecipe(), tuned("none")):
        assert build_objective(SimpleNamespace(**vars(job), recipe=recipe)) is None  # type: ignore[arg-type]
    for name in ("dpo", "kto", "orpo", "simpo"):
        assert build_objective(SimpleNamespace(**vars(job), recipe=tuned(name)))  # type: ignore[arg-type]

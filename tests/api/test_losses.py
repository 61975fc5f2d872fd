"""Own losses: their mean is that of the global batch, however it is split; wrong ones are named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import llmfoundry as lf
from llmfoundry.ops.packed_layout import IGNORE
from tests.plugin_tables import tables_as_before
from tests.tiny import losses
from tests.warm_scripts import on_ranks

Result = Any


def tokens_loss(model: Any, batch: Any) -> Result:
    """Losses (B, T): cross-entropy."""
    logits = model(batch.tokens).transpose(1, 2)
    return F.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="none")


def sequences_loss(model: Any, batch: Any) -> Result:
    """Losses (B,): the largest cross-entropy of each sequence."""
    return tokens_loss(model, batch).amax(1)


def digits_loss(model: Any, batch: Any) -> Result:
    """A sum and its count: the labels that are digits, of which sequences have unequal numbers."""
    is_digit = (batch.labels >= ord("0")) & (batch.labels <= ord("9"))
    return (tokens_loss(model, batch) * is_digit).sum(), is_digit.sum()


def recipe(name: str, **values: object) -> Any:
    short = {"run_name": f"loss-{name}", "max_duration": "2ba"}
    return lf.recipe("tiny.yaml", {**short, **values})


def expected(name: str, batch: Any) -> torch.Tensor:
    """The loss of the first step by its definition, on the initial weights."""
    model = lf.build(recipe("expected"))
    logits = model(batch.tokens, batch.layout)
    each = F.cross_entropy(
        logits.transpose(1, 2), batch.labels, reduction="none", ignore_index=-100
    )
    if name == "tokens_loss":
        return each[batch.labels >= 0].mean()
    if name == "sequences_loss":
        return torch.stack([row.max() for row in each]).mean()
    digits = [chr(max(0, label)) in "0123456789" for label in batch.labels.flatten().tolist()]
    return each.flatten()[torch.tensor(digits)].mean()


def train_on_rank(rank: int, folder: str, name: str) -> None:
    os.chdir(folder)
    lf.train(recipe(f"{name}-ranks"), loss=globals()[name], show="nothing")


@pytest.mark.parametrize("loss", [tokens_loss, sequences_loss, digits_loss])
def test_the_mean_is_of_the_global_batch(here: Path, loss: Callable[..., Result]) -> None:
    name = loss.__name__
    runs = {
        rows: lf.train(
            recipe(f"{name}-{rows}", device_train_microbatch_size=rows), loss=loss, show="nothing"
        )
        for rows in (1, 4)
    }
    found = losses(runs[4].folder)
    with torch.no_grad():
        first = expected(name, lf.data(recipe("expected"))[0]).item()
    assert found[1] == pytest.approx(first, rel=1e-6)
    assert losses(runs[1].folder) == pytest.approx(found, rel=1e-5)  # also after an update
    if loss is not tokens_loss:
        on_ranks(train_on_rank, [str(here), name], 2)
        assert losses(Path(f"runs/loss-{name}-ranks")) == pytest.approx(found, rel=1e-5)


def test_cross_entropy_of_ones_own_trains_as_the_built_in_one(here: Path) -> None:
    built_in = lf.train(recipe("built-in"), show="nothing")
    own = lf.train(recipe("own"), loss=tokens_loss, show="nothing")
    assert losses(own.folder) == pytest.approx(losses(built_in.folder), rel=1e-5)
    assert not own.metric("metrics/train/bits_per_byte")


def mean_loss(model: Any, batch: Any) -> Result:
    return tokens_loss(model, batch).mean()


def one_more_loss(model: Any, batch: Any) -> Result:
    return F.pad(tokens_loss(model, batch), (0, 1))


def detached_loss(model: Any, batch: Any) -> Result:
    return tokens_loss(model, batch).detach()


def nan_loss(model: Any, batch: Any) -> Result:
    return tokens_loss(model, batch) * float("nan")


def list_loss(model: Any, batch: Any) -> Result:
    return [tokens_loss(model, batch)]


def number_loss(model: Any, batch: Any) -> Result:
    return tokens_loss(model, batch).sum().item(), 3


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (
            mean_loss,
            "loss: mean_loss returned a tensor () of float32 for B, T = 1, 64; return loss",
        ),
        (
            one_more_loss,
            "loss: one_more_loss returned a tensor (1, 65) of float32 for B, T = 1, 64",
        ),
        (detached_loss, "loss: detached_loss returned a loss that no weight has a gradient of"),
        (nan_loss, "loss: nan_loss, or its gradient, was not finite in step 1"),
        (list_loss, "loss: list_loss returned (a tensor (1, 64) of float32) for B, T = 1, 64"),
        (number_loss, "loss: number_loss returned a loss that no weight has a gradient of"),
        (3, "loss: 3 is no function of model and batch"),
    ],
)
def test_a_wrong_loss_is_named(here: Path, loss: Any, line: str) -> None:
    with pytest.raises(lf.UserError, match=re.escape(line)):
        lf.train(recipe("wrong", save_overwrite=True), loss=loss, show="nothing")


MOE = {
    f"model.ffn_config.{key}": value
    for key, value in {
        "ffn_type": "dmoe", "mlp_type": "glu", "ffn_act_fn": "silu", "ffn_hidden_size": 16,
        "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.1,
    }.items()
}  # fmt: skip


def test_with_routers_losses_a_loss_is_of_tokens(here: Path) -> None:
    with pytest.raises(lf.UserError, match="the routers of this model add losses"):
        lf.train(recipe("moe", **MOE), loss=digits_loss, show="nothing")
    built_in = lf.train(recipe("moe-built-in", **MOE), show="nothing")
    own = lf.train(recipe("moe-own", **MOE), loss=tokens_loss, show="nothing")
    assert losses(own.folder) == pytest.approx(losses(built_in.folder), rel=1e-5)


def test_an_exception_in_a_loss_stays_what_it_is(here: Path) -> None:
    def failing(model: Any, batch: Any) -> Result:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        lf.train(recipe("failing"), loss=failing, show="nothing")


PLUGIN = '''
import torch.nn.functional as F

from llmfoundry.recipe.loss import LOSSES, LossType


def focal(model, batch, *, gamma):
    """Lin et al., 2017: cross-entropy that counts certain tokens less."""
    log_probs = model.log_probs()
    return -((1 - log_probs.exp()) ** gamma) * log_probs


LOSSES["focal"] = LossType(focal, keys={"gamma": 2.0}, meaning="Lin et al., 2017.")
'''


def test_a_plugins_loss_is_a_choice_of_the_recipe(here: Path) -> None:
    Path("focal.py").write_text(PLUGIN)
    plugin = {"plugins": ["focal.py"], "loss.name": "focal"}
    with tables_as_before():
        plain = lf.train(recipe("zero", **plugin, **{"loss.kwargs.gamma": 0.0}), show="nothing")
        focal = lf.train(recipe("focal", **plugin), show="nothing")
        with pytest.raises(lf.UserError, match=r"unknown key 'loss.kwargs.gama'; did you mean"):
            recipe("wrong", **plugin, **{"loss.kwargs.gama": 1.0})
        with pytest.raises(lf.UserError, match="write one of the two"):
            lf.train(recipe("focal", **plugin), loss=tokens_loss)
    built_in = lf.train(recipe("plain"), show="nothing")
    assert losses(plain.folder) == pytest.approx(losses(built_in.folder), rel=1e-5)
    assert losses(focal.folder)[1] < losses(plain.folder)[1]

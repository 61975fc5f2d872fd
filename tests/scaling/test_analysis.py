"""From runs to laws, gains, trends and predictions; what files of runs may hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmfoundry.errors import UserError
from llmfoundry.loggers.pages.scaling_page import told
from llmfoundry.scaling.analysis import fit_families, gains, refuse_far, summary, trends
from llmfoundry.scaling.law import Law
from llmfoundry.scaling.points import Point, finite, fitted, read_points, to_csv

LAW = Law(1.5, 50.0, 200.0, 0.3, 0.35)


def runs(family: str = "", *, law: Law = LAW) -> list[Point]:
    """A grid of three sizes and three numbers of tokens, without noise."""
    return [
        Point(f"{family}{n:g}-{d:g}", family, n, d, 6 * n * d, float(law.loss(n, d)), target=d)
        for n in (1e6, 2e6, 4e6)
        for d in (2e7, 4e7, 8e7)
    ]


def test_held_out_run_is_predicted_and_not_fitted() -> None:
    far = replace(runs()[0], name="far", parameters=8e6, tokens=1.6e8, flops=48 * 1.6e14)
    held = replace(far, held_out=True, loss=float(LAW.loss(8e6, 1.6e8)) * 1.01)
    (fit,) = fit_families([*runs(), held], rounds=20)
    assert len(fit.points) == 9
    told = fit.held_out(held)
    found = summary([*runs(), held], [fit], {"": told | {"before": True}})
    (test,) = found["families"][""]["held_out"]
    assert test["error"] == pytest.approx(1 / 1.01 - 1, rel=1e-3)
    assert test["times_largest"] == pytest.approx(4)


def test_gain_is_the_compute_that_is_saved() -> None:
    """A law of a third of the cost in size and data: D and N count three times, so C nine times."""
    better = replace(LAW, a=LAW.a * 3**-LAW.alpha, b=LAW.b * 3**-LAW.beta)
    (gain,) = gains(fit_families([*runs("dense"), *runs("moe", law=better)], rounds=20))
    assert gain["gain"] == pytest.approx(9, rel=1e-3)
    assert (gain["family"], gain["over"]) == ("moe", "dense")


def test_best_learning_rate_and_its_trend() -> None:
    points = []
    for one in runs():
        best = 1e-2 * (one.flops / 1e14) ** -0.2
        for lr in (best / 3, best / 1.2, 2 * best):
            loss = one.loss + 0.05 * math.log(lr / best) ** 2
            points.append(
                replace(one, lr=lr, batch_tokens=1.0, loss=loss, width=int(one.parameters / 1e4))
            )
    used = fitted(points)
    assert len(used) == 9
    assert all(one.loss < 1.003 * before.loss for one, before in zip(used, runs(), strict=True))
    (trend,) = trends(points)
    assert trend["exponent"] == pytest.approx(-0.2, abs=1e-6)
    assert not any(best["at_end"] for best in trend["best"])


def test_far_budgets_are_refused_unless_asked_for() -> None:
    (fit,) = fit_families(runs(), rounds=20)
    refuse_far(fit, 99 * fit.most_flops, allowed=False)
    with pytest.raises(UserError, match=r"budget: .* 101 times .* extrapolate=true"):
        refuse_far(fit, 101 * fit.most_flops, allowed=False)
    refuse_far(fit, 101 * fit.most_flops, allowed=True)


def test_too_few_runs_are_refused() -> None:
    what = "sizes: the runs with a finite loss have 1 size, 3 numbers of tokens and 3 pairs of"
    with pytest.raises(UserError, match=what):
        fit_families(runs()[:3], rounds=20)


def test_an_estimate_lies_within_its_own_interval() -> None:
    """The loss of six runs with noise, whose bootstrapped laws often lie to one side."""
    random = np.random.default_rng(3)
    few = [run for run in runs() if (run.parameters, run.tokens) not in ((4e6, 8e7), (2e6, 4e7))]
    for _ in range(2):
        noisy = [replace(run, loss=run.loss * math.exp(random.normal(0, 0.01))) for run in few]
        (fit,) = fit_families(noisy, rounds=20)
        found = fit.as_json() | {"prediction": fit.predict(1e15)}
        pairs = [(found["law"][name], found["intervals"][name]) for name in found["law"]]
        pairs.append((found["size_exponent"], found["intervals"]["size_exponent"]))
        prediction = found["prediction"]
        pairs += [
            (prediction[name], ends) for name, ends in prediction.get("intervals", {}).items()
        ]
        for value, ends in pairs:
            assert ends is None or ends[0] <= value <= ends[1]


def test_other_constants_that_fit_as_well_are_unsure() -> None:
    """Of losses that do not fall with size any alpha fits as well."""
    flat = [replace(run, loss=2 + 300 * run.tokens**-0.3) for run in runs()]
    (fit,) = fit_families(flat, rounds=20)
    assert [*fit.as_json()["uncertain"]] == ["alpha"]
    lines = dict(told(finite(summary(flat, [fit], {}))))
    assert lines["unsure"].startswith("with alpha ")
    assert lines["unsure"].endswith("the law fits as well; write more sizes, further apart")
    (sure,) = fit_families(runs(), rounds=20)
    assert sure.as_json()["uncertain"] == {}


def test_points_come_back_from_their_own_table(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(to_csv(runs()))
    back = read_points(path)
    assert [(p.parameters, p.tokens, p.flops, p.loss) for p in back] == [
        (p.parameters, p.tokens, p.flops, p.loss) for p in runs()
    ]
    seeds = [replace(one, lr=lr) for one in runs() for lr in (1.0, 1.0, 2.0)]
    path.write_text(to_csv([replace(one, loss=one.loss * one.lr) for one in seeds]))
    assert len(fitted(read_points(path))) == 18 and len(fitted(seeds)) == 18
    path.write_text("Parameters,FLOPs,Loss\n1e6,1.2e14,3.0\n")
    (one,) = read_points(path)
    assert one.tokens == pytest.approx(2e7)


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "has no rows"),
        ("parameters,tokens\n1,2\n", "row 1: loss: is missing"),
        ("parameters,loss\n1,2\n", "row 1: tokens: is missing"),
        ("parameters,tokens,loss\n1,2,3\n1,-2,3\n", "row 2: tokens: '-2' is not a positive"),
        ("parameters,tokens,loss\n1,inf,3\n", "row 1: tokens: 'inf' is not"),
        ("parameters,tokens,loss\n1,1e300,3\n", "'1e300' is not a positive number below 1e\\+40"),
        ("parameters,tokens,loss\n1,2,x\n", "row 1: loss: 'x' is not"),
        ("parameters,tokens,loss\n1,2,nan\0\n", "p.csv: "),
    ],
)
def test_files_that_hold_no_runs_are_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(UserError, match=why):
        read_points(tmp_path / "p.csv")


def test_everything_is_told_in_a_line_each() -> None:
    """The loss falls with size faster than any exponent that is searched."""
    steep = [replace(one, loss=one.loss + (one.parameters / 1e6) ** -5) for one in runs()]
    found = summary(steep, fit_families(steep, rounds=20), {}) | {"parameters": "active"}
    assert found["families"][""]["at_edge"] == ["alpha"]
    lines = [f"{label} {text}" for label, text in told(finite(found))]
    line = next(line for line in lines if line.startswith("unsure"))
    assert line.startswith("unsure alpha is at an end of what is searched")
    (sure,) = fit_families(runs(), rounds=20)
    assert sure.as_json()["at_edge"] == []


def test_runs_that_all_have_one_loss_predict_nothing_and_one_without_is_told() -> None:
    same = [replace(one, loss=3.0) for one in runs()]
    (fit,) = fit_families([*same, replace(same[0], name="lost", loss=math.nan)], rounds=20)
    assert (fit.law.e, fit.law.a, fit.law.b) == (pytest.approx(3), 0, 0)
    found = finite(summary([replace(same[0], name="lost", loss=math.nan)], [fit], {}))
    assert dict(told(found))["left out"].startswith("lost: no finite loss")


def test_law_without_an_optimum_predicts_nothing() -> None:
    flat = [replace(one, loss=2 + 10 * one.tokens**-0.3) for one in runs()]
    (fit,) = fit_families(flat, rounds=20)
    assert fit.law.a == pytest.approx(0, abs=1e-9) and "undetermined" in fit.predict(1e15)
    assert gains([fit, *fit_families(runs("moe"), rounds=20)]) == []
    found = finite(summary(flat, [fit], {}))
    lines = dict(told(found))
    assert lines["frontier"] == "the best size grows as compute ** undetermined"


def test_json_has_no_nan() -> None:
    cleaned = finite({"a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.dumps(cleaned, allow_nan=False) == '{"a": null, "b": [null, 1.0]}'

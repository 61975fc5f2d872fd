"""What one of 512 ranks holds, counted on fake tensors, beside the estimate."""

from __future__ import annotations

import pytest

from benchmarks.memory.fake_ranks import count, read, said


def test_shards_are_as_large_as_the_estimate_says_and_the_peak_no_larger() -> None:
    recipe = read("mpt-7b", 512, ["model.n_layers=2"])
    (counted, _), (expected, _) = count(recipe, 512), said(recipe, 512)
    assert counted.parameters == pytest.approx(expected.parameters, rel=0.02)
    assert counted.gradients == pytest.approx(expected.gradients, rel=0.02)
    assert counted.moments == pytest.approx(expected.moments, rel=0.02)
    assert counted.peak <= expected.peak

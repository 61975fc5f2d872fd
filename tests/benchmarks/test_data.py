"""The loaders' bench: what is timed, and how ratios are made."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.contenders import EOS, SAMPLE_TOKENS, our_loader, time_batches
from benchmarks.data import Contender, LoaderTurn, loader_table, write_samples


def test_ratios_are_medians_of_each_rounds_own() -> None:
    rates = {"mds": [10.0, 20.0, 90.0], "tokens": [20.0, 20.0, 20.0], "rival": [5.0, 5.0, 30.0]}
    lines = loader_table(
        {name: [LoaderTurn(0.002, rate) for rate in found] for name, found in rates.items()}
    )
    assert lines[-1].split() == ["rival", "5", "2", "ms", "3.00", "4.00"]  # 2, 4, 3 and 4, 4, 2/3


def test_the_rate_counts_batches_after_the_first() -> None:
    def make(workers: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        time.sleep(0.1)
        while True:
            yield (torch.zeros(rows, SAMPLE_TOKENS, dtype=torch.int64),) * 2
            time.sleep(0.01)

    found = time_batches(make, 0, 4, seconds=0.2)
    assert found["first"] >= 0.1
    assert 100 < found["rate"] <= 400  # 4 rows in 10 ms or a little more


def test_both_of_our_formats_give_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "SAMPLES", 6)
    write_samples(tmp_path)
    samples = np.array(list(contenders.samples()))
    batch = next(our_loader(tmp_path / "mds")(0, 6))[0].numpy()
    assert sorted(batch.sum(1)) == sorted(samples.sum(1))
    stream = next(our_loader(tmp_path / "tokens")(0, 6))[0].numpy()
    ids = np.append(EOS, samples)[:-1].reshape(6, SAMPLE_TOKENS)  # the last id is only a label
    assert sorted(stream.sum(1)) == sorted(ids.sum(1))


def test_a_rival_that_is_not_installed_says_so(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    with Contender("streaming", sys.executable, tmp_path) as contender:
        assert contender.ready() == ("", "ModuleNotFoundError: No module named 'streaming'")

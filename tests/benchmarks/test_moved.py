"""Bytes and launches of a recipe, per sequence, next to arithmetic by hand."""

from __future__ import annotations

import pytest

from benchmarks.moved import COLUMNS, rows_of


def test_a_layer_more_is_a_layer_more_and_the_ends_stay() -> None:
    one, two, three = (rows_of("mpt-125m", 1, [f"model.n_layers={n}"]) for n in (1, 2, 3))
    for key in [*COLUMNS][2:]:
        blocks = [rows[0][key] for rows in (one, two, three)]
        assert blocks[2] - blocks[1] == pytest.approx(blocks[1] - blocks[0]) and blocks[0] > 0
        assert one[1][key] == two[1][key] == three[1][key] > 0


def test_the_loss_moves_ten_bytes_a_logit() -> None:
    """Two reads of a logit in fp32 and a gradient in bfloat16; what grows with one side cancels."""

    def ends(vocabulary: int, tokens: int) -> float:
        words = [f"model.vocab_size={vocabulary}", f"max_seq_len={tokens}"]
        return rows_of("mpt-125m", 1, words)[1]["GB"]

    a, b = 8192, 1024
    mixed = ends(2 * a, 2 * b) - ends(2 * a, b) - ends(a, 2 * b) + ends(a, b)
    assert mixed * 1e9 / (a * b) == pytest.approx(10, rel=0.02)

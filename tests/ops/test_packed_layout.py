"""`PackedLayout`: rows of documents and of trees, and the facts that backends read from them."""

from __future__ import annotations

import random

import pytest
import torch

from llmfoundry.ops.packed_layout import PackedLayout
from tests.ops.plain_tree import random_forest, visible


@pytest.mark.parametrize("seed", range(20))
def test_positions_and_trees_follow_from_where_parts_end(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(1, 60)
    parents = [random_forest(width, rng) for _ in range(3)]
    layout = PackedLayout.from_ends([forest.ends for forest in parents])
    for row, forest in enumerate(parents):
        paths = [visible(forest.parents, i) for i in range(width)]
        assert layout.positions[row].tolist() == [len(path) - 1 for path in paths]
        roots = [path[0] for path in paths]
        numbers = {root: n for n, root in enumerate(dict.fromkeys(roots))}
        assert layout.documents[row].tolist() == [numbers[root] for root in roots]
        assert layout.lengths[row] == tuple(roots.count(root) for root in numbers)
    if layout.ends is not None:
        assert layout.ends.tolist() == [forest.ends for forest in parents]
        assert layout.depth == int(layout.positions.max()) + 1


def test_ends_without_branches_are_documents() -> None:
    layout = PackedLayout.from_ends([[3, 3, 3, 5, 5, 6], [6] * 6], padding=(1, 0))
    expected = PackedLayout.from_lengths([[3, 2, 1], [6]], padding=(1, 0))
    assert layout.ends is None
    assert layout.lengths == expected.lengths
    assert layout.padding == expected.padding
    assert torch.equal(layout.positions, expected.positions)
    assert torch.equal(layout.documents, expected.documents)


def test_a_part_of_the_rows_keeps_its_trees_and_moves_with_them() -> None:
    ends = [[3, 2, 3, 4], [4, 4, 3, 4], [4, 4, 4, 4]]
    whole = PackedLayout.from_ends(ends, padding=(1, 0, 2))
    part = whole.rows(1, 3).to(torch.device("cpu"))
    assert part.ends is not None
    assert part.ends.tolist() == ends[1:]
    assert part.positions.tolist() == [[0, 1, 2, 2], [0, 1, 2, 3]]
    assert part.lengths == ((4,), (4,))
    assert part.padding == (0, 2)
    assert part.depth == 4
    assert whole.to(torch.device("meta")).ends.device.type == "meta"
    assert part.real_places().tolist() == [0, 1, 2, 3, 4, 5]

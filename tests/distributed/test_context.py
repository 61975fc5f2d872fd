"""Processes that share rows: which tokens each has, and that attention sees the whole rows.

Training by them is in `test_matrix.py`, runs of scripts in `test_context_run.py`.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.distributed.context import (
    EXCHANGES,
    AllGatherKV,
    apply_context_parallel,
    token_sharding,
)
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.parallel import (
    CONTEXT_METHODS,
    Degrees,
    ParallelConfig,
    context_method,
    limits,
)
from llmfoundry.recipe.train import TrainRecipe
from tests.models.test_decoder import (
    SETTINGS,
    make_config,
    make_model,
    plain_logits,
    plain_weights,
)
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
ROUTINE = (  # between them every way that rows are looked at; the others are slow
    "learned",
    "alibi-6-heads",
    "alibi-gqa-window",
    "latent-q",
    "rope-dynamic",
    "rope-yarn",
    "softcap",
    "sinks-window",
    "overrides",
    "overrides-unlike",
    "dmoe-dbrx",
)
LENGTHS, PADDING = [[13], [4, 1, 8], [2, 9, 2], [11, 2]], (0, 0, 2, 2)
SHARED = {  # the settings that attention or positions have a part in
    name: settings
    for name, settings in SETTINGS.items()
    if "attn_config" in settings or name in ("learned", "dmoe")
}


def make_batch(layout: bool = True, weights: bool = False) -> Batch:
    """Rows of 13 tokens, which neither 2 nor 4 processes divide."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 64, (4, 13), generator=generator)
    labels = torch.randint(0, 64, (4, 13), generator=generator)
    labels[torch.rand(4, 13, generator=generator) < 0.3] = IGNORE
    for row, pad in enumerate(PADDING):
        labels[row, 13 - pad :] = IGNORE
    of_rows = PackedLayout.from_lengths(LENGTHS, PADDING) if layout else None
    counted = torch.rand(4, 13, generator=generator).masked_fill(labels == IGNORE, 0)
    return Batch(tokens, labels, of_rows, counted if weights else None)


@pytest.mark.parametrize("layout", [True, False])
@pytest.mark.parametrize("degree", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_every_token_is_with_one_process_and_what_is_added_counts_nowhere(
    method: str, degree: int, layout: bool
) -> None:
    batch = make_batch(layout, weights=True)
    parts = [EXCHANGES[method]("", i, degree).shard(batch) for i in range(degree)]
    size = {part.tokens.shape for part in parts}
    assert len(size) == 1
    assert batch.weights is not None
    positions = batch.layout.positions if batch.layout else torch.arange(13).expand(4, -1)
    found: dict[tuple[int, int], Any] = {}
    for part in parts:
        assert part.layout is not None and part.layout.ranges is not None
        assert part.weights is not None
        places = torch.cat([torch.arange(a, b) for a, b in part.layout.ranges]).tolist()
        assert len(places) == part.tokens.shape[1] and part.layout.width >= 13
        real = part.layout.real_places()
        flags = torch.ones(part.tokens.numel(), dtype=torch.bool)
        if real is not None:
            flags = torch.zeros_like(flags).index_fill(0, real, True)
        for row in range(4):
            for i, place in enumerate(places):
                reported = (part.labels, part.weights, part.tokens, part.layout.positions)
                is_real = bool(flags.view(part.tokens.shape)[row, i])
                assert (row, place) not in found
                found[row, place] = (*(x[row, i].item() for x in reported), is_real)
    for row in range(4):
        for place in range(parts[0].layout.width):  # type: ignore[union-attr]
            label, weight, token, position, is_real = found.pop((row, place))
            if place >= 13:
                assert (label, weight, is_real) == (IGNORE, 0, False)
                continue
            assert label == batch.labels[row, place] and token == batch.tokens[row, place]
            assert weight == batch.weights[row, place] and position == positions[row, place]
            assert is_real == (place < 13 - (PADDING[row] if layout else 0))
    assert not found


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_gathered_keys_are_the_same_work_for_every_process(degree: int) -> None:
    """Queries times keys before them; a row cut in order gives the last process twice the mean."""
    width = 2 * degree * 5
    work = [
        sum(sum(range(a + 1, b + 1)) for a, b in AllGatherKV("", i, degree).ranges(width))
        for i in range(degree)
    ]
    assert set(work) == {width * (width + 1) // 2 // degree}


def test_parts_in_order_of_processes_are_the_row() -> None:
    ranges = [EXCHANGES["ulysses"]("", i, 4).ranges(16)[0] for i in range(4)]
    assert ranges[0][0] == 0 and ranges[-1][1] == 16
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def exactness(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    """Loss and gradients of some settings by four processes: 4 that share rows, and 2 x 2."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=4)
    world, found = World(rank, 4, rank, CPU), {}
    for context, method in product((4, 2), CONTEXT_METHODS):
        config = ParallelConfig(
            data_parallel_replicate_degree=4 // context,
            context_parallel_degree=context,
            context_parallel_method=method,
        )
        meshes = build_mesh(config, world)
        assert meshes is not None
        for name in names:
            settings = SHARED[name]
            if list(limits(make_config(**settings), config, meshes.degrees)):
                continue
            loss, grads = shared_loss(make_config(**settings), config, meshes, rank // context)
            flat = torch.cat([loss.view(1), *(grad.flatten() for grad in grads)])
            dist.all_reduce(flat)
            found[f"{name} {method} {context}"] = flat.tolist()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def shared_loss(
    model_config: Any, config: ParallelConfig, meshes: Any, data_rank: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """This process's part of the loss, and of its gradients."""
    root = Root(make_model(model_config).double())
    apply_context_parallel(root, meshes, config)
    cut = token_sharding(root)
    assert cut is not None
    rows = list(make_batch().split(4 // meshes.degrees.data))[data_rank]
    part = cut(rows)
    loss = root(part.tokens, part.layout, lambda model, hidden: model.loss(hidden, part.labels))
    parameters = list(root.model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return loss.detach(), tuple(torch.zeros_like(p) if g is None else g for g, p in pairs)


@cache
def shared(names: tuple[str, ...]) -> dict[str, list[float]]:
    """What each setting gave, by setting, method and degree."""
    with TemporaryDirectory() as folder:
        on_ranks(exactness, (Path(folder), names), 4)
        return json.loads((Path(folder) / "found.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ROUTINE else pytest.mark.slow) for n in SHARED]
)
def test_loss_and_gradients_are_those_of_the_plain_decoder(name: str) -> None:
    """In float64, of documents, padding, and rows that no degree divides."""
    config = make_config(**SHARED[name])
    batch = make_batch()
    leaves = plain_weights(make_model(config).double())
    logits = plain_logits(leaves, config, batch.tokens, LENGTHS)
    targets = batch.labels.flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(grads, leaves.values(), strict=True)
    plain = [torch.zeros_like(p) if g is None else g for g, p in pairs]
    expected = torch.cat([loss.detach().view(1), *(grad.flatten() for grad in plain)])
    found = shared(ROUTINE if name in ROUTINE else tuple(n for n in SHARED if n not in ROUTINE))
    for method, degree in product(CONTEXT_METHODS, (2, 4)):
        serves = method == "all_gather" or config.n_heads % degree == 0
        key = f"{name} {method} {degree}"
        assert (key in found) == serves
        if not serves:
            continue
        got = torch.tensor(found[key], dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # rotary tables: fp32
        if not config.attn_config.rope:
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_rows_are_whole_in_evaluation_and_must_be_cut_in_training() -> None:
    root = Root(make_model(make_config()))
    root.model.exchange = AllGatherKV("no such group", 1, 2)
    cut = token_sharding(root)
    assert cut is not None
    batch = make_batch()
    root.eval()
    with torch.no_grad():
        alone = make_model(make_config())(batch.tokens, batch.layout)
        assert torch.equal(root.model(batch.tokens, batch.layout), alone)
        with pytest.raises(AssertionError):
            root.model(*(lambda part: (part.tokens, part.layout))(cut(batch)))
    root.train()
    for layout in (batch.layout, None):
        with pytest.raises(AssertionError):
            root.model(batch.tokens, layout)


@pytest.mark.parametrize(
    ("heads", "written", "degrees", "method"),
    [
        (8, None, Degrees(context=4), "ulysses"),
        (8, None, Degrees(context=16), "all_gather"),
        (8, None, Degrees(context=4, tensor=4), "all_gather"),
        (8, None, Degrees(context=2, tensor=4), "ulysses"),
        (6, None, Degrees(context=4), "all_gather"),
        (8, "all_gather", Degrees(context=4), "all_gather"),
    ],
)
def test_ulysses_is_the_default_where_heads_divide(
    heads: int, written: str | None, degrees: Degrees, method: str
) -> None:
    config = ParallelConfig(context_parallel_degree=4, context_parallel_method=written)
    model = make_config(d_model=48, n_heads=heads)
    assert context_method(model, config, degrees) == method
    assert not list(limits(model, config, Degrees(context=degrees.context)))


ONE_REPLICA = ["parallel.data_parallel_replicate_degree=1"]
ULYSSES = ["parallel.context_parallel_method=ulysses", "model.d_model=48", "model.n_heads=6"]


@pytest.mark.parametrize(
    ("recipe", "words", "line"),
    [
        (
            TrainRecipe,
            [*ULYSSES, "parallel.context_parallel_degree=4"],
            "parallel.context_parallel_degree: 4 does not divide model.n_heads (6); the nearest"
            " that does is 3, or context_parallel_method: all_gather",
        ),
        (
            FinetuneRecipe,
            [
                *("preference.name=dpo", "data.format=preference"),
                *("parallel.context_parallel_degree=-1", *ONE_REPLICA),
                "model.pretrained=runs/none",
            ],
            "parallel.context_parallel_degree: -1, but preference.name: dpo compares answers of"
            " whole rows; write 1, and data_parallel_shard_degree: -1",
        ),
        (
            TrainRecipe,
            ["parallel.context_parallel_method=ulysses"],
            "parallel.context_parallel_method: has no effect with"
            " parallel.context_parallel_degree: 1; remove it",
        ),
    ],
)
def test_what_cannot_share_rows_is_one_line(recipe: Any, words: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        checked(recipe, None, words)
    assert line in str(error.value).splitlines()


def test_a_class_of_transformers_cannot_share_rows() -> None:
    root: Any = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert token_sharding(root) is None
    lines = list(limits(HFModelConfig(), ParallelConfig(), Degrees(2, 2, 2, 1, 4)))
    keys = ["parallel.context_parallel_degree: 2, but", "parallel.expert_parallel_degree: 4, but"]
    assert [line[: len(key)] for line, key in zip(lines, keys, strict=True)] == keys

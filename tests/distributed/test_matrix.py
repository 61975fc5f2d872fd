"""Every layout of processes takes the steps of one process: losses, norms, weights.

`layouts.py` has the layouts and their models. Rows have very different numbers of labels, one
process has none at all, and no microbatch divides its rows; what they are compared with is the
plain loop of `matrix.py`. Bytes of gradients that wait between microbatches are counted.

Some meshes have an axis beside those of data: processes along it, such as those of a tensor group,
read the same rows and count them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.builders.evaluation import build_evaluated, build_validation
from llmfoundry.builders.trainer import build_loader
from llmfoundry.distributed.mesh import build_mesh, with_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.gauntlet.questions import GenerationPrompt, ScoreRequest
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.parallel import ParallelConfig
from tests.distributed.layouts import ROUTINE, SLOW
from tests.distributed.matrix import Found, compare, run_all
from tests.train.test_preference_reference import Run

REQUESTS = [ScoreRequest((n, 5, 9, 7), (7, n), "a") for n in range(1, 8)]
GLOO_ON_GPUS = {  # what gloo has for tensors on GPUs, by PyTorch's ProcessGroupGloo.cpp
    *(f"c10d::{name}_" for name in ("broadcast", "allreduce", "allgather", "_allgather_base")),
    *(f"c10d::{name}_" for name in ("_reduce_scatter_base", "alltoall_base")),
    *(f"_c10d_functional::all_{name}" for name in ("reduce", "reduce_", "to_all_single")),
    *(f"_c10d_functional::{name}_tensor" for name in ("all_gather_into", "reduce_scatter", "wait")),
}


def beside_data(world: World) -> World:
    """Two shares of rows on four processes; adjacent processes read the same."""
    config = ParallelConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2)
    return with_mesh(world, build_mesh(config, world))


def measured(world: World, folder: Path) -> dict[str, Any]:
    """What is made of a share of the rows: batches, the reference, validation, the gauntlet."""
    world = world if world.size == 1 else beside_data(world)
    run = Run(folder)
    job = run.job = replace(run.job, world=world)
    run.begin()
    recipe, config = job.recipe, EvalConfig()
    recipe.global_train_batch_size = 4
    clock = Clock(4, 4 * recipe.max_seq_len, 2, Duration.parse("2ba"))
    subject = build_evaluated(job, config, 1)
    found = {
        "rows": build_loader(recipe, run.data, clock, job.tokenizer, world).rows(1).ids.tolist(),
        "references": [x for row in run.rows for x in row.references.ravel().tolist()],
        "preference": {  # rewards are rounding alone: the model is its reference
            name: value
            for name, value in build_validation(job, config, 1)().items()
            if not name.startswith("rewards/")
        },
        "scores": [score.logprob for score in subject.score(REQUESTS)],
        "texts": subject.generate([GenerationPrompt((n, 7), "", (), 4) for n in range(1, 6)]),
    }
    recipe.preference.name = "none"
    return found | {"language": build_validation(job, config, 1)()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("matrix")
    return run_all(ROUTINE, folder, measuring=(1, 4), measure=measured)


@pytest.fixture(scope="module")
def found_slow(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Found]:
    """What each entry of a group gives, of those that pytest was asked for."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}

    @cache
    def found_of(group: str) -> Found:
        entries = {name: entry for name, entry in SLOW[group].items() if name in asked}
        try:
            return run_all(entries, tmp_path_factory.mktemp("slow"))
        except AssertionError as error:  # of its processes: once is enough
            return {"failed": str(error)}

    return found_of


@pytest.mark.parametrize("name", ROUTINE)
def test_losses_norms_and_weights_are_those_of_a_plain_loop(found: Found, name: str) -> None:
    compare(ROUTINE[name], found[name])


def test_layouts_call_only_collectives_that_gloo_has_for_gpus(found: Found) -> None:
    called = {name: {*found[name]["collectives"]} for name in ROUTINE}
    assert called["expert-hsdp"] >= {"_c10d_functional::all_to_all_single"} and not called["one"]
    assert {*chain(*called.values())} <= GLOO_ON_GPUS | {"_c10d_functional::_wrap_tensor_autograd"}


@pytest.mark.slow
@pytest.mark.timeout(900)  # all of a group are computed before its first
@pytest.mark.parametrize(
    ("group", "name"),
    [pytest.param(group, name, id=name) for group, names in SLOW.items() for name in names],
)
def test_more_layouts_too(found_slow: Callable[[str], Found], group: str, name: str) -> None:
    found = found_slow(group)
    assert "failed" not in found, found["failed"]
    compare(SLOW[group][name], found[name])


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_metrics_of_every_parameter_are_those_of_one_process(found: Found, name: str) -> None:
    assert found[name]["metrics"] == pytest.approx(found["one"]["metrics"], rel=2e-3, abs=1e-5)


def test_processes_beside_the_data_axes_read_the_same_rows(found: Found) -> None:
    alone = found["measured-1-0"]["rows"]
    assert len(alone) == 4 and alone[:2] != alone[2:]
    for rank in range(4):
        first = rank // 2 * 2
        assert found[f"measured-4-{rank}"]["rows"] == alone[first : first + 2]


def test_each_row_is_counted_once_whatever_axes_there_are(found: Found) -> None:
    alone = found["measured-1-0"]
    assert alone["language"]["metrics/eval/LanguageCrossEntropy"] > 0
    for rank in range(4):
        reported = found[f"measured-4-{rank}"]
        assert reported["texts"] == alone["texts"]
        for name in ("language", "preference", "references", "scores"):
            assert reported[name] == pytest.approx(alone[name], rel=1e-5), name

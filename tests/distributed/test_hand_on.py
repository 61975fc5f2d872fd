"""Once a run, once a machine: who makes, who gets, and what is told where it fails; gloo ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry.distributed import broadcast_files, launch
from llmfoundry.distributed.launch import ALONE, join, on_each_machine, on_rank0
from llmfoundry.errors import UserError
from llmfoundry.recipe.parallel import ParallelConfig
from tests.warm_scripts import on_ranks

SIZE = 4
MACHINES = "abac"  # of each rank


class TwoWordsError(Exception):
    """Cannot be made again from its pickle, as some of other libraries'."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def fails(error: Exception) -> Any:
    raise error


def said(action: Callable[[], Any]) -> list[str]:
    """The kind of an error, and its lines."""
    try:
        action()
    except UserError as error:
        return ["UserError", *error.problems]
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def work(rank: int, folder: str, port: str) -> None:
    """What each rank got, and how often it made something."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    broadcast_files.PIECE = 1000
    launch._machine_name = lambda: f"node {MACHINES[rank]}"
    made: list[str] = []

    def make(what: str, value: Any) -> Callable[[], Any]:
        def made_here() -> Any:
            made.append(what)
            return value

        return made_here

    with join(ParallelConfig(dist_timeout=3)) as world:
        array = np.arange(1234)
        found: dict[str, Any] = {
            "in pieces": bool((on_rank0(world, make("array", array)) == np.arange(1234)).all()),
            "nothing": on_rank0(world, make("nothing", None)),
            "machine": on_each_machine(world, make("machine", f"rank {rank}'s")),
            "group": world.machine is not None and world.machine.group is not None,
            "user": said(lambda: on_rank0(world, lambda: fails(UserError("x: no", "y: no")))),
            "odd": said(lambda: on_rank0(world, lambda: fails(TwoWordsError("not", "again")))),
            "result": said(lambda: on_rank0(world, lambda: lambda: 0))[:1],
            "late": on_rank0(world, lambda: time.sleep(4) or "late", patient=True),
            "again": on_each_machine(world, make("again", rank), patient=True),
            "last": on_rank0(world, lambda: rank, patient=True),
        }
    (Path(folder) / str(rank)).write_text(json.dumps(found | {"made": made}))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("hand_on")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    on_ranks(work, (str(folder), port), SIZE)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(SIZE)]


def test_one_makes_and_all_get(found: list[dict[str, Any]]) -> None:
    assert all(one["in pieces"] and one["nothing"] is None for one in found)
    assert [one["machine"] for one in found] == ["rank 0's", "rank 1's", "rank 0's", "rank 3's"]
    assert [one["again"] for one in found] == [0, 1, 0, 3]
    assert [one["group"] for one in found] == [True, False, True, False]
    assert [one["made"] for one in found] == [
        ["array", "nothing", "machine", "again"],
        ["machine", "again"],
        [],
        ["machine", "again"],
    ]


def test_what_fails_on_one_is_told_by_all(found: list[dict[str, Any]]) -> None:
    assert [one["user"] for one in found] == [["UserError", "x: no", "y: no"]] * SIZE
    odd = ["RuntimeError", "TwoWordsError: not again"]
    assert [one["odd"] for one in found[1:]] == [odd] * (SIZE - 1)
    assert found[0]["odd"] == ["TwoWordsError", "not again"]  # its own, with its traceback
    assert found[0]["result"] and found[1]["result"] == found[2]["result"] == found[3]["result"]


def test_who_is_patient_waits_longer_than_dist_timeout(found: list[dict[str, Any]]) -> None:
    assert [one["late"] for one in found] == ["late"] * SIZE
    assert [one["last"] for one in found] == [0] * SIZE


def test_who_is_alone_makes_it_itself() -> None:
    assert on_rank0(ALONE, lambda: 3) == on_each_machine(ALONE, lambda: 3) == 3

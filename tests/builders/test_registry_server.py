"""A real `mlflow server`: several processes register at once; it is away while a run trains."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmfoundry.builders.registry import Tag, versions
from llmfoundry.errors import UserError
from llmfoundry.loggers.mlflow_logger import open_client
from tests.builders.test_registry import Run, address
from tests.loggers.test_mlflow_server import Server
from tests.tiny import run, write_recipe

pytestmark = pytest.mark.slow  # a server takes ten seconds to start


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.start()
    yield made
    made.kill()


def _register(uri: str, folder: Path, losses: list[float]) -> None:
    run = Run(uri, folder, "shared")
    for batch, loss in enumerate(losses, 1):
        run.save(batch, loss)
        run.register()


def test_runs_that_register_at_once_agree_on_the_best(server: Server, tmp_path: Path) -> None:
    open_client(server.address).create_experiment("tests")
    draw = random.Random(17)
    losses = [[draw.uniform(1, 9) for _ in range(6)] for _ in range(4)]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_register, args=(server.address, tmp_path / f"run{n}", found))
        for n, found in enumerate(losses)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0] * 4
    client = open_client(server.address)
    every = versions(client, "shared")
    assert [int(version.version) for version in every] == list(range(1, 25))
    holder = client.get_model_version_by_alias("shared", "best")
    assert float(holder.tags[Tag.VALUE]) == min(map(min, losses))


def test_two_runs_the_best_moves_and_its_name_is_taken_with_weights_elsewhere(
    server: Server, tmp_path: Path
) -> None:
    """The second run trains while the server is away, and is registered later by track.py."""
    recipe, uri = write_recipe(tmp_path), f"registry.uri={server.address}"
    words = ["logger.mlflow=true", f"logger.tracking_uri={server.address}", "registry.name=tiny"]
    words += ["eval_interval=4ba", "eval.validation_rows=null"]
    run("train.py", recipe, "run_name=slow", "optimizer.lr=1e-5", *words, cwd=tmp_path)
    best = address("models:/tiny@best", server.address)
    assert Path(best).is_relative_to(tmp_path / "runs" / "slow")

    server.kill()
    done = run("train.py", recipe, "run_name=fast", *words, cwd=tmp_path)
    assert "versions of tiny" in done.stdout + done.stderr  # what the server lacks
    with pytest.raises(UserError, match="does not answer"):
        address("models:/tiny@best", server.address)
    server.start()
    run("track.py", "run=runs/fast", cwd=tmp_path)
    best = address("models:/tiny@best", server.address)
    assert Path(best) == tmp_path / "runs/fast/checkpoints/ba0000012"

    run("eval.py", "models:/tiny@best", uri, cwd=tmp_path, processes=2)
    results = json.loads((tmp_path / "runs/fast/eval/ba0000012/results.json").read_text())
    client = open_client(server.address)
    again = client.get_model_version_by_alias("tiny", "best")
    model = client.get_logged_model(again.tags[Tag.MODEL])
    scores = {m.key: m.value for m in model.metrics if m.run_id != model.source_run_id}
    assert scores == results["metrics"] and Tag.EVALUATED in again.tags
    drawn = run("generate.py", "models:/tiny@best", uri, "temperature=0", cwd=tmp_path).stdout
    to = ["to=hf", "output=out", "registry.name=tiny-hf", uri]
    run("convert.py", "models:/tiny@best", *to, cwd=tmp_path)
    same = run("generate.py", "models:/tiny-hf/latest", uri, "temperature=0", cwd=tmp_path)
    assert same.stdout == drawn
    kept = {path.name for path in (tmp_path / "files").rglob("*") if path.is_file()}
    assert kept == {"recipe.yaml", "report.html", "results.json"}  # no weights

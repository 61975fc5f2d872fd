"""compile: true through inductor: the losses of the run without it, and checkpoints of either.

What is compiled, and when, is in tests/distributed/test_activation_checkpoint.py, with a backend
that takes no time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from llmfoundry.plan import microbatch_sizes
from llmfoundry.plan.memory import estimate
from llmfoundry.plan.microbatch_sizes import USABLE
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import losses, write_recipe
from tests.train.here import dtypes, rows, train_here
from tests.warm_scripts import on_ranks

BITS = "metrics/eval/bits_per_byte"
OPTIONS = (
    "max_duration=6ba",
    "schedule.t_warmup=1ba",
    "device_train_microbatch_size=3",  # of 4 rows: another shape in every step
    "eval_interval=3ba",
    "save_interval=3ba",
    "callbacks.generate.prompts=[line]",
    "callbacks.generate.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml and runs/eager."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("compile")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("eager", *OPTIONS)
        yield folder


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No test finds the graphs of another."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow  # 15 to 60 s, of which inductor has nearly all
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_are_those_of_the_uncompiled_run(
    place: Path, checkpointing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"compiled-{checkpointing}"
    arguments = ("compile=true", f"parallel.activation_checkpointing={checkpointing}")
    compiled = train_here(name, *OPTIONS, *arguments)
    assert "the first step takes a minute" in capsys.readouterr().out
    assert counters["stats"]["unique_graphs"] > 1, "nothing but the probe was compiled"
    assert losses(compiled) == pytest.approx(losses(Path("runs/eager")), rel=0, abs=1e-5)
    for batch in (3, 6):
        measured = [rows(folder, BITS)[batch][BITS] for folder in (compiled, Path("runs/eager"))]
        assert measured[0] == pytest.approx(measured[1], abs=1e-5)


@pytest.mark.slow
def test_dropout_falls_on_the_same_elements_when_a_compiled_block_is_computed_again(
    place: Path,
) -> None:
    arguments = (*OPTIONS, "compile=true", "model.resid_pdrop=0.2", "eval=off")
    kept = train_here("kept", *arguments)
    again = train_here("again", *arguments, "parallel.activation_checkpointing=true")
    assert losses(again) == pytest.approx(losses(kept), rel=0, abs=1e-6)
    assert losses(kept) != pytest.approx(losses(Path("runs/eager")), abs=1e-3)


@pytest.mark.slow
def test_a_run_resumes_compiled_or_not(place: Path) -> None:
    train_here("switched", *OPTIONS, "compile=true", "max_duration=3ba", "schedule.t_max=6ba")
    checkpoint = "checkpoints/ba0000003"
    assert dtypes(Path("runs/switched") / checkpoint) == dtypes(Path("runs/eager") / checkpoint)
    train_here("switched", *OPTIONS)
    found = losses(Path("runs/switched"))
    assert found == pytest.approx(losses(Path("runs/eager")), rel=0, abs=1e-5)


SHARDS = (
    "parallel=fsdp",
    "max_duration=4ba",
    "schedule.t_warmup=1ba",
    "save_interval=4ba",
    "device_train_microbatch_size=2",
    "max_seq_len=256",
)


def sharded(rank: int, folder: str, port: str, name: str, *overrides: str) -> None:
    """A run in two shards; `auto` finds room for no more than a block's inputs."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.chdir(folder)

    def need(level: str) -> int:
        asked = [*SHARDS, f"parallel.activation_checkpointing={level}", "run_name=none"]
        recipe = checked(TrainRecipe, "tiny.yaml", asked).resolve()
        recipe.model.fill(vocab_size=257)
        return estimate(recipe, 2, device=torch.device("cpu")).total(2)

    if overrides:
        least, most = need("whole"), need("none")
        assert least < most
        available = int((least + most) / USABLE)  # of both processes
        microbatch_sizes.available_memory = lambda device: available  # type: ignore[assignment]
    train_here(name, *SHARDS, *overrides)
    if rank == 0 and "compile=true" in overrides:
        (Path("runs") / name / "graphs").write_text(str(counters["stats"]["unique_graphs"]))


@pytest.mark.slow
def test_losses_are_those_of_the_uncompiled_run_in_shards_that_are_computed_again(
    tmp_path: Path,
) -> None:
    """All three at once: blocks compiled, recomputed as auto decides, and cut by FSDP2."""
    write_recipe(tmp_path)
    again = ("compile=true", "parallel.activation_checkpointing=auto")
    for name, overrides in (("plain", ()), ("all", again)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        on_ranks(sharded, (str(tmp_path), port, name, *overrides), 2)
    compiled, plain = (tmp_path / "runs" / name for name in ("all", "plain"))
    assert (
        'activation_checkpointing": "whole'
        in next(compiled.glob("checkpoints/*/state.json")).read_text()
    )
    assert int((compiled / "graphs").read_text()) > 1, "nothing but the probe was compiled"
    assert losses(compiled) == pytest.approx(losses(plain), rel=0, abs=1e-5)

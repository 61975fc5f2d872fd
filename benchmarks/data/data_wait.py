"""What reading costs a training step: steps on batches as they come, against the same made before.

    python -m benchmarks.data.data_wait [RECIPE.yaml] [key=value …]

Both take turns, some steps each, in one process, so that a busy minute of the machine meets both;
and both train on the same rows, because a step's time depends on the documents in them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.record import over_rounds, table, write
from llmfoundry.builders.job import with_defaults
from llmfoundry.builders.trainer import build_trainer
from llmfoundry.data.loader import BatchPrefetcher
from llmfoundry.distributed.launch import join
from llmfoundry.loggers.loggers import Tracker
from llmfoundry.ops.batch import Batch
from llmfoundry.recipe.front.load import load
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.train.step import train_step
from llmfoundry.train.trainer import Trainer

MADE = "of made before"
STEPS, ROUNDS = 5, 48  # 16 rounds were off by up to 3 %


def wait() -> None:
    """Build the run, train both ways by turns, print, write the result."""
    path, *overrides = sys.argv[1:] or ["yamls/quickstart.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        overrides += [f"save_folder={folder}", "logger.mlflow=false"]
        recipe = load(TrainRecipe, path, overrides)
        with join(recipe.parallel) as world:
            tracker = Tracker(with_defaults(recipe), Path(folder), is_main=world.is_main)
            trainer, _ = build_trainer(recipe, world, tracker)
            with closing(BatchPrefetcher(trainer.loader, 0)) as batches:
                rows = wait_rows(trainer, batches)
    print("\n".join(table(rows, {"batches": "{}", "ms a step": "{:.1f}", MADE: "{:.3f}"})))
    settings = {"recipe": Path(path).stem, "rounds": ROUNDS, "steps of a round": STEPS}
    print(f"\nwritten to {write('data-wait', rows, settings)}")


def wait_rows(trainer: Trainer, batches: BatchPrefetcher) -> list[dict[str, Any]]:
    """Rounds of both, after one to get warm; each is first as often as the other."""
    rounds = []
    for number in range(ROUNDS + 1):
        steps = range(number * STEPS, (number + 1) * STEPS)
        held = iter([trainer.loader.batch(step) for step in steps])
        if number % 2:
            read, constant = _seconds(trainer, batches), _seconds(trainer, held)
        else:
            constant, read = _seconds(trainer, held), _seconds(trainer, batches)
        rounds.append((read, constant))
    sides = [list(side) for side in zip(*rounds[1:], strict=True)]
    return [
        {
            "batches": name,
            "ms a step": over_rounds(seconds * 1e3 for seconds in side),
            MADE: over_rounds(a / b for a, b in zip(side, sides[1], strict=True)),
        }
        for name, side in zip(("as they are read", "made before"), sides, strict=True)
    ]


def _seconds(trainer: Trainer, batches: Iterator[Batch]) -> float:
    """Of a step, over some."""
    started = time.perf_counter()
    for _ in range(STEPS):
        result = train_step(
            trainer.module,
            trainer.optimizer,
            next(batches).to(trainer.world.device),
            number=0,
            microbatch=trainer.microbatch,
            autocast=trainer.autocast,
            clipping=trainer.recipe.gradient_clipping,
            guard=trainer.watch.guard,
        )
    result.loss.item()  # waits for the device
    return (time.perf_counter() - started) / STEPS


if __name__ == "__main__":
    wait()

"""What reading costs a training step: steps on batches as they come, against the same made before.

    python -m benchmarks.data_wait [RECIPE.yaml] [key=value …]

Both take turns, some steps each, in one process, so that a busy minute of the machine meets both;
and both train on the same rows, because a step's time depends on the documents in them. The median
over the rounds of each, and the median of their ratios, is printed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from llmfoundry.assemble.job import with_defaults
from llmfoundry.assemble.trainer import build_trainer
from llmfoundry.data.batch_prefetcher import BatchPrefetcher
from llmfoundry.ops.batch import Batch
from llmfoundry.parallel.launch import join
from llmfoundry.recipe.front.load import load
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.track.loggers import Tracker
from llmfoundry.train.step import train_step
from llmfoundry.train.trainer import Trainer

STEPS, ROUNDS = 5, 48  # 16 rounds were off by up to 3 %


def main() -> None:
    """Build the run, train both ways by turns, print."""
    path, *overrides = sys.argv[1:] or ["yamls/quickstart.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        overrides += [f"save_folder={folder}", "logger.mlflow=false"]
        recipe = load(TrainRecipe, path, overrides)
        with join(recipe.parallel) as world:
            tracker = Tracker(with_defaults(recipe), Path(folder), is_main=world.is_main)
            trainer, _ = build_trainer(recipe, world, tracker)
            with closing(BatchPrefetcher(trainer.loader, 0)) as batches:
                measure(trainer, batches)


def measure(trainer: Trainer, batches: BatchPrefetcher) -> None:
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
    read, constant = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    ratio = statistics.median(a / b for a, b in rounds[1:])
    print(f"a step on batches as they are read: {read * 1e3:.1f} ms")
    print(f"a step on the same, made before:    {constant * 1e3:.1f} ms")
    print(f"reading costs {ratio - 1:+.2%}")


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
            guard=trainer.guard,
        )
    result.loss.item()  # waits for the device
    return (time.perf_counter() - started) / STEPS


if __name__ == "__main__":
    main()

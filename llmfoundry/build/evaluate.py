"""What measures a model in a run's loop and in `scripts/eval.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmfoundry.build.job import Job
from llmfoundry.data.loader import validation_batches
from llmfoundry.gauntlet.categories import GauntletResult
from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.train.validation import validate


def eval_rows(recipe: TrainRecipe, microbatch: int) -> int:
    """Rows evaluated at a time; without gradients a microbatch always fits."""
    rows = recipe.device_eval_batch_size
    return rows if isinstance(rows, int) else microbatch


def build_evaluate(
    job: Job, config: EvalConfig, *, rows: int, record: Callable[[int, GauntletResult], None]
) -> Callable[[int], dict[str, float]]:
    """A function of the batch number that measures the model and returns metrics.

    Gauntlet files are read here, so that their mistakes show before the first step. Every process
    must call the function; `record` is given the gauntlet's whole result.
    """
    gauntlet = build_gauntlet(job, config)
    token_bytes = torch.from_numpy(job.tokenizer.token_bytes()).to(job.world.device)
    padding = job.recipe.model.vocab_size or 0
    token_bytes = torch.nn.functional.pad(token_bytes, (0, padding - len(token_bytes)))
    device, autocast = job.world.device, job.autocast

    def evaluate(batch: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if config.validation:
            batches = validation_batches(
                job.prepared.validation,
                seq_len=job.recipe.max_seq_len,
                eos_id=job.tokenizer.eos_id,
                batch_size=rows,
                rank=job.world.rank,
                world_size=job.world.size,
                max_rows=config.validation_rows,
                attend_across_documents=job.recipe.data.attend_across_documents,
            )
            metrics |= validate(job.root, batches, token_bytes, device=device, autocast=autocast)
        if gauntlet is not None:
            result = gauntlet.run(
                job.root,
                device=device,
                batch_rows=rows,
                autocast=autocast,
                rank=job.world.rank,
                world_size=job.world.size,
            )
            metrics |= result.metrics()
            record(batch, result)
        return metrics

    return torch.no_grad()(evaluate)


def build_gauntlet(job: Job, config: EvalConfig) -> Gauntlet | None:
    """The in-context tasks, read and tokenised; None where the recipe names none."""
    if config.gauntlet is None:
        return None
    gauntlet = Gauntlet(
        find_file(config.gauntlet, "eval.gauntlet"),
        job.tokenizer,
        seq_len=job.recipe.max_seq_len,
        validation_texts=job.prepared.validation_texts,
        max_rows=config.icl_rows,
    )
    for problem in gauntlet.problems:
        job.note(problem)
    return gauntlet

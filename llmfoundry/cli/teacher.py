"""`scripts/prepare_data.py teacher=MODEL`: a teacher reads the prepared tokens of a recipe.

Several processes of one machine (one per GPU, or parallel.nproc_per_node) share the work, each with
the full teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmfoundry.builders.data import open_data
from llmfoundry.builders.open_model import OpenedModel, open_model
from llmfoundry.builders.pretrained import open_base
from llmfoundry.builders.teacher import TeacherJob, check_teacher, write_teacher
from llmfoundry.builders.tokenizer import make_tokenizer
from llmfoundry.data.preparation.output_folder import OutputFolder
from llmfoundry.data.preparation.prepare import Manifest
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.local_ranks import with_local_ranks
from llmfoundry.distributed.process_group import World, join
from llmfoundry.errors import UserError
from llmfoundry.recipe.before_training import ResolvedPrepareRecipe
from llmfoundry.recipe.data import DataConfig, FilterConfig, StreamConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.redaction import public


def ask_teacher(recipe: ResolvedPrepareRecipe, write_tokens: Callable[[], None]) -> None:
    """Store the teacher's tokens next to the recipe's tokens, which are prepared if necessary.

    Args:
        recipe: the recipe, with a teacher.
        write_tokens: writes prepare.output, if the recipe has one.
    """
    assert recipe.teacher is not None
    parallel, output = recipe.parallel, recipe.prepare.output
    with with_local_ranks(parallel, replicas=True), join(parallel) as world:

        def note(line: str) -> None:
            if world.is_main:
                print(public(line), flush=True)

        # what can be refused is refused before any text is read
        pretrained = None
        if isinstance(recipe, ResolvedFinetuneRecipe):
            pretrained = open_base(recipe, world, note=note)
        tokenizer = make_tokenizer(recipe, world, pretrained)
        opened = _open(recipe.teacher, world, note)
        job = TeacherJob(recipe.teacher, recipe.top_k, recipe, tokenizer, world, note)
        check_teacher(job, opened)

        # the tokens, then the teacher
        if output is not None:
            on_rank0(world, write_tokens, patient=True)
            recipe.data = _written(recipe.data, output)
        data = open_data(recipe, tokenizer, world)
        if output is None:
            for line in data.summary.splitlines():
                note(line)
        write_teacher(job, data, opened)
        note("data: train on it with loss=distill")


def _open(name: str, world: World, note: Callable[[str], None]) -> OpenedModel:
    """Open the teacher, without its weights; an error names the recipe's key."""
    try:
        return open_model(name, world, note=note)
    except UserError as error:
        lines = [f"teacher: {line.removeprefix('checkpoint: ')}" for line in error.problems]
        raise UserError(*lines) from error


def _written(config: DataConfig, output: str) -> DataConfig:
    """Return the data section that reads what was written to `output`."""
    manifest = Manifest.read(OutputFolder(output, config.storage_options))
    assert manifest is not None, "written before"
    held_out = manifest.counts["validation"].documents
    return replace(
        config,
        name="shards",
        remote=output,
        local=None,
        split="train",
        paths=[],
        text_column=None,
        filter=FilterConfig(),
        deduplicate="none",
        validation_fraction=0.0,
        validation=StreamConfig(remote=output, split="validation") if held_out else None,
    )

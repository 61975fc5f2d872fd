"""Checks of a training run that need no prepared data and no weights.

Entry points: `check_recipe`, before model.pretrained is downloaded, and `check_run`, before data is
prepared, the model is built or weights are loaded. Training and `--dry-run` call the same
functions. The order is that of cost: what the recipe, the files, the tokenizer, the chat template
and the first rows show is refused before anything expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from llmfoundry.builders.callbacks import check_callbacks
from llmfoundry.builders.data import is_measured
from llmfoundry.builders.evaluation import check_gauntlet, open_gauntlet
from llmfoundry.builders.pretrained import PretrainedModel
from llmfoundry.builders.resume import StartPoint, check_start
from llmfoundry.builders.tokenizer import make_tokenizer, settle_vocabulary
from llmfoundry.data.order import ONLY, stream_key
from llmfoundry.data.preparation.bad_rows import BadRowsError
from llmfoundry.data.preparation.corpus import check_first_document
from llmfoundry.data.supervised.first_rows import check_first_rows
from llmfoundry.data.supervised.packed_examples import PackOptions
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.source import INSTRUCTIONS, SourceConfig, under_key
from llmfoundry.recipe.train import ResolvedTrainRecipe

_HERE = ("python_stdlib", INSTRUCTIONS)  # sources that every machine has


def check_run(
    recipe: ResolvedTrainRecipe,
    start: StartPoint,
    world: World,
    note: Callable[[str], None],
    pretrained: PretrainedModel | None = None,
) -> tuple[Tokenizer, Gauntlet | None]:
    """Make the tokenizer, and run all checks that need no prepared data, cheapest first.

    The size of the vocabulary is set in the recipe. Every process must call this.

    Returns:
        The tokenizer, and the tasks of the gauntlet except those of held-out text.

    Raises:
        UserError: the run would be refused later.
    """
    tokenizer = make_tokenizer(recipe, world, pretrained)
    settle_vocabulary(recipe, tokenizer, note)
    return tokenizer, check_inputs(recipe, tokenizer, start, world, note)


def check_recipe(recipe: ResolvedTrainRecipe, world: World, *, n_ranks: int | None = None) -> None:
    """Check the gauntlet's files, the callbacks, and the first document of each local corpus.

    Every process must call this.

    Args:
        recipe: recipe of the run.
        world: this process.
        n_ranks: number of processes of the run; unset: those of `world`.

    Raises:
        UserError: a file is missing or has a mistake, or a corpus cannot be read.
    """
    check_callbacks(recipe, n_ranks or world.size)

    def check_files() -> None:
        check_gauntlet(recipe.eval)
        for key, config in _sources(recipe):
            if not config.is_supervised:
                with under_key(key):
                    check_first_document(config)

    on_rank0(world, check_files)


def check_inputs(
    recipe: ResolvedTrainRecipe,
    tokenizer: Tokenizer,
    start: StartPoint,
    world: World,
    note: Callable[[str], None],
    *,
    is_dry_run: bool = False,
) -> Gauntlet | None:
    """Check what the recipe, the tokenizer, the checkpoint and the first rows show.

    Every process must call this.

    Args:
        recipe: recipe of the run, with the shape of its model.
        tokenizer: tokenizer of the run.
        start: the checkpoint to begin with.
        world: this process.
        note: logs a line.
        is_dry_run: nothing is downloaded or written.

    Returns:
        The tasks of the gauntlet, except those of held-out text; None without a gauntlet.

    Raises:
        UserError: the run would be refused later.
    """
    check_start(recipe, tokenizer, start, world)
    on_rank0(world, lambda: _check_rows(recipe, tokenizer), patient=True)
    return open_gauntlet(recipe, recipe.eval, tokenizer, world, note, is_dry_run=is_dry_run)


def _check_rows(recipe: ResolvedTrainRecipe, tokenizer: Tokenizer) -> None:
    """Check the first rows of all supervised sources; bad rows are reported together."""
    problems: list[str] = []
    for key, config in _sources(recipe):
        if not (config.is_supervised and is_here(config)):
            continue
        config = replace(config)
        config.fill()
        options = PackOptions(
            seq_len=recipe.max_seq_len,
            seed=recipe.seed,
            shuffle=config.shuffle,
            held_out=0.0,
            supervised=config.supervised,
            key=key,
        )
        try:
            with under_key(key):
                check_first_rows(config, options, tokenizer)
        except BadRowsError as error:
            problems += error.problems
    if problems:
        raise BadRowsError(*problems)


def not_checked(recipe: ResolvedTrainRecipe) -> list[str]:
    """Return the recipe keys of the sources that these checks do not read."""
    return [key for key, config in _sources(recipe) if not is_here(config)]


def is_here(source: SourceConfig) -> bool:
    """Return whether the rows or documents of a source are on this machine."""
    if source.name == "files":
        return not any("://" in path for path in source.paths)
    return source.name in _HERE


def _sources(recipe: ResolvedTrainRecipe) -> Iterator[tuple[str, DataConfig]]:
    """Yield the recipe key and the settings of each source that the run reads."""
    data = recipe.data
    sources: dict[str, SourceConfig] = {**data.streams} or {ONLY: data}
    for name, source in sources.items():
        yield stream_key(name), data if source is data else data.alone(source)
    if data.validation is not None and is_measured(recipe):
        yield "data.validation", data.alone(data.validation)

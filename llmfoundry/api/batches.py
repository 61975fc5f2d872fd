"""`data` of `import llmfoundry`: the batches that a run of a recipe trains on, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from llmfoundry.api.model import this_process
from llmfoundry.api.recipes import Overrides, checked_recipe
from llmfoundry.builders.pretrained import open_base
from llmfoundry.builders.tokenizer import make_tokenizer, settle_vocabulary
from llmfoundry.builders.trainer import open_batches
from llmfoundry.data.loader import Loader
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.terminal import to_stderr


class Batches(Sequence[Batch]):
    """The global batches of a run, one for each step.

    Attributes:
        tokenizer: of the run.
    """

    def __init__(self, loader: Loader, tokenizer: Tokenizer, n_steps: int) -> None:
        self._loader, self.tokenizer, self._n_steps = loader, tokenizer, n_steps

    def __len__(self) -> int:
        return self._n_steps

    @overload
    def __getitem__(self, step: int) -> Batch: ...

    @overload
    def __getitem__(self, step: slice) -> list[Batch]: ...

    def __getitem__(self, step: int | slice) -> Batch | list[Batch]:
        """Return the batch of a step, from 0."""
        steps = range(self._n_steps)[step]
        if isinstance(steps, range):
            return [self._loader.batch(each) for each in steps]
        return self._loader.batch(steps)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._loader.batch, range(self._n_steps))

    def __repr__(self) -> str:
        return f"Batches({self._n_steps:,} steps, {self._loader.n_rows:,} sequences)"


def data(recipe: TrainRecipe | str, overrides: Overrides = ()) -> Batches:
    """Return the batches that a run of a recipe trains on, in its order.

    Each is a global batch, which a run splits over its processes. Text is prepared as a run does,
    and cached; nothing else is written.

    >>> batches = lf.data(lf.recipe("tiny.yaml", {"max_duration": "3ba"}))
    >>> for batch in batches:
    ...     print(tuple(batch.tokens.shape), tuple(batch.labels.shape))
    (4, 64) (4, 64)
    (4, 64) (4, 64)
    (4, 64) (4, 64)

    Args:
        recipe: from `lf.recipe`, or what `lf.recipe` takes.
        overrides: with the name of a recipe, as of `lf.recipe`.
    """
    resolved = checked_recipe(recipe, overrides).resolve()
    world, pretrained = this_process(), None
    if isinstance(resolved, ResolvedFinetuneRecipe):
        pretrained = open_base(resolved, world, note=to_stderr)
    tokenizer = make_tokenizer(resolved, world, pretrained)
    settle_vocabulary(resolved, tokenizer, to_stderr)
    _, clock, loader = open_batches(resolved, tokenizer, world, lambda line: None)
    return Batches(loader, tokenizer, clock.total)

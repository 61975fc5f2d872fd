"""`scripts/average.py` and `average` of `import llmfoundry`: the mean of checkpoints' weights.

The result is a run's folder with one checkpoint, which eval, convert, generate and `load_path`
take. One tensor is in memory at a time, and an interrupted average continues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmfoundry.api.conversion import ReadParameter, read_plain
from llmfoundry.api.recipes import checked_texts
from llmfoundry.builders.adapter import has_adapter
from llmfoundry.builders.checkpoint import LoadedCheckpoint, model_identity, open_checkpoint
from llmfoundry.builders.pretrained import MODEL, model_yaml
from llmfoundry.builders.registry import address_of, find_address
from llmfoundry.checkpoint.commit import COMMIT
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.checkpoint.streamed import write_streamed
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, refuse_used, resumable_folder
from llmfoundry.models.lazy_tensors import LazyTensor
from llmfoundry.recipe.after_training import AverageRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe, load_run
from llmfoundry.recipe.optimizer import EmaConfig
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.typed import to_yaml


def average(
    checkpoints: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    **settings: Any,
) -> Path:
    """Write the average of checkpoints as a run's folder, as `scripts/average.py` does.

    >>> folder = lf.average("runs/quickstart", "runs/mean", last=2)
    the mean of 2 checkpoints, ... is runs/mean/checkpoints/ba0001900 (...)
    >>> lf.load(folder).name
    'runs/mean'

    Args:
        checkpoints: a run, for its `last` checkpoints; or several runs or checkpoints.
        output: a folder that does not exist or is empty.
        settings: further keys of scripts/average.py: last, proportions, weights.

    Raises:
        UserError: the checkpoints are not of the same model; nothing is written.
    """
    given = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else [*checkpoints]
    texts: dict[str, str | list[str]] = {
        "checkpoints": [os.fspath(checkpoint) for checkpoint in given],
        "output": os.fspath(output),
    }
    average_checkpoints(checked_texts(AverageRecipe, texts, settings))
    return Path(output).expanduser()


class Source(NamedTuple):
    """A checkpoint to average: opened without its weights, and its share of the average."""

    loaded: LoadedCheckpoint
    share: float


def average_checkpoints(recipe: AverageRecipe) -> None:
    """Write the average of a checked recipe's checkpoints, on the CPU."""
    output = Path(str(recipe.output)).expanduser()
    refuse_used(output)
    sources = open_sources(recipe, print)
    newest = max(sources, key=lambda source: int(source.loaded.state["batch"])).loaded
    files, state = _small_files(newest, output), _state(newest, sources)
    commits = [(s.loaded.folder / COMMIT).read_text() for s in sources]
    identity = repr((files, state, commits, recipe.weights))
    with resumable_folder(output, identity, note=print) as (run, journal):
        atomic_write(run / "recipe.yaml", files["recipe.yaml"])
        newest.tokenizer.save(run / "tokenizer")
        place = Storage(run).checkpoint_folder(state["batch"])
        place.mkdir(parents=True, exist_ok=True)
        n_bytes = write_streamed(place, _averaged(sources, newest), state, files, journal)
    saved = Storage(output).checkpoint_folder(state["batch"])
    names = ", ".join(str(source.loaded.checkpoint) for source in sources)
    kind = "mean" if recipe.proportions is None else "average"
    print(f"the {kind} of {len(sources)} checkpoints, {names}, is {show(saved)}", end=" ")
    print(f"({n_bytes / 1e6:,.1f} MB)")


def open_sources(recipe: AverageRecipe, note: Callable[[str], None]) -> list[Source]:
    """Open all checkpoints of a recipe without their weights, and compare them.

    Raises:
        UserError: one of them cannot be read, or is not of the same model as the first.
    """
    names = [
        find_address(name, "checkpoints", uri=recipe.registry.uri, note=note)
        for name in recipe.checkpoints
    ]
    for name in names:  # before any is opened
        find_place(name, "checkpoints", ALONE)
    if recipe.last is not None:
        names = _last(names[0], recipe.last)
    opened = [open_checkpoint(name, ALONE, note=note, weights=recipe.weights)[0] for name in names]
    folders = [loaded.folder.resolve() for loaded in opened]
    for number, loaded in enumerate(opened):
        _check_alike(opened[0], loaded)
        if folders[number] in folders[:number]:
            raise UserError(
                f"checkpoints: {loaded.checkpoint} is there more than once; write proportions to"
                " weight it"
            )
    proportions = recipe.proportions or [1.0] * len(opened)
    total = sum(proportions)
    return [Source(loaded, p / total) for loaded, p in zip(opened, proportions, strict=True)]


def _last(name: str, count: int) -> list[str]:
    """Return the addresses of a run's newest complete checkpoints, oldest first."""
    run = find_place(name, "checkpoints", ALONE)
    if isinstance(run, Checkpoint):
        raise UserError(f"last: {name} is one checkpoint; write its run's folder, or remove last")
    folders = [folder for folder in run.checkpoints() if run.has_commit(folder)]
    if len(folders) < count:
        raise UserError(f"last: {count}, but {run} holds {len(folders)} complete checkpoints")
    return [address_of(run, folder) for folder in reversed(folders[:count])]


def _check_alike(first: LoadedCheckpoint, other: LoadedCheckpoint) -> None:
    """Check that weights of two checkpoints mean the same.

    Raises:
        UserError: they are of other models or tokenizers, or are adapters.
    """
    if has_adapter(other.recipe):
        raise UserError(
            f"checkpoints: {other.checkpoint} is an adapter, and a mean of its factors is not the"
            " mean of their products; train with ema.decay, or average what scripts/convert.py"
            " to=hf and from=hf make of each"
        )
    here, there = model_identity(first.recipe.model), model_identity(other.recipe.model)
    changed = [key for key in here | there if here.get(key) != there.get(key)]
    for key in changed:
        raise UserError(
            f"checkpoints: {other.checkpoint} has {key}: {there.get(key)}, but {first.checkpoint}"
            f" has {here.get(key)}; average checkpoints of the same model"
        )
    if first.tokenizer.fingerprint != other.tokenizer.fingerprint:
        raise UserError(
            f"checkpoints: {other.checkpoint} has another tokenizer than {first.checkpoint};"
            " average checkpoints of the same model"
        )


def _averaged(sources: Sequence[Source], newest: LoadedCheckpoint) -> list[LazyTensor]:
    """Return the average of each tensor; integers, which have none, are those of `newest`."""
    readers = [(read_plain(source.loaded), source.share) for source in sources]
    read_newest = read_plain(newest)
    tensors = []
    for name, like in newest.root.model.state_dict().items():
        read = partial(read_newest, name)
        if like.dtype.is_floating_point:
            read = partial(_mean, name, readers)
        tensors.append(LazyTensor(name, like.shape, like.dtype, (name,), read))
    return tensors


def _mean(name: str, readers: Sequence[tuple[ReadParameter, float]]) -> Tensor:
    """Return the weighted sum of a tensor of all checkpoints, in fp32 or wider."""
    result: Tensor | None = None
    for read, share in readers:
        value = read(name)
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        result = wide * share if result is None else result.add_(wide, alpha=share)
    assert result is not None
    return result


def _small_files(newest: LoadedCheckpoint, output: Path) -> dict[str, str]:
    """Return the texts of the checkpoint: recipe, tokenizer, and the model of fine-tuning.

    The recipe is that of `newest` under another name, and without a moving average, of which the
    checkpoint has none.
    """
    recipe = load_run(newest.folder / "recipe.yaml")
    recipe.run_name, recipe.save_folder = output.name, str(output)
    recipe.ema, recipe.eval.weights = EmaConfig(), None
    files = {"recipe.yaml": to_yaml(recipe)}
    files |= {f"tokenizer/{name}": text for name, text in newest.tokenizer.files().items()}
    if isinstance(recipe, FinetuneRecipe):
        files[MODEL] = model_yaml(newest.recipe.model)
    return files


def _state(newest: LoadedCheckpoint, sources: Sequence[Source]) -> dict[str, Any]:
    """Return the content of state.json: weights alone, and what they are made of."""
    return {
        "batch": int(newest.state["batch"]),
        "identity": newest.state["identity"],
        "is_trained": newest.is_trained,
        "averaged": {str(source.loaded.checkpoint): source.share for source in sources},
    }

"""Checkpoints: sharded, with a commit marker last; lists and loads them.

    runs/<name>/checkpoints/ba0000100/
        __<rank>_*.distcp .metadata   the model, by torch.distributed.checkpoint
        optimizer__<rank>_*.distcp    what only training needs
        state.json                    time, seed, fingerprints of data and model
        recipe.yaml tokenizer/        all that eval, convert and generate need
        COMMIT                        names, sizes and checksums of the above, written last

A folder without COMMIT, or whose files differ from it, does not count: it is refused by name and
the one before is used. Loads on any layout of processes. `checkpointer.py` writes, `verify.py`
finds one that is whole.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from llmfoundry.checkpoint.remote_run import CHECKPOINTS, named, stored_run
from llmfoundry.checkpoint.safe_load import check_shapes, load_tensors
from llmfoundry.distributed.launch import ALONE, World
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import parse_json
from llmfoundry.models.adapters.adapt import is_added, plain_name, saved_names
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.tensor_ranks import all_stacked_rows

# said by torch for every save and load of a run that has one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_LONGEST = 1 << 26  # bytes of a state.json
_NAME = re.compile(r"ba\d{7,}")


def is_checkpoint(path: Path) -> bool:
    """Whether this is the folder of one checkpoint, rather than of a run, by its name."""
    return _NAME.fullmatch(path.name) is not None


def list_checkpoints(run_folder: Path) -> list[Path]:
    """All checkpoint folders of a run, whole or not, newest first."""
    run, above = stored_run(run_folder), run_folder / CHECKPOINTS
    if run is not None:
        names = run.store.folders(run.name(above))
    else:
        names = [folder.name for folder in above.glob("ba*") if folder.is_dir()]
    found = (above / name for name in names if _NAME.fullmatch(name))
    return sorted(found, key=batch_of, reverse=True)


def batch_of(folder: Path) -> int:
    """The steps after which a checkpoint was saved."""
    return int(folder.name[2:])


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json.

    Raises:
        UserError: it is not what a run writes.
    """
    path = folder / "state.json"
    try:
        if path.stat().st_size > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} bytes")
        state = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{named(path)}: {one_line(error)}") from error
    except ValueError as error:
        why = one_line(error).partition(";")[0]  # of Python's, without its advice
        raise UserError(
            f"{named(path)}: is not a run's state ({why}); choose another checkpoint"
        ) from error
    kinds = {"batch": int, "identity": dict, "order": dict, "callbacks": dict, "settings": dict}
    kinds["spikes"] = dict
    sound = isinstance(state, dict) and {"batch", "identity"} <= state.keys()
    if not sound or any(type(state[k]) is not kinds[k] for k in kinds.keys() & state.keys()):
        raise UserError(f"{named(path)}: is not a run's state; choose another checkpoint")
    return state


_OPTIONS = StateDictOptions(strict=True)
_PARTS = StateDictOptions(strict=False)  # names are the model's own; load_tensors misses none


def load_weights(
    folder: Path,
    model: Decoder,
    *,
    world: World = ALONE,
    left: Collection[str] = (),
    table: Metadata | None = None,
) -> None:
    """Fill `model`, which processes of `world` read together; `table`: of `check_weights`.

    Left alone are an adapter, what is kept in 4 bits, which checkpoints never are, and `left`.
    """
    _load_into(model, folder, _own_weights(model, left), world, table)


def check_weights(folder: Path, model: Decoder, *, world: World = ALONE) -> Metadata | None:
    """Compare what `load_weights` would fill with the checkpoint's shapes; `model` may be meta.

    Returns:
        The checkpoint's table, on rank 0.

    Raises:
        UserError: they are not the same, so that memory for the model is not to be asked for.
    """
    shapes = {f"model.{plain_name(n)}": t.shape for n, t in _own_weights(model).items()}
    return check_shapes(shapes, folder, world=world)


def _own_weights(model: Decoder, left: Collection[str] = ()) -> dict[str, Any]:
    whole = get_model_state_dict(model)
    quantized = {n for n, p in model.named_parameters() if p.dtype == torch.uint8}
    others = {n for n in whole if is_added(n) or n in quantized or n in left}
    return {n: t for n, t in whole.items() if n not in others}


def load_adapter(folder: Path, model: Decoder, *, world: World = ALONE) -> None:
    """Fill what an adapter's checkpoint holds of `model`, whose base has its weights."""
    _load_into(model, folder, saved_state(model), world)


def _load_into(
    model: Decoder,
    folder: Path,
    tensors: dict[str, Any],
    world: World,
    table: Metadata | None = None,
) -> None:
    names = {plain_name(name): name for name in tensors}
    state = {"model": {plain: tensors[name] for plain, name in names.items()}}
    load_tensors(state, folder, world=world, stacked=all_stacked_rows(model), table=table)
    loaded = {name: state["model"][plain] for plain, name in names.items()}
    set_model_state_dict(model, loaded, options=_PARTS)


def saved_state(model: Decoder) -> dict[str, Any]:
    """What a checkpoint holds of a model: all, or of an adapted one what its base does not say."""
    whole = get_model_state_dict(model)
    if not any(map(is_added, whole)):
        return whole
    kept = set(saved_names(model))
    return {name: tensor for name, tensor in whole.items() if name in kept}


def load_training_state(
    folder: Path, model: Decoder, optimizer: Optimizer, *, world: World
) -> None:
    """Fill model and optimizer from a checkpoint written by any number of processes."""
    state = training_state(model, optimizer)
    groups = state["optimizer"].pop("param_groups")  # the recipe's, not the past's
    load_tensors(state, folder, world=world, stacked=all_stacked_rows(model))
    set_model_state_dict(model, state["model"], options=_PARTS)
    moments = state["optimizer"] | {"param_groups": groups}
    set_optimizer_state_dict(model, optimizer, moments, options=_OPTIONS)


def training_state(model: Decoder, optimizer: Optimizer) -> dict[str, Any]:
    """All tensors of a run, by the names that they have in a checkpoint."""
    return {
        "model": saved_state(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }

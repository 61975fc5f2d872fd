"""Checkpoints: sharded, written in the background, with a commit marker last.

    runs/<name>/checkpoints/ba0000100/
        __<rank>_*.distcp .metadata   model and optimizer, by torch.distributed.checkpoint
        state.json                    time, seed, fingerprints of data and model
        recipe.yaml tokenizer/        all that eval, convert and generate need
        COMMIT                        names, sizes and checksums of the above, written last

A folder without COMMIT, or whose files differ from it, does not count: it is refused by name and
the one before is used. Loads on any number of processes.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.models.decoder import Decoder
from llmfoundry.parallel.launch import World, host_group

# said by torch for every save and load of a run that has one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

COMMIT = "COMMIT"
_NAME = re.compile(r"ba\d{7,}")


def find_checkpoint(path: Path, *, note: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint at `path`: one checkpoint's folder, or a run's folder.

    Args:
        path: where to look.
        note: told of every checkpoint that is passed over, and why.

    Returns:
        The checkpoint's folder; None where a run's folder has none.

    Raises:
        UserError: `path` is one checkpoint's folder, and it is torn or damaged.
    """
    if _NAME.fullmatch(path.name):
        problem = find_damage(path)
        if problem is not None:
            raise UserError(f"{path}: {problem}; choose another checkpoint")
        return path
    for folder in list_checkpoints(path):
        problem = find_damage(folder)
        if problem is None:
            return folder
        note(f"checkpoint {folder} is refused: {problem}")
    return None


def list_checkpoints(run_folder: Path) -> list[Path]:
    """All checkpoint folders of a run, whole or not, newest first."""
    folders = (run_folder / "checkpoints").glob("ba*")
    return sorted((f for f in folders if _NAME.fullmatch(f.name)), key=_batch_of, reverse=True)


def _batch_of(folder: Path) -> int:
    return int(folder.name[2:])


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file is as it was committed."""
    try:
        files = json.loads((folder / COMMIT).read_text())["files"]
    except FileNotFoundError:
        return "it has no COMMIT (saving was cut short)"
    except (ValueError, KeyError):
        return "its COMMIT cannot be read"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"its file {name} has {path.stat().st_size} bytes, not {expected['bytes']}"
        if _checksum(path) != expected["crc32"]:
            return f"its file {name} is damaged (checksum)"
    return None


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json."""
    return json.loads((folder / "state.json").read_text())


_OPTIONS = StateDictOptions(strict=True)


def load_weights(folder: Path, model: Decoder, *, distributed: bool = False) -> None:
    """Fill `model`, on this process alone unless `distributed`, from a checkpoint."""
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=str(folder), no_dist=not distributed)
    set_model_state_dict(model, state["model"], options=_OPTIONS)


def load_training_state(
    folder: Path, model: Decoder, optimizer: Optimizer, *, distributed: bool
) -> None:
    """Fill model and optimizer from a checkpoint written by any number of processes."""
    state = _training_state(model, optimizer)
    groups = state["optimizer"].pop("param_groups")  # the recipe's, not the past's
    dcp.load(state, checkpoint_id=str(folder), no_dist=not distributed)
    set_model_state_dict(model, state["model"], options=_OPTIONS)
    moments = state["optimizer"] | {"param_groups": groups}
    set_optimizer_state_dict(model, optimizer, moments, options=_OPTIONS)


def _training_state(model: Decoder, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


class Checkpointer:
    """Writes a run's checkpoints, one at a time, in a background thread where asked."""

    def __init__(
        self,
        run_folder: Path,
        world: World,
        *,
        extras: Callable[[Path], None],
        keep: int,
        background: bool,
    ) -> None:
        """Prepare to write.

        Args:
            run_folder: the run's folder.
            world: this process; every one takes part in each save.
            extras: writes recipe and tokenizer into a checkpoint's folder; called on rank 0.
            keep: how many newest checkpoints stay; -1: all.
            background: return from `save` once weights are copied, not once they are written.
        """
        self._folder, self._world, self._extras = run_folder, world, extras
        self._keep, self._background = keep, background
        # its own group: the background thread's messages must not mix with the step's
        self._group = host_group(world)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, batch: int, model: Decoder, optimizer: Optimizer, state: dict[str, Any]) -> Path:
        """Save after `batch` steps; waits for the save before to end."""
        self.wait()
        folder = self._new_folder(batch)
        tensors = _training_state(model, optimizer)
        if not self._background:
            self._write(folder, tensors, state)
            return folder
        staged = BlockingAsyncStager(cache_staged_state_dict=False).stage(tensors)
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(folder, staged, state), name="checkpoint"
        )
        self._thread.start()
        return folder

    def save_weights(self, model: Decoder, state: dict[str, Any]) -> Path:
        """Save a model that has not been trained here, as the checkpoint of batch 0."""
        folder = self._new_folder(0)
        self._write(folder, {"model": get_model_state_dict(model)}, state)
        return folder

    def _new_folder(self, batch: int) -> Path:
        folder = self._folder / "checkpoints" / f"ba{batch:07d}"
        if self._world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return folder

    def wait(self) -> None:
        """Wait for a save under way; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise UserError(f"save_folder: writing a checkpoint failed: {error}") from error

    def _write_in_thread(self, folder: Path, tensors: Any, state: dict[str, Any]) -> None:
        try:
            self._write(folder, tensors, state)
        except BaseException as error:
            self._error = error

    def _write(self, folder: Path, tensors: Any, state: dict[str, Any]) -> None:
        rank = self._world.rank
        self._barrier()  # the folder is there
        dcp.save(
            tensors,
            checkpoint_id=str(folder),
            process_group=self._group,
            no_dist=self._group is None,
        )
        if self._world.is_main:
            (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
            self._extras(folder)
        self._barrier()
        _write_sums(folder, rank, self._world.size)
        self._barrier()
        if self._world.is_main:
            _commit(folder, self._world.size)
            self._prune()

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def _prune(self) -> None:
        whole = [f for f in list_checkpoints(self._folder) if (f / COMMIT).exists()]
        for folder in whole[self._keep :] if self._keep > 0 else []:
            (folder / COMMIT).unlink()  # first, so that a half-deleted folder never counts
            shutil.rmtree(folder)


def _write_sums(folder: Path, rank: int, size: int) -> None:
    """Checksums of this process's share of the files, into sums.<rank>.json."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and not _is_sums(f))
    sums = {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "crc32": _checksum(f)}
        for f in files[rank::size]
    }
    (folder / f"sums.{rank}.json").write_text(json.dumps(sums))


def _is_sums(path: Path) -> bool:
    return path.name.startswith("sums.") and path.suffix == ".json"


def _commit(folder: Path, size: int) -> None:
    """Merge the sums into COMMIT; the rename makes the checkpoint count."""
    files: dict[str, Any] = {}
    for rank in range(size):
        part = folder / f"sums.{rank}.json"
        files |= json.loads(part.read_text())
        part.unlink()
    write_json(folder / COMMIT, {"version": 1, "files": files})

"""Writes a run's checkpoints, in the background where asked.

The idea: a save is a row of steps that all processes end before one of them begins the next, so
that what goes wrong on one is known to all, at the same step. A save that fails is reported at
once, and tried again when the next is due; a full disk may be emptied meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import write_json
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.spread.held import Stacked, all_stacked_rows
from llmfoundry.ops.device_threads import device_thread
from llmfoundry.parallel.launch import World
from llmfoundry.train.checkpoints.checkpoint import training_state
from llmfoundry.train.checkpoints.homes import home_of
from llmfoundry.train.checkpoints.tensor_files import TensorFiles
from llmfoundry.train.checkpoints.together import SaveError, Together
from llmfoundry.train.stores.stored_run import named


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
        max_failures: int,
        warn: Callable[[str], None],
        note: Callable[[str], None] = lambda line: None,
        saved: int | None = None,
    ) -> None:
        """Prepare to write.

        Args:
            run_folder: the run's folder.
            world: this process; every one takes part in each save.
            extras: writes recipe and tokenizer into a checkpoint's folder; called on rank 0.
            keep: how many newest checkpoints stay; -1: all.
            background: return from `save` once weights are copied, not once they are written.
            max_failures: this many failed saves in a row end the run.
            warn: reports a save that failed, at once.
            note: reports each that is whole.
            saved: the batch whose checkpoint in this folder the run resumes from; None: none.
        """
        self._folder, self._world, self._extras = run_folder, world, extras
        self._keep, self._background = keep, background
        self._max_failures, self._warn, self._note = max_failures, warn, note
        self._together = Together(world)
        self._home = home_of(run_folder, world, self._together)
        self._tensor_files = TensorFiles(self._together)
        self._stacked: Stacked = {}
        self._thread: threading.Thread | None = None
        self._saved = saved  # the newest batch that this process knows to be saved
        self._failures = 0  # in a row
        self._problem = ""  # the last one's

    def save(
        self,
        batch: int,
        model: Decoder,
        optimizer: Optimizer,
        state: dict[str, Any],
        *,
        last: bool = False,
    ) -> Path:
        """Save after `batch` steps; waits for the save before to end.

        Args:
            batch: steps done.
            model: what to save.
            optimizer: what to save.
            state: what to save as state.json.
            last: no other save follows: return once it is written.

        Raises:
            UserError: the last save failed, or too many in a row did; on every process.
        """
        self.wait()
        folder = self._folder / "checkpoints" / f"ba{batch:07d}"
        if not last:
            self.check()
        if batch == self._saved:
            return folder  # by its interval, and now once more by a signal or at the end
        self._together.begin()
        self._stacked = all_stacked_rows(model)
        tensors = training_state(model, optimizer)
        if last or not self._background:
            self._write(batch, folder, tensors, state, last=last)
            self.check()
            return folder
        try:
            stager = BlockingAsyncStager(cache_staged_state_dict=False)
            tensors = self._together.run(lambda: stager.stage(tensors))
        except SaveError as error:
            self._fail(batch, error, last=False)
            self.check()
            return folder
        self._thread = device_thread(self._write, batch, folder, tensors, state, name="checkpoint")
        self._thread.start()
        return folder

    def save_weights(self, model: Decoder, state: dict[str, Any]) -> Path:
        """Save a model that has not been trained here, as the checkpoint of batch 0."""
        folder = self._folder / "checkpoints" / f"ba{0:07d}"
        self._write(0, folder, {"model": get_model_state_dict(model)}, state, last=True)
        return folder

    def tidy(self) -> None:
        """Remove what the newest checkpoint makes needless; a start may find it half done."""
        if self._saved is None or not self._world.is_main:
            return
        try:
            self._home.prune(self._saved, self._keep)
        except (OSError, UserError) as error:
            self._warn(f"save_folder: old checkpoints were not removed: {one_line(error)}")

    def wait(self) -> None:
        """Wait for a save under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Say that the run cannot continue, if so; until every process has, they must still step.

        Raises:
            UserError: too many saves in a row failed.
        """
        if self._failures >= self._max_failures:
            many = f" ({self._failures} saves in a row)" if self._failures > 1 else ""
            raise UserError(f"{self._problem}{many}{self._advice()}")

    def _write(
        self, batch: int, folder: Path, tensors: Any, state: dict[str, Any], *, last: bool = False
    ) -> None:
        """Write a checkpoint; if that fails, count it, tell it, and remove what there is of it.

        Raises:
            UserError: it was the last.
        """
        try:
            size = self._write_files(folder, tensors, state)
        except Exception as error:  # SaveError, or the other processes cannot be reached
            self._fail(batch, error, last=last)
            self._home.discard(folder)
            if last:
                raise UserError(f"{self._problem}{self._advice()}") from error
            return
        self._saved, self._failures = batch, 0
        if self._world.is_main:
            self._note(f"saved {named(folder)} ({size / 1e6:,.1f} MB)")
        self.tidy()

    def _fail(self, batch: int, error: Exception, *, last: bool) -> None:
        self._failures += 1
        self._problem = (
            f"save_folder: the checkpoint of batch {batch} was not saved: {one_line(error)}"
        )
        if not last and self._failures < self._max_failures:
            self._warn(f"{self._problem}; training continues, and the next save tries again")

    def _advice(self) -> str:
        newest = self._home.newest()
        if newest is None:
            return "; nothing is saved; make room there, or write another save_folder"
        return f"; the newest is {newest}; make room there, and run the same command"

    def _write_files(self, folder: Path, tensors: Any, state: dict[str, Any]) -> int:
        """Every step on every process before the next one begins; the bytes of all files.

        Raises:
            SaveError: a step failed on one of them; on all.
        """
        self._home.prepare(folder)
        self._tensor_files.write(folder, tensors, self._stacked)
        self._together.run(lambda: self._write_extras(folder, state), only_main=True)
        return self._home.commit(folder)

    def _write_extras(self, folder: Path, state: dict[str, Any]) -> None:
        write_json(folder / "state.json", state, indent=2)
        self._extras(folder)

"""Writes a run's checkpoints, in a background thread where the recipe sets it.

`train/trainer.py` calls `Checkpointer.save`. A save is written in this order; every process ends a
step before any begins the next, so a failure on one is known to all, at the same step:

1. The save before is waited for; after `save_max_wait` seconds this one is skipped instead.
2. Stage (`dcp.py`): each process lists the tensors that it writes, and copies them to host memory
   where the rest runs in the background. Training resumes here; the next optimizer step waits for
   copies from a GPU (`before_update`).
3. Prepare (`storage.py`): the main process makes the checkpoint's folder, empty.
4. Tensors (`dcp.py`): each process writes its files, `optimizer__<rank>_*.distcp` and
   `__<rank>_*.distcp`, to the disk, with their checksums; rank 0 writes `.metadata`.
5. Small files: rank 0 writes state.json, recipe.yaml, tokenizer/ and what fine-tuning adds.
6. Commit (`storage.py`): all files are there and on the disk, at a URL sent; then COMMIT, which
   makes the checkpoint count.
7. Prune (`retention.py`): older checkpoints and what interrupted saves have left are removed.

A failed save is removed, reported at once, and tried again when the next is due; the user may make
space on a full disk meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from llmfoundry.checkpoint.dcp import Staged, TensorFiles, training_state
from llmfoundry.checkpoint.retention import prune
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.checkpoint.verify import find_checkpoint
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.mailbox import Mailbox
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, is_out_of_memory, one_line, what_was_asked
from llmfoundry.files import write_json
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.devices import device_thread
from llmfoundry.ops.shard_layout import Stacked


@dataclass
class Waits:
    """Seconds that a save blocked training.

    Attributes:
        before: by the save before, until it was written.
        copies: by copies for a background save, or until a GPU has begun them.
        total: in all.
    """

    before: float = 0.0
    copies: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class SavePolicy:
    """How a run saves.

    Attributes:
        keep: how many newest checkpoints stay; -1: all.
        background: return from `save` once weights are copied, not once they are written.
        max_failures: this many failed saves in a row end the run.
        max_wait: seconds that a save in the background waits for the one before to be written; then
            it is left out. None: as long as it takes.
        choose_best: returns, given the batches of all checkpoints, the one that stays whatever its
            age; None: there is no such checkpoint.
    """

    keep: int
    background: bool
    max_failures: int
    max_wait: float | None = None
    choose_best: Callable[[list[int]], int | None] | None = None


@dataclass(frozen=True)
class Contents:
    """What each checkpoint of a run holds beside its tensors and state.json.

    Attributes:
        files: texts by their names: recipe.yaml, tokenizer/...
        stacked: of the model's parameters, as in `ops.shard_layout`.
        add_files: writes what is made from the tensors, into a checkpoint's folder that has them;
            called on rank 0. None: nothing.
    """

    files: Mapping[str, str]
    stacked: Stacked
    add_files: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Reports:
    """How the user learns of saves.

    Attributes:
        warn: reports what does not end the run, at once.
        note: reports each complete save.
        failed: reports one that failed or was left out: after which batch, what happened, what is
            done; None: as `warn` does.
        saved: called on the main process at a resume, and once there is one more and older ones are
            pruned; None: nothing is called.
    """

    warn: Callable[[str], None]
    note: Callable[[str], None] = lambda line: None
    failed: Callable[[int, str, str], None] | None = None
    saved: Callable[[], None] | None = None


class Checkpointer:
    """Writes a run's checkpoints, one at a time, in a background thread where set.

    Attributes:
        waits: of the latest save.
        saved: the batch of the newest checkpoint that this process knows to be there; -1: of none.
    """

    def __init__(
        self,
        storage: Storage,
        world: World,
        contents: Contents,
        policy: SavePolicy,
        reports: Reports,
        *,
        saved: int = -1,
    ) -> None:
        """Prepare to write.

        Args:
            storage: the run's.
            world: this process; every one takes part in each save.
            contents: of each checkpoint.
            policy: how to save.
            reports: of saves.
            saved: the batch whose checkpoint in this folder the run resumes from; -1: none.
        """
        self._storage, self._world, self._contents = storage, world, contents
        self._policy, self._reports = policy, reports
        # other processes learn of it by a collective, which has its own limit
        self._max_wait = policy.max_wait and min(policy.max_wait, world.timeout.total_seconds() / 2)
        self.waits, self.saved = Waits(), saved
        storage.began = time.time()  # the run's lock is held
        self._mailbox = Mailbox(world)
        self._tensor_files = TensorFiles(self._mailbox)
        self._staged: Staged | Exception | None = None  # whose copies may be under way
        self._thread: threading.Thread | None = None
        self.is_writing = False  # beside training
        self._failures = 0  # in a row
        self._problem = ""  # the last one's

    def save(
        self,
        batch: int,
        model: Decoder,
        optimizer: Optimizer | None,
        state: dict[str, Any],
        *,
        last: bool = False,
    ) -> Path:
        """Save after `batch` steps; before the next update, `before_update` has to be called.

        Args:
            batch: steps done.
            model: what to save.
            optimizer: what to save; None: of a model that has not been trained here.
            state: what to save as state.json.
            last: no other save follows: return once it is written.

        Raises:
            UserError: the last save failed, or too many in a row did; on every process.
        """
        began = time.perf_counter()
        folder = self._storage.checkpoint_folder(batch)
        in_time = self._wait_for_previous(None if last else self._max_wait)
        self.waits = Waits(before=time.perf_counter() - began)
        if not last:
            self.check()
        if not in_time:
            self._report_skipped(batch)
        elif batch != self.saved:  # by its interval, and now once more by a signal or at the end
            stage = partial(self._stage, model, optimizer)
            self._begin(batch, folder, stage, state, last=last)
        self.waits.total = time.perf_counter() - began
        return folder

    def _begin(
        self,
        batch: int,
        folder: Path,
        stage: Callable[[bool], Staged | Exception],
        state: dict[str, Any],
        *,
        last: bool,
    ) -> None:
        """Write in the background, or now."""
        self._mailbox.begin()
        if last or not self._policy.background:
            self._write(batch, folder, stage(False), state, last)
            self.check()
            return
        began = time.perf_counter()
        staged = self._staged = stage(True)
        self.waits.copies = time.perf_counter() - began

        def write() -> None:
            try:
                self._write(batch, folder, staged, state)
            finally:
                self.is_writing = False

        self.is_writing = True
        self._thread = device_thread(write, name="checkpoint")
        self._thread.start()

    def _stage(self, model: Decoder, optimizer: Optimizer | None, copy: bool) -> Staged | Exception:
        """What to write; or why there is none, which the other processes have to learn."""
        try:
            tensors = training_state(model, optimizer)
            return self._tensor_files.stage(tensors, self._contents.stacked, copy=copy)
        except Exception as error:
            if copy and is_out_of_memory(error):
                why = f"the host has no memory for the copy of it ({what_was_asked(error)})"
                return UserError(f"{why}; write save_async=false, which makes none")
            return error

    def before_update(self) -> None:
        """Before weights change: a GPU that still copies them finishes that first."""
        if isinstance(self._staged, Staged):
            self._staged.before_update()
            self._staged = None

    def _wait_for_previous(self, seconds: float | None) -> bool:
        """Whether the save under way ended in that time; the same on every process."""
        thread = self._thread
        if thread is not None and seconds is not None:

            def ended() -> bool:
                thread.join(seconds)
                return not thread.is_alive()

            if not on_rank0(self._world, ended):
                return False
        self.wait()
        return True

    def _report_skipped(self, batch: int) -> None:
        if self._mailbox.is_main:
            self._report_failed(
                batch,
                f"save_max_wait: the checkpoint of batch {batch} is left out: the one before is"
                f" still being written after {self._max_wait:g} s more",
                "write a longer save_interval or save_max_wait, or a faster disk's save_folder",
            )

    def _report_failed(self, batch: int, seen: str, done: str) -> None:
        if self._reports.failed is not None:
            self._reports.failed(batch, seen, done)
        else:
            self._reports.warn(f"{seen}; {done}")

    def tidy(self) -> None:
        """Remove what the newest checkpoint makes needless; a start may find it half done."""
        if self.saved < 0 or not self._mailbox.is_main:
            return
        try:
            policy = self._policy
            prune(self._storage, self.saved, keep=policy.keep, choose_best=policy.choose_best)
        except (OSError, UserError) as error:
            self._reports.warn(f"save_folder: old checkpoints were not removed: {one_line(error)}")
        if self._reports.saved is not None:
            self._reports.saved()

    def find(self, until: int) -> Checkpoint | None:
        """The newest complete checkpoint saved after at most so many steps; all call."""
        self.wait()
        note = self._reports.warn
        return find_checkpoint(self._storage, note=note, world=self._world, until=until)

    def forget_after(self, batch: int) -> None:
        """Remove what was saved after more steps, as the run resumes from there; all call."""
        self.wait()
        self._mailbox.begin()
        self._mailbox.run(lambda: self._storage.forget_after(batch, self._world))
        self.saved = -1

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
        if self._failures >= self._policy.max_failures:
            many = f" ({self._failures} saves in a row)" if self._failures > 1 else ""
            raise UserError(f"{self._problem}{many}{self._advice()}")

    def _write(
        self,
        batch: int,
        folder: Path,
        staged: Staged | Exception,
        state: dict[str, Any],
        last: bool = False,
    ) -> None:
        """Write a checkpoint; if that fails, count it, report it, and remove what there is of it.

        Raises:
            UserError: it was the last.
        """
        try:
            began = time.perf_counter()
            n_bytes = self._write_files(folder, staged, state)
        except Exception as error:  # CollectiveError, or the other processes cannot be reached
            self._fail(batch, error, last=last)
            self._storage.discard(folder, self._world)
            if last:
                raise UserError(f"{self._problem}{self._advice()}") from error
            return
        self.saved, self._failures = batch, 0
        if self._mailbox.is_main:
            seconds = time.perf_counter() - began
            in_background = threading.current_thread() is self._thread
            blocked = self.waits.before + (self.waits.copies if in_background else seconds)
            how = (
                f"{n_bytes / 1e6:,.1f} MB in {seconds:.1f} s; blocked training for {blocked:.2f} s"
            )
            self._reports.note(f"saved {self._storage.shown(folder)} ({how})")
        self.tidy()

    def _fail(self, batch: int, error: Exception, *, last: bool) -> None:
        self._failures += 1
        why = one_line(error).removeprefix("save_folder: ")
        self._problem = f"save_folder: the checkpoint of batch {batch} was not saved: {why}"
        if not last and self._failures < self._policy.max_failures:
            done = "training continues, and the next save tries again"
            self._report_failed(batch, self._problem, done)

    def _advice(self) -> str:
        newest = self._storage.newest()
        if newest is None:
            return "; nothing is saved; make room there, or write another save_folder"
        return f"; the newest is {newest}; make room there, and run the same command"

    def _write_files(self, folder: Path, staged: Staged | Exception, state: dict[str, Any]) -> int:
        """Every step on every process before the next one begins; the bytes of all files.

        Raises:
            CollectiveError: a step failed on one of them; on all.
        """
        ready = self._mailbox.run(partial(_ready, staged))
        self._storage.prepare(folder, self._mailbox)
        written = self._tensor_files.write(folder, ready)
        self._mailbox.run(partial(self._write_small_files, folder, state), only_main=True)
        return self._storage.commit(folder, written, self._mailbox)

    def _write_small_files(self, folder: Path, state: dict[str, Any]) -> None:
        write_json(folder / "state.json", state, indent=2)
        for name, text in self._contents.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(text.encode())
        if self._contents.add_files is not None:
            self._contents.add_files(folder)


def _ready(staged: Staged | Exception) -> Staged:
    """What can be written now: copies from a GPU have arrived."""
    if isinstance(staged, Exception):
        raise staged
    staged.wait()
    return staged

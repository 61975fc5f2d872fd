"""Checkpoint writer of a run, synchronous or in a background thread (`save_async`).

Entry point: `Checkpointer.save`, which `train/trainer.py` calls. A save has seven stages. All ranks
finish a stage before any rank begins the next, so every rank learns of a failure at the same stage:

1. Wait for the previous save. After `save_max_wait` seconds this save is skipped instead.
2. Stage (`dcp.py`): each rank lists the tensors that it writes. For a background save it copies
   them to host memory. Training resumes here. The next optimizer step waits for copies from a GPU
   (`before_update`).
3. Prepare (`storage.py`): the main process creates an empty checkpoint folder.
4. Tensors (`dcp.py`): each rank writes its files `optimizer__<rank>_*.distcp`,
   `ema__<rank>_*.distcp` and `__<rank>_*.distcp` to the disk and computes their checksums. Rank 0
   writes `.metadata`.
5. Small files: rank 0 writes state.json, recipe.yaml, tokenizer/ and the files that fine-tuning
   adds.
6. Commit (`storage.py`): once all files are on the disk (at a URL: uploaded), rank 0 writes COMMIT.
   A checkpoint without COMMIT does not count.
7. Prune (`retention.py`): old checkpoints and the remains of interrupted saves are removed.

The files of a failed save are removed, and the failure is reported at once. Training continues, and
the next save is the retry: the user may free disk space before it is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from llmfoundry.checkpoint.dcp import StagedTensors, TensorFiles, training_state
from llmfoundry.checkpoint.retention import prune
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.checkpoint.verify import find_checkpoint
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.mailbox import Mailbox
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, is_out_of_memory, one_line, requested_memory
from llmfoundry.files import write_json
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.devices import device_thread
from llmfoundry.ops.shard_layout import Stacked


@dataclass
class Waits:
    """Seconds that a save blocked training.

    Attributes:
        before: waiting for the previous save.
        copies: copying to host memory for a background save; for tensors on a GPU, launching the
            copies.
        total: the whole call of `Checkpointer.save`.
    """

    before: float = 0.0
    copies: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class SavePolicy:
    """Settings of a run's saves.

    Attributes:
        keep: number of newest checkpoints that are retained; -1: all.
        background: `save` returns after the tensors are copied, before they are written.
        max_failures: number of consecutive failed saves that ends the run.
        max_wait: seconds that a background save waits for the previous save before it is skipped;
            None: no limit.
        choose_best: returns the batch of the best checkpoint, given the batches of all checkpoints;
            this checkpoint is never pruned. None: no checkpoint is exempt from pruning.
    """

    keep: int
    background: bool
    max_failures: int
    max_wait: float | None = None
    choose_best: Callable[[list[int]], int | None] | None = None


@dataclass(frozen=True)
class Contents:
    """Contents of each checkpoint of a run, apart from its tensors and state.json.

    Attributes:
        files: text files by name: recipe.yaml, tokenizer/...
        stacked: stacked rows of the model's parameters, see `ops.shard_layout`.
        add_files: writes files that are derived from the tensors, given a checkpoint folder that
            holds the tensors; called on rank 0. None: no such files.
    """

    files: Mapping[str, str]
    stacked: Stacked
    add_files: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Reports:
    """Callbacks that report saves to the user.

    Attributes:
        warn: reports a problem that does not end the run, at once.
        note: reports each complete save.
        failed: reports a failed or skipped save, given the batch, the problem and the consequence;
            None: `warn` reports it.
        saved: called on the main process after each complete save and its pruning, and when a run
            resumes; None: no callback.
    """

    warn: Callable[[str], None]
    note: Callable[[str], None] = lambda line: None
    failed: Callable[[int, str, str], None] | None = None
    saved: Callable[[], None] | None = None


class Checkpointer:
    """Writer of a run's checkpoints, one save at a time.

    Attributes:
        waits: time that the latest save blocked training.
        saved: batch of the newest checkpoint that this process has saved or resumed from; -1: none.
        is_writing: a background thread is writing a checkpoint.
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
        """Create the communication channel of the saves; the caller holds the run's lock.

        Args:
            storage: storage of the run.
            world: process group; every rank takes part in each save.
            contents: files of each checkpoint.
            policy: settings.
            reports: callbacks.
            saved: batch of the checkpoint in this folder that the run resumes from; -1: none.
        """
        self._storage, self._world, self._contents = storage, world, contents
        self._policy, self._reports = policy, reports
        # The other ranks wait for rank 0 in a collective, so half its timeout is the maximum.
        self._max_wait = policy.max_wait and min(policy.max_wait, world.timeout.total_seconds() / 2)
        self.waits, self.saved = Waits(), saved
        storage.began = time.time()
        self._mailbox = Mailbox(world)
        self._tensor_files = TensorFiles(self._mailbox)
        self._staged: StagedTensors | Exception | None = None  # the GPU may still be copying it
        self._thread: threading.Thread | None = None
        self.is_writing = False
        self._failures = 0  # consecutive failed saves
        self._problem = ""  # message of the last failure

    def save(
        self,
        batch: int,
        model: Decoder,
        optimizer: Optimizer | None,
        state: dict[str, Any],
        *,
        averages: Mapping[str, Tensor] | None = None,
        last: bool = False,
    ) -> Path:
        """Save a checkpoint; the caller must call `before_update` before the next optimizer step.

        Args:
            batch: number of completed steps.
            model: model to save.
            optimizer: optimizer to save; None: the model has not been trained in this run.
            state: content of state.json.
            averages: averaged weights by parameter name; None: the run keeps none.
            last: this is the run's last save; return only after it is written.

        Returns:
            The checkpoint folder.

        Raises:
            UserError: the last save or too many consecutive saves failed; on every rank.
        """
        began = time.perf_counter()
        folder = self._storage.checkpoint_folder(batch)
        in_time = self._wait_for_previous(None if last else self._max_wait)
        self.waits = Waits(before=time.perf_counter() - began)
        if not last:
            self.check()
        if not in_time:
            self._report_skipped(batch)
        elif batch != self.saved:  # a signal or the end of training may repeat an interval's save
            stage = partial(self._stage, model, optimizer, averages)
            self._begin(batch, folder, stage, state, last=last)
        self.waits.total = time.perf_counter() - began
        return folder

    def _begin(
        self,
        batch: int,
        folder: Path,
        stage: Callable[[bool], StagedTensors | Exception],
        state: dict[str, Any],
        *,
        last: bool,
    ) -> None:
        """Write a checkpoint, in the background if the policy says so.

        `stage` returns the tensors to write; its argument requests copies in host memory.
        """
        self._mailbox.begin()
        if last or not self._policy.background:
            self._write(batch, folder, stage(False), state, last)
            self.check()
            return

        # copy the tensors, then write them in a thread
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

    def _stage(
        self,
        model: Decoder,
        optimizer: Optimizer | None,
        averages: Mapping[str, Tensor] | None,
        copy: bool,
    ) -> StagedTensors | Exception:
        """Return the tensors to write, or the error, which the writer reports to all ranks."""
        try:
            tensors = training_state(model, optimizer, averages)
            return self._tensor_files.stage(tensors, self._contents.stacked, copy=copy)
        except Exception as error:
            if copy and is_out_of_memory(error):
                reason = f"the host has no memory for the copy of it ({requested_memory(error)})"
                return UserError(f"{reason}; write save_async=false, which makes none")
            return error

    def before_update(self) -> None:
        """Make the GPU finish its copies of the weights before the optimizer changes them."""
        if isinstance(self._staged, StagedTensors):
            self._staged.before_update()
            self._staged = None

    def _wait_for_previous(self, seconds: float | None) -> bool:
        """Wait for the running save; return whether it finished within `seconds` (None: no limit).

        The result is the same on every rank.
        """
        thread = self._thread
        if thread is not None and seconds is not None:

            def has_finished() -> bool:
                thread.join(seconds)
                return not thread.is_alive()

            if not on_rank0(self._world, has_finished):
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

    def _report_failed(self, batch: int, problem: str, consequence: str) -> None:
        if self._reports.failed is not None:
            self._reports.failed(batch, problem, consequence)
        else:
            self._reports.warn(f"{problem}; {consequence}")

    def tidy(self) -> None:
        """Prune old checkpoints and call `Reports.saved`, on the main process; errors are warnings.

        A run that resumes calls it too, because the previous process may have been killed before it
        had pruned.
        """
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
        """Return the newest complete checkpoint saved after at most `until` steps; collective."""
        self.wait()
        note = self._reports.warn
        return find_checkpoint(self._storage, note=note, world=self._world, until=until)

    def forget_after(self, batch: int) -> None:
        """Remove the checkpoints saved after more than `batch` steps; collective.

        The run goes back to `batch` and will save these steps again.
        """
        self.wait()
        self._mailbox.begin()
        self._mailbox.run(lambda: self._storage.forget_after(batch, self._world))
        self.saved = -1

    def wait(self) -> None:
        """Wait for the save that is running in the background, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise if too many consecutive saves have failed.

        Ranks may learn of a background failure at different steps. The caller must therefore take
        part in the collectives of a step until every rank has raised.

        Raises:
            UserError: too many consecutive saves failed.
        """
        if self._failures >= self._policy.max_failures:
            count = f" ({self._failures} saves in a row)" if self._failures > 1 else ""
            raise UserError(f"{self._problem}{count}{self._advice()}")

    def _write(
        self,
        batch: int,
        folder: Path,
        staged: StagedTensors | Exception,
        state: dict[str, Any],
        last: bool = False,
    ) -> None:
        """Write a checkpoint; on failure count it, report it, and remove its files.

        Raises:
            UserError: the run's last save failed.
        """
        # write all files
        try:
            began = time.perf_counter()
            n_bytes = self._write_files(folder, staged, state)
        except Exception as error:  # CollectiveError, or the other ranks cannot be reached
            self._fail(batch, error, last=last)
            self._storage.discard(folder, self._world)
            if last:
                raise UserError(f"{self._problem}{self._advice()}") from error
            return
        self.saved, self._failures = batch, 0

        # report the save, then prune older ones
        if self._mailbox.is_main:
            seconds = time.perf_counter() - began
            in_background = threading.current_thread() is self._thread
            blocked = self.waits.before + (self.waits.copies if in_background else seconds)
            measurements = (
                f"{n_bytes / 1e6:,.1f} MB in {seconds:.1f} s; blocked training for {blocked:.2f} s"
            )
            self._reports.note(f"saved {self._storage.shown(folder)} ({measurements})")
        self.tidy()

    def _fail(self, batch: int, error: Exception, *, last: bool) -> None:
        self._failures += 1
        reason = one_line(error).removeprefix("save_folder: ")
        self._problem = f"save_folder: the checkpoint of batch {batch} was not saved: {reason}"
        if not last and self._failures < self._policy.max_failures:
            consequence = "training continues, and the next save tries again"
            self._report_failed(batch, self._problem, consequence)

    def _advice(self) -> str:
        newest = self._storage.newest()
        if newest is None:
            return "; nothing is saved; make room there, or write another save_folder"
        return f"; the newest is {newest}; make room there, and run the same command"

    def _write_files(
        self, folder: Path, staged: StagedTensors | Exception, state: dict[str, Any]
    ) -> int:
        """Run stages 2 (its end) to 6 of a save; return the number of bytes of all files.

        Raises:
            CollectiveError: a stage failed on some rank; on every rank.
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


def _ready(staged: StagedTensors | Exception) -> StagedTensors:
    """Return the staged tensors once their copies from a GPU are complete, or raise their error."""
    if isinstance(staged, Exception):
        raise staged
    staged.wait()
    return staged

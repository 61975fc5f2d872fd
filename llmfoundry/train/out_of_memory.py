"""A step that does not fit into memory: the run goes on with half the microbatch.

What a step computes does not depend on how many rows it takes at a time, so that a run that has run
out of memory has lost nothing: `Trainer` does the step again at once where every process holds the
whole model (`MicrobatchLimit.halve`). Shards' forward passes cannot be entered again after one was
cut off, as processes wait for each other in the midst of it: there `start_again` ends this process,
and with it all of them, to be started again from the last checkpoint by whatever has started them.
Either way the run's folder remembers the microbatch that is left, `remembered` reads it at the next
start, and events.jsonl says what happened.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from llmfoundry.errors import StartAgain, UserError, what_was_asked
from llmfoundry.events import add_event
from llmfoundry.files import read_json, write_json
from llmfoundry.ops.devices import give_back_memory
from llmfoundry.ops.torch_private import Replicas

NAME = "out_of_memory.json"
"""In a run's folder: the microbatch that is left, and for what."""
KIND = "out_of_memory"
"""The kind of event."""
KEY = "device_train_microbatch_size"


class OutOfMemory(Exception):
    """A step is to be done again with fewer rows at a time; every process raises it.

    Attributes:
        reasons: what each process that ran out of memory asked for, by rank.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


@dataclass
class MicrobatchLimit:
    """How a run goes on where a step does not fit.

    Attributes:
        folder: the run's; None: nothing is remembered, and nothing can be started again.
        facts: what the memory of a step depends on beside the microbatch (`memory_facts`).
        rank: this process.
        size: processes of the run.
        rows: of a step, on each process.
        in_place: whether a step can be done again: every process holds the whole model.
        is_fixed: whether all rows have to be computed at a time, as CUDA graphs ask for.
        hint: what else to write where it does not fit, after "write "; empty: nothing.
    """

    folder: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    size: int = 1
    rows: int = 1
    in_place: bool = True
    is_fixed: bool = False
    hint: str = ""

    def halve(
        self, microbatch: int, why: OutOfMemory, step: int, report: Callable[..., None]
    ) -> int:
        """The microbatch with which a step (from 1) is done again; every process calls it.

        Args:
            microbatch: that was too large.
            why: which processes ran out of memory.
            step: from 1.
            report: `TrainingLog.event`.

        Raises:
            UserError: it cannot be smaller.
        """
        reason, ranks = next(iter(why.reasons.values())), sorted(why.reasons)
        half = self._half(microbatch, step, reason)
        where = f" on rank {', '.join(map(str, ranks))}" if self.size > 1 else ""
        done = f"the step is done again with {half}: {self._cost(microbatch, half)}"
        seen = f"step {step} ran out of memory{where} at a microbatch of {microbatch} ({reason})"
        if self.rank == 0 and (problem := self._remember(microbatch, half, step)):
            done += f" (which the next start does not know: {problem})"
        report(KIND, seen, done, step=step, action="redo", microbatch=half, ranks=ranks)
        return half

    def start_again(self, microbatch: int, error: BaseException, step: int) -> NoReturn:
        """End this process, so that all start again with half the microbatch.

        Raises:
            StartAgain: they are to.
            UserError: it cannot be smaller, or the run's folder cannot be written.
        """
        reason = what_was_asked(error)
        half = self._half(microbatch, step, reason)
        if self.folder is None or self._remember(microbatch, half, step):
            raise UserError(self.line(microbatch, step, reason))
        seen = f"step {step} ran out of memory at a microbatch of {microbatch} ({reason})"
        done = f"the processes start again with {half}: {self._cost(microbatch, half)}"
        more: dict[str, Any] = {"microbatch": half, "done": done}
        with suppress(OSError):  # remembered it is, and the line below says so too
            add_event(
                self.folder, KIND, seen, step=step, rank=self.rank, action="start_again", **more
            )
        raise StartAgain(f"{KEY}: {seen}; {done}")

    def _half(self, microbatch: int, step: int, reason: str) -> int:
        if microbatch == 1 or self.is_fixed:
            raise UserError(self.line(microbatch, step, reason))
        return microbatch // 2

    def line(self, microbatch: int, step: int, reason: str) -> str:
        """What to write where a step does not fit, and nothing is to be done about it."""
        smaller = microbatch // 2 or "a smaller model"
        if self.is_fixed:
            smaller = "a compile_mode that records no CUDA graphs, which take all rows at a time"
        return (
            f"{KEY}: step {step} ran out of memory at {microbatch}; write {smaller}{self.hint}"
            f" ({reason})"
        )

    def _cost(self, microbatch: int, half: int) -> str:
        now, before = -(-self.rows // half), -(-self.rows // microbatch)
        return f"a step has {now} microbatches in place of {before}"

    def _remember(self, microbatch: int, half: int, step: int) -> str:
        """Write what the next start begins with; why that failed, empty: it did not."""
        if self.folder is None:
            return ""
        record = {"microbatch": half, "too_large": microbatch, "step": step, "for": self.facts}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / NAME, record)
        except OSError as error:
            return error.strerror or str(error)
        return ""


def remembered(folder: Path, facts: Mapping[str, Any]) -> tuple[int | None, list[str]]:
    """The microbatch that an earlier start of a run was left with.

    Args:
        folder: the run's.
        facts: as `MicrobatchLimit` has them.

    Returns:
        The rows, None: any; and, where there is a record of other facts, the keys that differ.
    """
    try:
        record = read_json(folder / NAME)
        rows, then = record["microbatch"], record["for"]
        assert type(rows) is int and rows > 0 and isinstance(then, dict)
    except (OSError, ValueError, TypeError, KeyError, AssertionError):
        return None, []  # there is none, or it is damaged
    now = json.loads(json.dumps(facts))
    changed = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
    return (None, changed) if changed else (rows, [])


def release(module: nn.Module) -> None:
    """After a pass that did not fit: give back what it holds; the others have what they wait for.

    Called by `train_step`, once nothing else holds a tensor of the pass.
    """
    forget(module)
    if isinstance(module, Replicas):
        module.send_the_rest()


def forget(module: nn.Module) -> None:
    """Give back the gradients of a step that will be done again, and what is kept free."""
    module.zero_grad(set_to_none=True)
    gc.collect()
    give_back_memory(next(module.parameters()).device)


def begin_again(module: nn.Module) -> None:
    """Before a step is done again; every process calls it."""
    forget(module)
    if isinstance(module, Replicas):
        module.reset()

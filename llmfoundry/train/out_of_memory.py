"""Recovery from an out-of-memory error in a step: the run continues with half the microbatch.

The result of a step does not depend on the microbatch size, so the step can be repeated. If every
rank holds the full model (one process, DDP), `Trainer` repeats it in place
(`MicrobatchLimit.halve`). With FSDP it cannot: an interrupted forward pass leaves the other ranks
waiting in a collective. There, `MicrobatchLimit.start_again` exits this process. The launcher then
kills the others and restarts the run from the last checkpoint. Either way, the new microbatch size
is stored in the run's folder, `remembered` reads it at the next start, and events.jsonl records
the event.
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

from llmfoundry.errors import RestartNeeded, UserError, requested_memory
from llmfoundry.events import add_event
from llmfoundry.files import read_json, write_json
from llmfoundry.ops.devices import give_back_memory
from llmfoundry.ops.torch_private import Replicas

NAME = "out_of_memory.json"
"""File in the run's folder that stores the microbatch size and the settings it applies to."""
KIND = "out_of_memory"
"""Kind of the event in events.jsonl."""
KEY = "device_train_microbatch_size"


class OutOfMemory(Exception):
    """A step must be repeated with a smaller microbatch; raised on every rank.

    Attributes:
        reasons: the failed allocation of each rank that ran out of memory, by rank.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


@dataclass
class MicrobatchLimit:
    """Policy for steps that run out of memory.

    Attributes:
        folder: the run's folder; None: the size is not stored and the run cannot be restarted.
        facts: settings other than the microbatch that the memory depends on (`memory_facts`).
        rank: rank of this process.
        size: number of ranks.
        rows: sequences per step on each rank.
        in_place: whether a step can be repeated in place: every rank holds the full model.
        is_fixed: whether the microbatch size cannot change, as with CUDA graphs.
        hint: further alternatives for the error line, after "write "; empty: none.
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
        """Return the microbatch size with which the step is repeated. Every rank calls it.

        Args:
            microbatch: the size that was too large.
            why: the ranks that ran out of memory.
            step: number of the step, from 1.
            report: `TrainingLog.event`.

        Raises:
            UserError: the microbatch cannot be smaller.
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
        """Exit this process, so that the run restarts with half the microbatch.

        Raises:
            RestartNeeded: the new size is stored and the run can restart.
            UserError: the microbatch cannot be smaller, or the run's folder cannot be written.
        """
        reason = requested_memory(error)
        half = self._half(microbatch, step, reason)
        if self.folder is None or self._remember(microbatch, half, step):
            raise UserError(self.line(microbatch, step, reason))
        seen = f"step {step} ran out of memory at a microbatch of {microbatch} ({reason})"
        done = f"the processes start again with {half}: {self._cost(microbatch, half)}"
        more: dict[str, Any] = {"microbatch": half, "done": done}
        with suppress(OSError):  # the size is stored, and the error below reports it too
            add_event(
                self.folder, KIND, seen, step=step, rank=self.rank, action="start_again", **more
            )
        raise RestartNeeded(f"{KEY}: {seen}; {done}")

    def _half(self, microbatch: int, step: int, reason: str) -> int:
        if microbatch == 1 or self.is_fixed:
            raise UserError(self.line(microbatch, step, reason))
        return microbatch // 2

    def line(self, microbatch: int, step: int, reason: str) -> str:
        """Return the error line for a step whose microbatch cannot be halved."""
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
        """Store the microbatch size for the next start; return why that failed, empty: success."""
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
    """Return the microbatch size that an earlier start of the run stored.

    Args:
        folder: folder of the run.
        facts: the current `MicrobatchLimit.facts`.

    Returns:
        The size and no keys. If the file is missing or damaged: None and no keys. If it was stored
        under other facts: None and the keys that differ.
    """
    try:
        record = read_json(folder / NAME)
        microbatch, stored_facts = record["microbatch"], record["for"]
        assert type(microbatch) is int and microbatch > 0 and isinstance(stored_facts, dict)
    except (OSError, ValueError, TypeError, KeyError, AssertionError):
        return None, []
    json_facts = json.loads(json.dumps(facts))
    keys = json_facts.keys() | stored_facts.keys()
    changed = sorted(key for key in keys if json_facts.get(key) != stored_facts.get(key))
    return (None, changed) if changed else (microbatch, [])


def release(module: nn.Module) -> None:
    """Free the memory of a pass that ran out of memory.

    With DDP, also send the gradient all-reduces that the other ranks still wait for. `train_step`
    calls it once nothing else holds a tensor of the pass.
    """
    forget(module)
    if isinstance(module, Replicas):
        module.send_the_rest()


def forget(module: nn.Module) -> None:
    """Free the gradients of a step that will be repeated, and empty the allocator's cache."""
    module.zero_grad(set_to_none=True)
    gc.collect()
    give_back_memory(next(module.parameters()).device)


def begin_again(module: nn.Module) -> None:
    """Reset the module before a step is repeated. Every rank calls it."""
    forget(module)
    if isinstance(module, Replicas):
        module.reset()

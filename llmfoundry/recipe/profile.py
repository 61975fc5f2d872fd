"""The `profile` section: traces of steps, and snapshots of memory, in save_folder/profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert, set_defaults

ALL_RANKS = "all"
_WINDOW = "each is held in memory until the trace is written"
_STEPS = Range(0, 2**31, "no run has as many steps")
_SCHEDULE: dict[str, Any] = {"skip_first": 10, "wait": 0, "warmup": 1, "active": 3, "repeat": 1}
_CONTENT: dict[str, Any] = dict.fromkeys(
    ("record_shapes", "profile_memory", "with_stack", "with_flops"), False
)
_MEMORY: dict[str, Any] = {"memory_snapshot_entries": 100_000}
_FILES: dict[str, Any] = {"max_gib": 4.0}


@dataclass
class ProfileConfig:
    """Where time and memory go within a step, by PyTorch's own tools; off unless asked for.

    Steps of a schedule are counted from the first one of each process: those compile and connect.
    """

    trace: bool = False
    """Trace steps with torch.profiler: trace-step-N-rank-R.json.gz for chrome://tracing, Perfetto
    and TensorBoard, and the ten operations that took longest, in the log and beside it."""
    skip_first: Annotated[int | None, _STEPS] = None
    """Only with trace: steps before the first cycle; default 10."""
    wait: Annotated[int | None, _STEPS] = None
    """Only with trace: steps at the beginning of each cycle that are left alone; default 0."""
    warmup: Annotated[int | None, Range(0, 100, _WINDOW)] = None
    """Only with trace: steps that are traced and forgotten, as the first ones of a tracer take
    longer; default 1."""
    active: Annotated[int | None, Range(1, 100, _WINDOW)] = None
    """Only with trace: steps of each cycle that the trace has; default 3."""
    repeat: Annotated[int | None, Range(1, 1000, "each cycle is a file")] = None
    """Only with trace: cycles, each a trace of its own; default 1."""
    ranks: Annotated[list[int] | str | None, choice((ALL_RANKS,), "a list of ranks")] = None
    """Processes that trace, and that keep a history of memory: [0, 8], or all; default [0]."""
    record_shapes: bool | None = None
    """Only with trace: shapes of each operation's inputs too; default false."""
    profile_memory: bool | None = None
    """Only with trace: each allocation too; default false."""
    with_stack: bool | None = None
    """Only with trace: the line of Python that called each operation too, which is slow; default
    false."""
    with_flops: bool | None = None
    """Only with trace: FLOPs of products and convolutions too; default false."""
    memory_snapshot: bool = False
    """Keep a history of allocations, and write it as memory-*.pickle for pytorch.org/memory_viz:
    when SIGUSR2 asks a process for it (kill -USR2), and when a GPU runs out of memory. A CPU has no
    such history: there it is that of the one step after the signal, as torch.profiler sees it."""
    memory_snapshot_step: Annotated[int | None, Range(1, 2**31)] = None
    """Only with memory_snapshot: the step of this process after which one is written unasked."""
    memory_snapshot_entries: Annotated[int | None, Range(1, 2**24, "each takes some kB")] = None
    """Only with memory_snapshot: newest allocations and frees that a GPU's history has; default
    100,000."""
    max_gib: Annotated[float | None, Range(above=0, most=1e6)] = None
    """GiB that save_folder/profile may take on a machine; what would exceed it is left out, and
    reported; default 4."""

    def check(self, key: str = "profile.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if not self.trace:
            yield from inert(key, self, [*_SCHEDULE, *_CONTENT], f"without {key}trace: true")
        if not self.memory_snapshot:
            names = ["memory_snapshot_step", *_MEMORY]
            yield from inert(key, self, names, f"without {key}memory_snapshot: true")
        if not self.is_on:
            why = f"without {key}trace or {key}memory_snapshot: true"
            yield from inert(key, self, ["ranks", *_FILES], why)
        if isinstance(self.ranks, list):
            if not self.ranks:
                yield f"{key}ranks: names no process; write [0], or all"
            if any(rank < 0 for rank in self.ranks):
                yield f"{key}ranks: {self.ranks} has a negative number; ranks begin at 0"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.trace:
            set_defaults(self, **_SCHEDULE, **_CONTENT)
        if self.memory_snapshot:
            set_defaults(self, **_MEMORY)
        if self.is_on:
            set_defaults(self, ranks=[0], **_FILES)

    @property
    def is_on(self) -> bool:
        """Whether anything is to be written."""
        return self.trace or self.memory_snapshot

    def has_rank(self, rank: int) -> bool:
        """Whether a process is among those chosen, of the filled section."""
        return self.ranks == ALL_RANKS or (isinstance(self.ranks, list) and rank in self.ranks)

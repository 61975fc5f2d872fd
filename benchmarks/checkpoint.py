"""How long a save blocks training: in the background, synchronous, and by PyTorch's async_save.

    python -m benchmarks.checkpoint [GB of state] [rounds]

All save the same weights and moments, interleaved in one process, after a step of the optimizer;
each save is finished, and its files are deleted, before the next begins. The first of each
allocates buffers and is not counted. On a GPU, ours returns while copies are under way: what the
next update waits for is counted with it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.harness import interleaved, over_rounds, ratio, table, write
from llmfoundry.checkpoint.load import training_state
from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.distributed.process_group import World
from llmfoundry.models.tensor_parallel import all_stacked_rows

WIDTH = 4096
BYTES = 12  # of a parameter: fp32, and both moments of Adam
BLOCKED, OF = "blocked, s", "of synchronous"
SHOWN = {"save": "{}", BLOCKED: "{:.3f}", OF: "{:.4f}", "written after, s": "{:.2f}"}


class Saved(NamedTuple):
    """Seconds for which a save blocked training, and after which all of it was on the disk."""

    blocked: float
    whole: float


class Subject:
    """A model of that many gigabytes of weights and moments."""

    def __init__(self, gigabytes: float, device: torch.device) -> None:
        n_layers = max(1, round(gigabytes * 1e9 / BYTES / WIDTH**2))
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(n_layers)]
        self.model: Any = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.world = World(0, 1, 0, device)
        self.bytes = BYTES * n_layers * WIDTH**2
        self.step()

    def step(self) -> None:
        """Change all weights and moments."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Until the device is done with all that was queued."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


def ours(subject: Subject, folder: Path, *, background: bool) -> Callable[[int], Saved]:
    """A save by a run's own writer."""

    def refuse(line: str) -> None:
        raise RuntimeError(line)

    saver = Checkpointer(
        Storage(folder),
        subject.world,
        Contents({"recipe.yaml": ""}, all_stacked_rows(subject.model)),
        SavePolicy(keep=-1, background=background, max_failures=1),
        Reports(refuse),
    )

    def save(number: int) -> Saved:
        subject.wait()
        began = time.perf_counter()
        place = saver.save(number, subject.model, subject.optimizer, {"batch": number})
        saver.before_update()
        subject.wait()
        blocked = time.perf_counter() - began
        saver.wait()
        saver.check()
        whole = time.perf_counter() - began
        shutil.rmtree(place)
        return Saved(blocked, whole)

    return save


def pytorchs(subject: Subject, folder: Path) -> Callable[[int], Saved]:
    """A save by `torch.distributed.checkpoint.async_save` with its defaults."""

    def save(number: int) -> Saved:
        subject.wait()
        began = time.perf_counter()
        place = folder / str(number)
        state = training_state(subject.model, subject.optimizer)
        done: Any = dcp.async_save(state, checkpoint_id=place)
        subject.wait()
        blocked = time.perf_counter() - began
        getattr(done, "upload_completion", done).result()
        whole = time.perf_counter() - began
        shutil.rmtree(place)
        return Saved(blocked, whole)

    return save


def measured(gigabytes: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each way to save."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject = Subject(gigabytes, device)
    torch.distributed.init_process_group(  # without a group PyTorch saves nothing asynchronously
        "cpu:gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
    )
    ways = {
        "synchronous": ours(subject, folder / "now", background=False),
        "asynchronous": ours(subject, folder / "later", background=True),
        "torch's async_save": pytorchs(subject, folder / "theirs"),
    }

    def after_a_step(save: Callable[[int], Saved], number: int) -> Saved:
        subject.step()
        return save(number + 1)

    found = interleaved(
        lambda n: {name: partial(after_a_step, save, n) for name, save in ways.items()},
        rounds=rounds + 1,
    )
    torch.distributed.destroy_process_group()
    synchronous = found["synchronous"][1:]
    return [
        {
            "save": name,
            BLOCKED: over_rounds(one.blocked for one in saves[1:]),
            OF: ratio(saves[1:], synchronous, lambda one: one.blocked),
            "written after, s": over_rounds(one.whole for one in saves[1:]),
            "first blocked, s": saves[0].blocked,
        }
        for name, saves in found.items()
    ]


def main() -> None:
    """Save by all, print, write the result."""
    given = [float(word) for word in sys.argv[1:]]
    gigabytes, rounds = [*given, *(2.0, 5.0)[len(given) :]]
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(gigabytes, int(rounds), Path(folder))
    print("\n".join(table(rows, {**SHOWN, "first blocked, s": "{:.3f}"})))
    print(f"\nwritten to {write('saving', rows, {'GB': gigabytes, 'rounds': int(rounds)})}")


if __name__ == "__main__":
    main()

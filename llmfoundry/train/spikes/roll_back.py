"""Going back before a spike, and leaving out what was read since: the run's parts, one by one.

The trainer calls `go_back` on every process, at the same step. The idea: which batch comes when is
a pure function of how many samples each stream has given, so batches are left out by counting them
as given; the checkpoint keeps those counts in any case, and a resume after this needs no more.
Where the run is killed before its next save, it goes back to the same checkpoint, comes to the same
spike and decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from llmfoundry.checkpoint.commit import unpin
from llmfoundry.checkpoint.load import load_training_state, read_state
from llmfoundry.checkpoint.save import Checkpointer
from llmfoundry.data.loader import Loader
from llmfoundry.distributed.launch import World, on_rank0
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.resilience.watch import WatchConfig


@dataclass(frozen=True)
class Return:
    """Where a run goes on after a spike.

    Attributes:
        batch: steps done.
        skipped: batches that are left out, from there.
        name: of the checkpoint; empty: the weights of before the spike were in memory.
        state: the checkpoint's.
    """

    batch: int
    skipped: int
    name: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """What was done, for people."""
        where = f"to {self.name}" if self.name else "to the step before, as no checkpoint is older"
        last = self.batch + self.skipped
        return (
            f"the run went back {where}; what were to be batches {self.batch + 1:,} to {last:,} are"
            " left out"
        )


def go_back(
    spike: int,
    config: WatchConfig,
    loader: Loader,
    checkpointer: Checkpointer,
    model: Decoder,
    optimizer: Optimizer,
    world: World,
) -> Return:
    """Load the newest checkpoint that is old enough, and leave out what came after it.

    Args:
        spike: steps done before the one that spiked; the weights are those of before it.
        config: filled.
        loader: which no thread reads meanwhile.
        checkpointer: whose newer checkpoints are removed.
        model: to fill.
        optimizer: to fill.
        world: this process.
    """
    assert config.roll_back_steps is not None and config.roll_back_skip is not None
    folder = checkpointer.find(spike - config.roll_back_steps)
    batch, state = spike, dict[str, Any]()
    if folder is not None:
        state = on_rank0(world, lambda: read_state(folder))
        batch = int(state["batch"])
        loader.resume(state["order"], batch)
        load_training_state(folder, model, optimizer, world=world)
        unpin(folder)
    skipped = spike + 1 + config.roll_back_skip - batch
    loader.skip(batch, skipped)
    checkpointer.forget_after(batch)
    return Return(batch, skipped, folder.name if folder is not None else "", state)

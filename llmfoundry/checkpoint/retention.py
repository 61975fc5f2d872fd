"""Retention: which checkpoints are removed once a newer one is complete.

`Checkpointer` (`save.py`) calls `prune` after each save, and once when a run starts, because the
process before may have been killed while it pruned. The rule is the same for a folder and for a run
at a URL; the storage says which checkpoints are complete and how one is removed.
"""

from __future__ import annotations

from collections.abc import Callable

from llmfoundry.checkpoint.storage import Storage, batch_of


def prune(
    storage: Storage,
    newest: int,
    *,
    keep: int,
    choose_best: Callable[[list[int]], int | None] | None = None,
) -> None:
    """Remove superseded checkpoints and the remains of interrupted saves; on the main process.

    A checkpoint that another process is reading stays until a later call.

    Args:
        storage: the run's.
        newest: the batch of the newest checkpoint, which is complete. Later batches belong to a run
            that was refused at its start; they stay until there is a newer checkpoint.
        keep: how many of the newest complete checkpoints stay, `newest` included; -1: all.
        choose_best: returns, given the batches of all checkpoints, the one that stays whatever its
            age; None: there is no such checkpoint.
    """
    folders = storage.checkpoints()
    best = None if choose_best is None else choose_best([batch_of(folder) for folder in folders])

    older = [folder for folder in folders if batch_of(folder) < newest]
    complete = [folder for folder in older if storage.is_complete(folder)]
    interrupted = [folder for folder in older if storage.was_interrupted(folder)]

    # `newest` is the first of the `keep` checkpoints that stay.
    superseded = []
    if keep > 0 and len(complete) >= keep:
        last_batch = batch_of(complete[keep - 1])
        for folder in older:
            if batch_of(folder) > last_batch or batch_of(folder) == best or folder in interrupted:
                continue
            # A damaged checkpoint, with a marker but incomplete, is removed with those of its age.
            if folder in complete or storage.has_commit(folder):
                superseded.append(folder)

    for folder in [*interrupted, *superseded]:
        storage.remove(folder)

"""Threads that compute beside the one that trains: on the same GPU as it.

A new thread's current device is GPU 0, whatever its process has chosen. What it does there first
(pinned memory, a stream) opens a context of a few hundred megabytes: on GPU 0, once for every
process of the machine. Every thread of ours that may touch a tensor is made here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def device_thread(
    target: Callable[..., None], *args: object, name: str, daemon: bool = False
) -> threading.Thread:
    """A thread, not yet started, whose current device is that of the thread that makes it.

    Args:
        target: what it runs.
        args: of `target`.
        name: the thread's.
        daemon: whether the process may end before it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=daemon)

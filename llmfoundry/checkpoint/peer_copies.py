"""Files that processes of different machines hand to each other, past the store.

A machine's part of a checkpoint is kept on the next machine's disk as well, so that one which is
replaced gets its part from there: `checkpoints.homes` hands over after a save, and `stored_files`
gets back before a resume. The idea: what is sent is named and measured beforehand by both sides,
and a secret that processes tell each other by the run's own messages opens the door, so that nobody
else can write anything.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import NamedTuple

from llmfoundry.distributed.launch import own_host
from llmfoundry.files import atomic_file

_BLOCK = 1 << 20
_LONGEST_HEADER = 1 << 16
_QUIET_S = 60.0  # without a byte


class Address(NamedTuple):
    """Where a process listens, and what it must be told."""

    host: str
    port: int
    secret: str


class CopyDoor:
    """Where this process takes files from others."""

    def __init__(self) -> None:
        """Listen, on the network by which the processes of the run meet."""
        self._socket = socket.create_server((own_host(), 0), backlog=64)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port, secrets.token_hex(16))

    def take(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Take these files into a folder, from whoever knows the secret.

        Raises:
            OSError: they do not come, or cannot be written.
        """
        left = dict(sizes)
        self._socket.settimeout(_QUIET_S)
        while left:
            with self._socket.accept()[0] as caller, suppress(ValueError):
                caller.settimeout(_QUIET_S)
                with caller.makefile("rwb") as line:
                    self._hear(line, folder, left)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _hear(self, line: BufferedRWPair, folder: Path, left: dict[str, int]) -> None:
        """One caller's files.

        Raises:
            ValueError: it is nobody whom this process waits for.
        """
        told = line.readline(_LONGEST_HEADER).decode(errors="replace").strip()
        if not secrets.compare_digest(told.encode(), self.address.secret.encode()):
            raise ValueError("a stranger")
        while name := json.loads(line.readline(_LONGEST_HEADER) or b'""'):
            if name not in left:
                raise ValueError("not what was agreed upon")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                todo = left[name]
                while todo:
                    block = line.read(min(_BLOCK, todo))
                    if not block:
                        raise OSError(f"{name} ended {todo} bytes too early")
                    file.write(block)
                    todo -= len(block)
            del left[name]
            line.write(b"+")
            line.flush()


def send(address: Address, folder: Path, sizes: Mapping[str, int]) -> None:
    """Hand files of a folder to the process that listens there.

    Raises:
        OSError: it cannot be reached, or has not taken them.
    """
    if not sizes:
        return
    with (
        socket.create_connection((address.host, address.port), _QUIET_S) as caller,
        caller.makefile("rwb") as line,
    ):
        line.write(address.secret.encode() + b"\n")
        for name, size in sizes.items():
            line.write(json.dumps(name).encode() + b"\n")
            with (folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    raise OSError(f"{folder / name} has changed")
                while block := file.read(_BLOCK):
                    line.write(block)
            line.flush()
            if line.read(1) != b"+":
                raise OSError(f"{name} was not taken")
        line.write(b'""\n')
        line.flush()


class CopiedPart(NamedTuple):
    """What one process gives to others and takes from them: sizes of files, by name."""

    give: list[tuple[Address, dict[str, int]]]
    take: dict[str, int]


class Told(NamedTuple):
    """What a process says of itself: where it listens, on which machine, and which files it has."""

    address: Address
    machine: str
    files: dict[str, int]


def copies_on_next(told: Sequence[Told]) -> list[CopiedPart]:
    """Each process's files go to one of the next machine; nowhere where there is one machine."""
    machines: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        machines.setdefault(one.machine, []).append(rank)
    names, parts = list(machines), [CopiedPart([], {}) for _ in told]
    for number, name in enumerate(names if len(names) > 1 else ()):
        following = machines[names[(number + 1) % len(names)]]
        for index, rank in enumerate(machines[name]):
            to = following[index % len(following)]
            parts[rank].give.append((told[to].address, told[rank].files))
            parts[to].take.update(told[rank].files)
    return parts


def parts_given_back(told: Sequence[Told], owners: Mapping[str, int]) -> list[CopiedPart]:
    """Files that the machine of their owner lacks and another has.

    Args:
        told: by each process, the files of its machine.
        owners: rank of each file that is needed.
    """
    parts = [CopiedPart([], {}) for _ in told]
    for name, owner in owners.items():
        if owner >= len(told) or name in told[owner].files:
            continue
        holder = next((rank for rank, one in enumerate(told) if name in one.files), None)
        if holder is not None:
            sizes = {name: told[holder].files[name]}
            parts[holder].give.append((told[owner].address, sizes))
            parts[owner].take.update(sizes)
    return parts


def exchange(door: CopyDoor, folder: Path, part: CopiedPart) -> None:
    """Give and take at the same time.

    Raises:
        OSError: something was not given, or did not come.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="neighbours") as pool:
        taken = pool.submit(door.take, folder, part.take)
        for address, sizes in part.give:
            send(address, folder, sizes)
        taken.result()

"""Machines of one network, made of namespaces, whose packets may be delayed or lost.

Processes in a namespace have nothing but this network, whose packets pass through this program (TUN
devices): the kernels of small virtual machines have no `tc netem`. It needs root and Linux.

    python network.py NAMESPACE,NAMESPACE,… PROCESSES scripts/train.py RECIPE …

starts a command under torchrun on several such machines, as `srun --kill-on-bad-exit` does: a fault
names it in supervise.launch.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DEVICE = "net0"
_NET, _MOST = 0x40000000, 65535  # CLONE_NEWNET; bytes of a packet
_TUNSETIFF, _TUN, _PLAIN = 0x400454CA, 0x0001, 0x1000  # IFF_TUN, IFF_NO_PI

Delay = Callable[[int, int], float | None]
"""Seconds that a packet takes from one machine to another; None: it is lost."""


class Network:
    """Machines 0, 1, … with addresses of one network, until `close`.

    Attributes:
        delay: of each packet; may be changed at any time.
    """

    def __init__(self, size: int, name: str) -> None:
        self.delay: Delay = lambda one, other: 0.0
        self.names = [f"{name}-{number}" for number in range(size)]
        self._devices = [self._machine(number) for number in range(size)]
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    @staticmethod
    def address(number: int) -> str:
        """Of a machine."""
        return f"10.77.0.{number + 1}"

    def within(self, number: int) -> list[str]:
        """Prefix of a command that is to run on a machine."""
        return ["ip", "netns", "exec", self.names[number]]

    def close(self) -> None:
        """Remove the machines; their processes must have ended."""
        os.write(self._waker, b"x")
        self._thread.join()
        for descriptor in (*self._devices, self._wake, self._waker):
            os.close(descriptor)
        for name in self.names:
            _ip("netns", "delete", name)

    def _machine(self, number: int) -> int:
        name, address = self.names[number], self.address(number)
        _ip("netns", "add", name)
        descriptor = _device_in(Path("/run/netns") / name)
        for words in (
            ("addr", "add", f"{address}/24", "dev", DEVICE),
            ("link", "set", DEVICE, "mtu", str(_MOST - 535), "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-netns", name, *words)
        return descriptor

    def _deliver(self) -> None:
        """Deliver packets, each after its delay."""
        waiting = list[tuple[float, int, int, bytes]]()
        numbers = {descriptor: n for n, descriptor in enumerate(self._devices)}
        count = 0
        while True:
            due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self._devices, self._wake], [], [], due)
            if self._wake in ready:
                return
            for descriptor in ready:
                packet = os.read(descriptor, _MOST)
                target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # IPv4's last byte
                if not 0 <= target < len(self._devices):
                    continue
                delay = self.delay(numbers[descriptor], target)
                if delay is not None:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay, count, target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                with suppress(OSError):
                    os.write(self._devices[target], packet)


@contextmanager
def network(size: int, name: str) -> Iterator[Network]:
    """One that is removed at the end, and before it what a killed program has left."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or shutil.which("ip") is None:
        pytest.skip("needs root, /dev/net/tun and Debian's package iproute2")
    for number in range(size):
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", f"{name}-{number}")
    made = Network(size, name)
    try:
        yield made
    finally:
        made.close()


def _device_in(namespace: Path) -> int:
    """A TUN device of a network namespace; reads and writes are its packets."""
    enter = ctypes.CDLL(None, use_errno=True).setns
    with open("/proc/thread-self/ns/net") as own, namespace.open() as other:
        _check(enter(other.fileno(), _NET))
        try:
            descriptor = os.open("/dev/net/tun", os.O_RDWR)
            request = struct.pack("16sH22x", DEVICE.encode(), _TUN | _PLAIN)
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
        finally:
            _check(enter(own.fileno(), _NET))
    return descriptor


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def launch(machines: list[str], processes: int, command: list[str]) -> int:
    """Run an agent on each machine, the first with the rendezvous; where one fails, end all."""
    agents = [
        subprocess.Popen(_agent(n, machines, processes, command), start_new_session=True)
        for n in range(len(machines))
    ]
    status = 0
    while any(agent.poll() is None for agent in agents) and not status:
        time.sleep(0.1)
        status = next((agent.returncode for agent in agents if agent.returncode), 0)
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    return 1 if status else 0


def _agent(number: int, machines: list[str], processes: int, command: list[str]) -> list[str]:
    own, first = f"10.77.0.{number + 1}", "10.77.0.1"
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{29400}", "--rdzv-id=faults"]
    where = [f"--local-addr={own}", f"--nnodes={len(machines)}", f"--nproc-per-node={processes}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, *where, *command]
    inside = ["ip", "netns", "exec", machines[number], "unshare", "--uts", "sh", "-c"]
    named = f"NODE_NAME=node-{number} GLOO_SOCKET_IFNAME={DEVICE}"
    script = f'hostname {own}; {named} exec "$@"'  # a host name that needs no /etc/hosts
    return [*inside, script, "sh", *torchrun]


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:]))

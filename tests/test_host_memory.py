"""Limits of control groups, as the kernel writes them (its cgroup-v1 and cgroup-v2 pages)."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llmfoundry.ops import devices
from llmfoundry.ops.devices import available_host_memory, total_host_memory

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"


def make_group(folder: Path, limit: int | str, used: int, files: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    before = "" if version == 2 else "total_"
    own = [f"{before}active_file {files // 2}", f"{before}inactive_file {files - files // 2}"]
    more = ["anon 0"] if version == 2 else ["active_file 7", "inactive_file 7"]
    (folder / "memory.stat").write_text("\n".join([*more, *own]) + "\n")
    for name, value in zip(names[2 - version], (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Here is what a process sees at /sys/fs/cgroup; /proc/self/cgroup is `own`."""
    monkeypatch.setattr(devices, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(devices, "_OWN", tmp_path / "own")
    memory = type("Memory", (), {"available": 100 * GIB, "total": 128 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path / "mounts"


def test_the_narrowest_group_above_a_process_counts_and_files_give_way(mounts: Path) -> None:
    (mounts.parent / "own").write_text("0::/slurm/job_7/step\n")
    make_group(mounts / "slurm/job_7/step", "max", 3 * GIB, GIB, 2)
    make_group(mounts / "slurm/job_7", 8 * GIB, 6 * GIB, GIB, 2)
    make_group(mounts / "slurm", 64 * GIB, 20 * GIB, 0, 2)
    assert available_host_memory() == 3 * GIB and total_host_memory() == 8 * GIB


def test_a_containers_own_group_is_at_the_mount(mounts: Path) -> None:
    (mounts.parent / "own").write_text("0::/\n")
    make_group(mounts, 4 * GIB, GIB, 0, 2)
    assert available_host_memory() == 3 * GIB and total_host_memory() == 4 * GIB


def test_version_1_counts_all_groups_below_and_knows_a_path_of_the_host(mounts: Path) -> None:
    """In a Docker container of old, the path is the host's, and is not there."""
    (mounts.parent / "own").write_text("5:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n")
    make_group(mounts / "memory", 4 * GIB, 3 * GIB, 2 * GIB, 1)
    assert available_host_memory() == 3 * GIB and total_host_memory() == 4 * GIB
    make_group(mounts / "memory", NO_LIMIT, 3 * GIB, 2 * GIB, 1)
    assert available_host_memory() == 100 * GIB and total_host_memory() == 128 * GIB


def test_a_group_that_is_full_leaves_nothing(mounts: Path) -> None:
    (mounts.parent / "own").write_text("0::/\n")
    make_group(mounts, GIB, 2 * GIB, 0, 2)
    assert available_host_memory() == 0


@pytest.mark.parametrize("own", ["", "no such line\n", "0::/\n", "4:memory:/x\n"])
def test_where_no_group_is_to_be_seen_the_machine_counts(mounts: Path, own: str) -> None:
    (mounts.parent / "own").write_text(own)
    assert available_host_memory() == 100 * GIB and total_host_memory() == 128 * GIB

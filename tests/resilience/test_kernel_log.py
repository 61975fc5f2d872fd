"""Lines of kernel logs, as drivers wrote them on machines of others, and what they lead to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llmfoundry.resilience.check import kernel_log
from llmfoundry.resilience.check.findings import BAD, NOTICE
from llmfoundry.resilience.check.kernel_log import judge_log

LINES = {  # by line: whether it is bad, a word of what it is, a word of what to do
    "NVRM: Xid (PCI:0000:c1:00): 79, pid=4067, name=python, GPU has fallen off the bus.": (
        BAD, "XID 79: the GPU has fallen off the bus", "reboot"),
    "NVRM: Xid (PCI:0000:C1:00): 48, pid=1, name=python, An uncorrectable double bit error": (
        BAD, "XID 48: uncorrectable", "reset"),
    "NVRM: Xid (PCI:0000:c1:00): 63, pid='<unknown>', name=<unknown>, Row Remapper": (
        NOTICE, "XID 63: a row of memory is remapped", "nothing now"),
    "NVRM: Xid (PCI:0000:c1:00): 64, pid=1, Row Remapper: remapping failed": (
        BAD, "XID 64", "reset"),
    "NVRM: Xid (PCI:0000:c1:00): 94, pid=7194, Contained: SM (0x1)": (
        NOTICE, "XID 94: contained", "start the program again"),
    "NVRM: Xid (PCI:0000:c1:00): 95, pid=7194, Uncontained": (BAD, "XID 95", "reset"),
    "NVRM: Xid (PCI:0000:c1:00): 119, pid=5220, name=x, Timeout after 45s of waiting for RPC "
    "response from GPU6 GSP!": (BAD, "XID 119", "reset"),
    "NVRM: Xid (PCI:0000:c1:00): 74, pid=1, NVLink: fatal error detected on link 6": (
        BAD, "XID 74: NVLink error", "fabric"),
    "NVRM: Xid (PCI:0008:c1:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0)": (
        BAD, "XID 149: NVLink 5 error", "fabric"),
    "NVRM: Xid (PCI:0018:c1:00): 145, pid=876767, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 "
    "i0 Link 13 (0x0409a0c2 0x00000008)": (NOTICE, "NVLink 5 error, not fatal", "nothing now"),
    "NVRM: Xid (PCI:0000:c1:00): 102, pid=1, name=python, NVJPG3": (
        NOTICE, "XID 102: exception in a video, image", "start the program again"),
    "NVRM: Xid (PCI:0000:c1:00): 167, PCIE_FATAL_TIMEOUT": (BAD, "PCIe fatal", "reboot"),
    "NVRM: Xid (PCI:0000:c1:00 GPU-I:05): 94, pid=7194, Contained: SM (0x1)": (
        NOTICE, "XID 94: contained", "start the program again"),
    "NVRM: Xid (PCI:0000:c1:00): 13, pid='<unknown>', Graphics SM Warp Exception on (GPC 7)": (
        NOTICE, "XID 13", "start the program again"),
    "NVRM: Xid (0000:c1:00): 31, Ch 00000008, intr 10000000. MMU Fault": (
        NOTICE, "XID 31: memory page fault", "start the program again"),
    "NVRM: Xid (PCI:0000:c1:00): 45, pid=3, Ch 00000008": (NOTICE, "XID 45", "nothing now"),
    "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 "
    "(GPU Reset Required)": (BAD, "GPU Reset Required", "reset the GPU"),
    "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 "
    "(Node Reboot Required)": (BAD, "Node Reboot Required", "reboot"),
    "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) "
    "to 0x0 (None)": (NOTICE, "asks for nothing", "nothing now"),
    "NVRM: Xid (PCI:0000:c1:00): 998, something new": (NOTICE, "unknown to this table", ""),
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted": (
        NOTICE, "SXid 12028: Non-fatal", "nothing now"),
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 23001, Fatal, Link 12 Always Fatal": (
        BAD, "SXid 23001: Fatal", "NVSwitches"),
    "NVRM: GPU at PCI:0000:c1:00 has fallen off the bus.": (BAD, "fallen off the bus", "reboot"),
    "pt_main_thread[2536443]: segfault at 7f79 ip 00007f7c sp 00007f7c error 4 in libnccl.so": (
        NOTICE, "NCCL crashed", "again"),
    "Out of memory: Killed process 4067 (python) total-vm:12": (NOTICE, "no memory left", ""),
    "nfs: server store-3 not responding, still trying": (NOTICE, "file system", "file server"),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_leads_to_its_action(line: str) -> None:
    level, why, action = LINES[line]
    (found,) = judge_log([f"[Mon Apr  6 07:25:24 2026] {line}"], "n1")
    assert found.level == level and why in found.why and action in found.action, found
    assert found.nodes == (("n1",) if level == BAD else ())
    assert "c1:00" in found.where or "PCI" not in line or "NVRM: GPU at" in line


@pytest.mark.parametrize(
    "line",
    [
        "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
        "Xid (PCI:0000:c1:00): 79 without its driver",
        "",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert judge_log([line], "n1") == []


def test_repeats_are_counted_and_one_fault_is_reported_once_for_each_gpu() -> None:
    xid = "NVRM: Xid (PCI:0000:{}:00): {}, pid=1, x"
    lines = [xid.format("c1", 31)] * 4 + [xid.format("c2", 31), xid.format("c2", 79)]
    lines.append("NVRM: GPU at PCI:0000:c2:00 has fallen off the bus.")
    found = judge_log(lines, "n1")
    assert [(f.where, f.why) for f in found] == [
        ("n1, GPU 0000:c1:00", "XID 31: memory page fault, 4 times"),
        ("n1, GPU 0000:c2:00", "XID 31: memory page fault"),
        ("n1, GPU 0000:c2:00", "XID 79: the GPU has fallen off the bus"),
    ]
    assert "it repeats here" in found[0].action and "it repeats here" not in found[1].action


def test_lines_of_before_a_repair_do_not_count(tmp_path: Path) -> None:
    text = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."
    stamps = {hours: time.time() - 3600 * hours for hours in (1, 30)}
    utc = {
        h: time.strftime("%Y-%m-%dT%H:%M:%S,000000+00:00", time.gmtime(s))
        for h, s in stamps.items()
    }
    local = {h: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(s)) for h, s in stamps.items()}
    lines = [f"{stamp} host kernel: {text}" for stamp in (*utc.values(), *local.values())]
    lines += [f"[   12.345678] {text} no date", f"2026-02-31T00:00:00 {text} no such day"]
    path = tmp_path / "kern.log"
    path.write_text("\n".join(lines) + "\n\xff\0")
    kept, reason = kernel_log.read_log(str(path), hours=24)
    assert reason == "" and kept[:-1] == [lines[0], lines[2], *lines[4:]]
    assert len(kernel_log.read_log(str(path), hours=31)[0]) == len(lines) + 1


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_dates_of_syslog_and_of_dmesg_are_read_too(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    now = time.mktime((2026, 1, 1, 0, 30, 0, 0, 0, -1))  # half an hour into the year
    old, new = (time.ctime(now - 3600 * hours) for hours in (30, 1))  # Thu Jan  1 00:30:00 2026
    lines = [f"{when[4:19]} host kernel: {text}" for when, text in ((old, "old"), (new, "new"))]
    lines += [f"[{when}] {text}" for when, text in ((old, "old"), (new, "new"))]
    lines += ["[Mon Jan  1 00:20:00 2024] old", "Feb 29 00:00:00 host kernel: old"]
    kept = ["[Sat Feb 30 00:00:00 2026] no such day", "[  12.3] Jan  1 is no date here"]
    found = [*kernel_log.recent([*lines, *kept], hours=24, now=now)]
    monkeypatch.undo()
    time.tzset()
    assert found == [lines[1], lines[3], *kept]


def test_a_log_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_log.read_log(str(tmp_path), hours=1)[1].endswith("Is a directory")
    monkeypatch.setattr(kernel_log, "_KMSG", tmp_path / "none")
    monkeypatch.setattr(kernel_log, "_COMMANDS", (["false"], ["no-such-command"]))
    lines, reason = kernel_log.read_log(None, hours=1)
    assert lines == [] and "No such file" in reason and "health_check.kernel_log" in reason
    monkeypatch.setattr(kernel_log, "_COMMANDS", (["echo", "NVRM: Xid (PCI:1): 79, x"],))
    assert kernel_log.read_log(None, hours=1) == (["NVRM: Xid (PCI:1): 79, x"], "")

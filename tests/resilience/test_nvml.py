"""Verdicts on GPUs, by readings that nvidia-ml-py takes from a library that says what a test says.

What each state must lead to is NVIDIA's: the recovery action's values, the memory errors' guide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from llmfoundry.resilience.check import nvml
from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, UNCHECKED, Finding
from llmfoundry.resilience.check.nvml import (
    SLOWED,
    WARM,
    GpuProcess,
    GpuReading,
    judge_gpu_counts,
    judge_gpus,
)
from tests.resilience.fake_nvml import environment

READ = """
import json, os, sys
from dataclasses import asdict
from llmfoundry.resilience.check.nvml import judge_gpus, read_gpus
for states in json.loads(sys.argv[1]):
    os.environ["FAKE_NVML"] = states
    readings, reason = read_gpus()
    found = [asdict(finding) for finding in judge_gpus(readings, "n1")]
    print(json.dumps({"found": found, "reason": reason, "count": len(readings)}))
"""
STATES = {  # beside three healthy ones: what is found, a word of the reason and of the action
    "healthy": (SOUND, "H100", ""),
    "lost": (BAD, "lost: GPU is lost", "reboot"),
    "ecc": (BAD, "uncorrectable ECC errors since the last reset: 2", "reset the GPU"),
    "remap": (BAD, "wait for a reset to be remapped", "reset the GPU"),
    "unremappable": (BAD, "no spare rows are left", "replace"),
    "remapped": (NOTICE, "rows remapped after uncorrectable errors so far: 1", ""),
    "reset": (BAD, "the driver asks for: GPU reset", "reset the GPU"),
    "reboot": (BAD, "the driver asks for: node reboot", "reboot"),
    "narrow": (BAD, "PCIe has 8 lanes of 16", "reseat"),
    "hot": (BAD, "slowed: hardware slowdown, too hot (hardware), 92 degrees", "cooling"),
    "warm": (NOTICE, "slowed: too hot (software)", "cooling"),
    "capped": (SOUND, "H100", ""),
    "nvlink": (BAD, "17 links are up, 18 of the other GPUs' (down: 7)", "fabric"),
    "pcie-card": (BAD, "0 links are up, 18 of the other GPUs'", "fabric"),
    "replays": (NOTICE, "NVLink recoveries and replays since the last reset: 42", ""),
    "fabric": (BAD, "NVSwitch fabric: in progress", "fabric"),
    "busy": (BAD, "holds 40.0 GiB of its memory", "end that process"),
    "old": (UNCHECKED, "the driver does not report: recovery action, row remapping", ""),
}
MORE = ["", "pcie-card,pcie-card,pcie-card,pcie-card", "healthy,nvlink"]


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """What is found by state of the second of four GPUs, all read by one process; and of MORE."""
    asked = {state: f"healthy,{state},healthy,healthy" for state in STATES}
    asked |= {states: states for states in MORE}
    # a program of a session that is not this one's
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        env = os.environ | environment("", FAKE_NVML_PID=str(other.pid))
        env.pop("RANK", None)
        words = [sys.executable, "-c", READ, json.dumps(list(asked.values()))]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    finally:
        other.communicate()
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip(asked, lines, strict=True))


@pytest.mark.parametrize("state", STATES)
def test_a_state_of_the_driver_is_named_with_what_to_do(
    state: str, answers: dict[str, dict[str, Any]]
) -> None:
    level, why, action = STATES[state]
    found = [Finding(**finding) for finding in answers[state]["found"]]
    own = [f for f in found if f.where.startswith("n1, GPU 1")]
    assert answers[state]["count"] == 4 and answers[state]["reason"] == ""
    assert any(f.level == level and why in f.why and action in f.action for f in own), own
    assert (BAD in {f.level for f in own}) == (level == BAD)
    assert all(f.level == SOUND for f in found if f not in own), "the healthy ones"
    assert all(tuple(f.nodes) == (("n1",) if f.level == BAD else ()) for f in found)


def test_numbers_are_those_of_nvidia() -> None:
    library = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    ours = {
        nvml.DBE_VOLATILE: "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
        nvml.PAGES_PENDING: "NVML_FI_DEV_RETIRED_PENDING",
        nvml.RECOVERY_ACTION: "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        nvml.NVLINK_REPLAYS: "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        nvml.NVLINK_RECOVERIES: "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        nvml.LOST: "NVML_ERROR_GPU_IS_LOST",
    }
    assert {number: getattr(library, name) for number, name in ours.items()} == {n: n for n in ours}
    reasons = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
    bits = [*SLOWED, *WARM]
    assert bits == [getattr(library, f"nvmlClocksEventReason{r}", None) or
                    getattr(library, f"nvmlClocksThrottleReason{r}") for r in reasons]  # fmt: skip


def test_a_gpu_is_called_as_the_kernel_log_calls_it(answers: dict[str, dict[str, Any]]) -> None:
    assert {f["where"] for f in answers["healthy"]["found"]} == {
        f"n1, GPU {n} (0000:c{n + 1}:00)" for n in range(4)
    }


def test_cards_without_nvlink_are_sound_and_one_of_two_is_only_noticed(
    answers: dict[str, dict[str, Any]],
) -> None:
    alike = answers["pcie-card,pcie-card,pcie-card,pcie-card"]["found"]
    assert {finding["level"] for finding in alike} == {SOUND}
    levels = {finding["level"] for finding in answers["healthy,nvlink"]["found"]}
    assert levels == {SOUND, NOTICE}
    assert answers[""]["reason"] == "NVML knows no GPU"


def test_a_driver_that_is_not_there_is_reported_as_not_checked() -> None:
    script = "from llmfoundry.resilience.check import nvml; print(nvml.read_gpus())"
    env = os.environ | environment("healthy", FAKE_NVML_ERROR="9")
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "([], 'NVML: Driver Not Loaded')"
    script = "import sys; sys.modules['pynvml'] = None\n" + script
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "pip install nvidia-ml-py" in done.stdout


def test_a_process_of_another_container_cannot_be_judged() -> None:
    unknown = GpuReading(0, processes=(GpuProcess(7, "", 40 << 30),))
    small = GpuReading(0, processes=(GpuProcess(7, "python", 100 << 20),))
    for reading in (unknown, small):
        assert BAD not in {finding.level for finding in judge_gpus([reading], "n1")}


def test_a_node_with_fewer_gpus_than_most_is_named() -> None:
    (found,) = judge_gpu_counts({"n1": 8, "n2": 7, "n3": 8})
    assert found.where == "n2" and found.nodes == ("n2",) and "2 of 3 nodes have 8" in found.why
    assert judge_gpu_counts({"n1": 8, "n2": 7}) == [] == judge_gpu_counts({}), "either may be right"
    assert judge_gpu_counts({"n1": 0, "n2": 0}) == []

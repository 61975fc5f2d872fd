"""What a user may write as hardware, and how a mistake is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.hardware import GPUS, Hardware, known_gpu, named_gpu, short_name


def test_every_gpu_is_named_as_it_is_listed() -> None:
    assert all(named_gpu(short_name(key)) == key for key in GPUS)


@pytest.mark.parametrize(
    ("text", "gpus", "key"),
    [
        ("8xh100", 8, "H100"),
        ("512xH100-SXM", 512, "H100"),
        ("8xh100-pcie", 8, "H100 PCIe"),
        ("64xa100-80", 64, "A100 80GB"),
        ("64xNVIDIA-A100-80GB", 64, "A100 80GB"),
        ("72xgb200", 72, "GB200"),
        ("2xrtx_4090", 2, "RTX 4090"),
    ],
)
def test_known_gpus(text: str, gpus: int, key: str) -> None:
    found = Hardware.parse(text, "hardware")
    assert (found.gpus, found.gpu) == (gpus, GPUS[key]) and found.is_timed


def test_memory_alone_is_no_speed() -> None:
    found = Hardware.parse("128x80gb", "hardware")
    assert (found.gpus, found.is_timed) == (128, False)
    assert found.memory == Hardware.parse("1xh100", "hardware").memory
    assert Hardware.parse("1x24gb", "hardware").memory == int(22.0 * 2**30)  # of L4, the least
    assert Hardware.parse("1x77gb", "hardware").memory == 77 * 10**9  # no GPU has this size


def test_memory_is_what_pytorch_reports() -> None:
    """Within 0.3 % of total capacities in logs of PyTorch (out-of-memory errors, torchtitan)."""
    reported = {"h100": 79.18, "h200": 139.81, "a100-80": 79.15, "a100-40": 39.39, "b200": 178.35,
                "l40s": 44.39, "a10g": 22.06, "t4": 14.56, "mi300x": 191.69}  # fmt: skip
    for name, gib in reported.items():
        found = Hardware.parse(f"1x{name}", "hardware").memory / 2**30
        assert found == pytest.approx(gib, rel=0.003)
    for gpu in GPUS.values():  # GB200 has 184 GiB of its 186 GB of HBM, Ada's error correction 92 %
        assert 0.9 * gpu.memory_gb < gpu.memory_gib < gpu.memory_gb


def test_devices_are_known_by_pytorchs_names() -> None:
    assert known_gpu("NVIDIA A100-SXM4-80GB") == "A100 80GB"
    assert known_gpu("NVIDIA A100 80GB PCIe") == "A100 80GB PCIe"
    assert known_gpu("NVIDIA A100-PCIE-40GB") == "A100 40GB PCIE"
    assert known_gpu("NVIDIA H100 PCIe") == "H100 PCIe"
    assert known_gpu("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_a_file_describes_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("like: h100\nmemory_gb: 96\nmemory_gb_s: 2400\ngpus: 16\n")
    found = Hardware.parse("my.yaml", "hardware")
    assert (found.gpus, found.gpu.memory_gb, found.name) == (16, 96, "my")
    assert found.memory == GPUS["GH200"].memory_gib * 2**30  # the known GPU of 96 GB
    assert found.gpu.tflops == GPUS["H100"].tflops
    assert Hardware.parse("64xmy.yaml", "hardware").gpus == 64


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xh100-80gb", "h100"),
        ("8xA100-40GB", "a100-40gb"),
        ("8xa100-80gb-pcie", "a100-80gb-pcie"),
        ("8xnvidia-h200-sxm-141gb", "h200"),
    ],
)
def test_the_memory_may_be_named_with_the_gpu(text: str, name: str) -> None:
    assert Hardware.parse(text, "hardware").name == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8xh100-96gb", "is no hardware"),
        ("h100", "write how many GPUs and which"),
        ("0xh100", "is no hardware"),
        ("8xh101", "did you mean 'h100'"),
        ("8x", "is no hardware"),
        ("99999999xh100", "is no hardware"),
        ("8xno-such.yaml", "nothing at no-such.yaml"),
    ],
)
def test_other_texts_are_one_line(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        Hardware.parse(text, "hardware")
    assert len(refused.value.lines()) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("like: h101", "like: 'h101' is not known"),
        ("like: h100\ngpus: 0", "gpus: 0; write a number from 1 up"),
        ("like: h100", "gpus: is missing"),
        ("like: h100\ngpus: 8\ntflop: 3", "unknown key 'tflop'"),
        ("like: h100\ngpus: 8\nmemory_gb: -1", "memory_gb: -1.0 is too small"),
        ("like: h100\ngpus: 8\nreached: 2", "reached: 2.0 is too large"),
        ("gpus: 8\ntflops: 100", "memory_gb: is missing"),
        (
            "gpus: 16\ntflops: 100\nmemory_gb: 24\nmemory_gb_s: 900\nlink_gb_s: 32",
            "network_gb_s: is missing",
        ),
        ("like: [1]", "like: \\[1\\] is not known"),
        ("- 1", "my.yaml"),
    ],
)
def test_mistakes_in_a_file_are_named(
    content: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(content)
    with pytest.raises(UserError, match=why):
        Hardware.parse("my.yaml", "hardware")

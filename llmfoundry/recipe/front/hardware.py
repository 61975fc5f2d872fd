"""How many GPUs of which kind a user means: 8xh100, 512xa100-80gb, 128x80gb, 64xmy-gpu.yaml.

`--dry-run=HARDWARE` (`argv.py`) and `hardware=` of scripts/plan.py read it. A file describes GPUs
that the table (`recipe/hardware.py`) lacks: keys of `Gpu`, `like: h100` for those left out, and
`gpus: 64` where the command line does not say how many.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.front.paths import find_file
from llmfoundry.recipe.front.typed import Problem, build
from llmfoundry.recipe.front.yamlfile import read_yaml
from llmfoundry.recipe.hardware import GPUS, Gpu, named_gpu, short_name
from llmfoundry.recipe.values.bounds import out_of_bounds
from llmfoundry.recipe.values.checks import nearest

MOST_GPUS = 10**7 - 1
_COUNTED = re.compile(r"([1-9][0-9]{0,6})x(.+)", re.IGNORECASE | re.DOTALL)
_MEMORY = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)gb", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """GPUs for which a run is planned.

    Attributes:
        gpus: their number.
        gpu: what each does; of 128x80gb no more is known than its memory.
        name: how the user named the kind.
    """

    gpus: int
    gpu: Gpu
    name: str

    @property
    def memory(self) -> int:
        """Bytes of each."""
        return int(self.gpu.memory_gb * 10**9)

    @property
    def is_timed(self) -> bool:
        """Whether enough is known to compute seconds."""
        return min(self.gpu.tflops, self.gpu.memory_gb_s, self.gpu.link_gb_s) > 0

    @staticmethod
    def parse(text: str, key: str) -> Hardware:
        """What `text`, the value of `key`, means.

        Raises:
            UserError: it is written otherwise, or no such kind is known.
        """
        match = _COUNTED.fullmatch(text)
        count, kind = (int(match[1]), match[2]) if match else (None, text)
        if kind.endswith((".yaml", ".yml")):
            return _read(kind, key, count)
        memory, known = _MEMORY.fullmatch(kind), named_gpu(kind)
        if count is None or (memory is None and known is None):
            raise UserError(f"{key}: {text!r} is no hardware{_advice(kind, count)}")
        if memory is not None:
            return Hardware(count, Gpu(memory_gb=float(memory[1])), kind)
        assert known is not None
        return Hardware(count, GPUS[known], short_name(known))

    def __str__(self) -> str:
        if not self.gpu.tflops:
            return f"{self.gpus} x GPU of {self.gpu.memory_gb:g} GB"
        return f"{self.gpus} x {self.name} of {self.gpu.memory_gb:g} GB"


def _advice(kind: str, count: int | None) -> str:
    """What to write in place of what is no hardware."""
    names = [short_name(name) for name in GPUS]
    write = "; write how many GPUs and which: 8xh100, 64xa100-80gb, 128x80gb (memory alone)"
    if count is None:
        return f"{write}, 8xmy-gpu.yaml"
    return f"{nearest(kind.lower(), names)}{write}; known: {', '.join(names)}"


def _read(path: str, key: str, count: int | None) -> Hardware:
    """Of a file of the user's."""
    file = find_file(path, key)
    values = read_yaml(file)
    like, gpus = values.pop("like", None), values.pop("gpus", None)
    problems = [*_wrong_base(like), *_wrong_count(gpus)]
    found: list[Problem] = []
    base = {} if problems or like is None else dataclasses.asdict(GPUS[str(named_gpu(like))])
    gpu = build(Gpu, {**base, **values}, found)
    problems += [problem.line for problem in found]
    if not found:
        problems += [*out_of_bounds("", gpu), *_missing(gpu, count or gpus)]
    number = count if count is not None else gpus
    if number is None:
        problems.append(f"gpus: is missing; write it, or {key}=8x{path}")
    if problems:
        raise UserError(*(f"{key}: {path}: {line}" for line in problems))
    assert isinstance(number, int)
    return Hardware(number, gpu, Path(path).stem)


def _wrong_base(like: Any) -> list[str]:
    if like is None or (isinstance(like, str) and named_gpu(like)):
        return []
    names = [short_name(name) for name in GPUS]
    return [f"like: {like!r} is not known{nearest(str(like), names)}; one of {', '.join(names)}"]


def _wrong_count(gpus: Any) -> list[str]:
    is_count = isinstance(gpus, int) and not isinstance(gpus, bool) and 1 <= gpus <= MOST_GPUS
    return [] if gpus is None or is_count else [f"gpus: {gpus!r}; write a number from 1 up"]


def _missing(gpu: Gpu, gpus: Any) -> list[str]:
    """Keys without which neither memory nor seconds of so many can be computed."""
    needed = ["tflops", "memory_gb", "memory_gb_s", "link_gb_s"]
    if isinstance(gpus, int) and gpus > gpu.node:
        needed.append("network_gb_s")
    lacking = [name for name in needed if getattr(gpu, name) <= 0]
    return [f"{name}: is missing; write it, or like: h100" for name in lacking]

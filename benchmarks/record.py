"""What a benchmark found, with the machine it was found on: `results/`, one file for each of both.

Every bench prints its rows by `table` and ends with `write`; a later run on the same machine takes
the file's place. `python -m benchmarks.record` prints each ratio's range over the machines, which
is what the READMEs say: a ratio of one machine does not hold on the next.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from llmfoundry.files import write_whole
from llmfoundry.loggers.environment import environment
from llmfoundry.terminal import columns

RESULTS = Path(__file__).parent / "results"
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
LIBRARIES = ("accelerate", "datasets", "lm-eval", "peft", "trl")  # beside those of every run

Row = Mapping[str, Any]
"""Texts say what was measured; numbers, or `over_rounds`, what was found; `of …` is a ratio."""


def over_rounds(values: Iterable[float]) -> list[float]:
    """The smallest of some rounds' values, their median, the largest."""
    found = list(values)
    return [min(found), statistics.median(found), max(found)]


def middle(value: Any) -> Any:
    """A number, of rounds their median."""
    return value[1] if isinstance(value, list) else value


def table(rows: Sequence[Row], shown: Mapping[str, str]) -> list[str]:
    """The rows, a line each under the columns' names.

    Args:
        rows: of which those that lack a column have n/a in it.
        shown: columns by key, and how a value is written there, such as `{:.2f}`.
    """
    cells = [[_cell(row.get(key), form) for key, form in shown.items()] for row in rows]
    return columns([*shown], cells)


def _cell(value: Any, form: str) -> str:
    return "n/a" if value is None else form.format(middle(value))


def machine() -> dict[str, Any]:
    """Processor, its instruction sets that count here, cores, and the GPU where there is one."""
    facts = environment()
    flags, numbers = set[str](), []
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    if line := re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE):
        flags = set(line[1].split())
    for key in ("cpu family", "model"):  # what tells processors apart that have no proper name
        if line := re.search(rf"^{key}\s*: (\d+)$", text, re.MULTILINE):
            numbers.append(f"{key.removeprefix('cpu ')} {line[1]}")
    name = ", ".join([facts["processor"], *numbers])
    found: dict[str, Any] = {"processor": name, "cores": int(facts["cores"])}
    found["threads"] = torch.get_num_threads()
    found["instruction_sets"] = [flag for flag in INSTRUCTIONS if flag in flags]
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return {**found, "system": platform.system()}


def libraries() -> dict[str, str]:
    """Versions of Python and of what is measured, ours and others'."""
    there = {d.name for d in metadata.distributions()}
    facts = environment()
    kept = {k: v for k, v in facts.items() if k not in ("processor", "cores", "system")}
    return {**kept, **{name: metadata.version(name) for name in LIBRARIES if name in there}}


def write(
    bench: str, rows: Sequence[Row], settings: Mapping[str, Any], *, folder: Path = RESULTS
) -> Path:
    """Write `<bench>-<machine>.json`.

    Args:
        bench: its name.
        rows: what it found.
        settings: sizes, rounds and the like.
        folder: where to.
    """
    here = machine()
    label = f"{here['processor']} {here['cores']} cores {here.get('gpu', '')}".lower()
    path = folder / f"{bench}-{re.sub('[^a-z0-9]+', '-', label).strip('-')}.json"
    head: dict[str, Any] = {"bench": bench, "date": datetime.date.today().isoformat()}
    head |= {"machine": here, "load": os.getloadavg()[0], "libraries": libraries()}
    opened = json.dumps(_short({**head, "settings": dict(settings)}), indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(_short(dict(row))) for row in rows)
    folder.mkdir(exist_ok=True)
    write_whole(path, f'{opened},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path


def _short(value: Any) -> Any:
    """Numbers of four digits; what is shown is not known to more."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def ranges(folder: Path = RESULTS) -> Iterator[str]:
    """A line for each row of each bench: its ratios, from the smallest to the largest machine's."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["rows"]:
            label = (content["bench"], *(v for v in row.values() if isinstance(v, str)))
            for key, value in row.items():
                if key.startswith("of "):
                    found.setdefault(label, {}).setdefault(key, []).append(middle(value))
    for label, ratios in found.items():
        parts = (
            f"{key} {min(values):.2f} to {max(values):.2f} ({len(values)} machines)"
            if len(values) > 1
            else f"{key} {values[0]:.2f} (1 machine)"
            for key, values in ratios.items()
        )
        yield f"{', '.join(label)}: {'; '.join(parts)}"


if __name__ == "__main__":
    for text in ranges():
        print(text)

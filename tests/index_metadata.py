"""What the packages of constraints.txt need, as pip's own index has it; no package is downloaded.

`python -m tests.index_metadata` records it in `constraints_metadata.json` after a pin was changed;
`test_constraints.py` compares the pins with the record, and asks the index again about torch. Of a
wheel an index hands out its METADATA alone, at the wheel's address with `.metadata` (PEP 658).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import Version

HERE = Path(__file__).parent
RECORD = HERE / "constraints_metadata.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SECONDS = 20


class Needs(TypedDict):
    """`Requires-Python`, and those of `Requires-Dist` that are pinned too, without extras."""

    python: str
    needs: list[str]


class NoIndex(Exception):
    """No index answered, or it does not hand out metadata; says which."""


def pins() -> list[Requirement]:
    """The lines of constraints.txt."""
    lines = (HERE.parent / "constraints.txt").read_text().splitlines()
    return [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]


def version(pin: Requirement) -> Version:
    """The one version that a pin allows."""
    (only,) = pin.specifier
    assert only.operator == "==", f"{pin} is no single version"
    return Version(only.version)


def environment(python: str) -> dict[str, str]:
    """Markers of CPython on a Linux machine with a GPU."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }


def pythons(pin: Requirement) -> list[str]:
    """Those that a pin is for."""
    return [p for p in PYTHONS if pin.marker is None or pin.marker.evaluate(environment(p))]


def needs(pin: Requirement, python: str) -> Needs | None:
    """Of the wheel that `python` would install of a pin; None if there is only a source archive.

    Raises:
        NoIndex: as it says.
    """
    found = _wheel(pin, python)
    return None if found is None else _needs(_metadata(found))


def _wheel(pin: Requirement, python: str) -> str | None:
    """The address of the pin's best wheel for `python`."""
    rank = {tag: number for number, tag in enumerate(_tags(python))}
    found = []
    addresses, reason = _addresses(pin.name)
    if not addresses:
        raise NoIndex(reason)
    for address in addresses:
        try:
            name, made, _, tags = parse_wheel_filename(address.rpartition("/")[2])
        except InvalidWheelFilename:
            continue
        fitting = [rank[tag] for tag in tags if tag in rank]
        if name == canonicalize_name(pin.name) and made == version(pin) and fitting:
            found.append((min(fitting), address))
    return min(found)[1] if found else None


def _tags(python: str) -> list[Tag]:
    """What a wheel may be built for, best first: `python` with glibc 2.28 on x86-64."""
    numbers = [int(number) for number in python.split(".")]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    interpreter = f"cp{numbers[0]}{numbers[1]}"
    return [
        *cpython_tags(numbers, platforms=platforms),
        *compatible_tags(numbers, interpreter, platforms),
    ]


@cache
def _addresses(name: str) -> tuple[list[str], str]:
    """Of every wheel of a package that pip's indexes list; and if none, what pip reported."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "-vv"]
    command += ["--retries", "1", "--timeout", str(SECONDS)]
    run = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"https?://[^\s#]+/[^\s#/]+\.whl\b", run.stdout + run.stderr)
    lines = (run.stderr + run.stdout).strip().splitlines()
    reason = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return sorted({*found}), f"pip's index lists no wheel of {name}: {' '.join(reason)}"


@cache
def _metadata(address: str) -> Message:
    try:
        with urllib.request.urlopen(f"{address}.metadata", timeout=SECONDS) as answer:
            return HeaderParser().parsestr(answer.read().decode())
    except OSError as error:
        raise NoIndex(f"no metadata of {address.rpartition('/')[2]}: {error}") from error


def _needs(headers: Any) -> Needs:
    pinned = {canonicalize_name(pin.name) for pin in pins()}
    found = [Requirement(line) for line in headers.get_all("Requires-Dist") or []]
    return {
        "python": headers["Requires-Python"] or "",
        "needs": sorted(
            str(need)
            for need in found
            if canonicalize_name(need.name) in pinned and "extra ==" not in str(need.marker)
        ),
    }


def _recorded(pin: Requirement, python: str) -> Needs | None:
    """`needs`, or of the very version that is installed where the index has none."""
    try:
        return needs(pin, python)
    except NoIndex:
        if metadata.version(pin.name) != str(version(pin)):
            raise
        return _needs(metadata.metadata(pin.name))


def record() -> dict[str, dict[str, Needs | None]]:
    """Of every pin and the Pythons that it is for; those of the same needs share an entry."""

    def one(pin: Requirement) -> dict[str, Needs | None]:
        found: list[tuple[list[str], Needs | None]] = []
        for python in pythons(pin):
            now = _recorded(pin, python)
            if found and found[-1][1] == now:
                found[-1][0].append(python)
            else:
                found.append(([python], now))
        return {" ".join(which): now for which, now in found}

    with ThreadPoolExecutor(4) as pool:
        return {str(pin): found for pin, found in zip(pins(), pool.map(one, pins()), strict=True)}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")

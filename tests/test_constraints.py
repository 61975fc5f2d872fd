"""constraints.txt can be installed on Linux machines with a GPU, by every Python we support.

A local CPU wheel of torch hides what its CUDA wheel needs, so that the pins are compared with
recorded metadata of the index's wheels (`index_metadata.py`), and that with the index itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.index_metadata import (
    PYTHONS,
    RECORD,
    Needs,
    NoIndex,
    environment,
    needs,
    pins,
    pythons,
    version,
)
from tests.tiny import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


def recorded() -> dict[str, dict[str, Needs | None]]:
    return json.loads(RECORD.read_text())


def pinned(python: str) -> dict[str, Requirement]:
    """The pins that hold for a Python, by name."""
    found = [pin for pin in pins() if python in pythons(pin)]
    names = [canonicalize_name(pin.name) for pin in found]
    assert len({*names}) == len(names), "pinned twice"
    return dict(zip(names, found, strict=True))


def clashes(python: str, who: str, wanted: list[str]) -> Iterator[str]:
    """What `who` needs and the pins do not give."""
    given = pinned(python)
    for text in wanted:
        need = Requirement(text)
        pin = given.get(canonicalize_name(need.name))
        holds = need.marker is None or need.marker.evaluate(environment(python))
        if holds and pin and not need.specifier.contains(version(pin), prereleases=True):
            yield f"Python {python}: {who} needs {need}, constraints.txt has {pin}"


def test_the_record_is_of_these_constraints() -> None:
    found = {pin: " ".join(entries).split() for pin, entries in recorded().items()}
    wanted = {str(pin): pythons(pin) for pin in pins()}
    assert found == wanted, "run: python -m tests.index_metadata"


@pytest.mark.parametrize("python", PYTHONS)
def test_no_pin_contradicts_another_or_its_python(python: str) -> None:
    found: list[str] = []
    for pin, entries in recorded().items():
        for which, entry in entries.items():
            if python not in which.split() or entry is None:
                continue
            if not Requirement(f"python{entry['python']}").specifier.contains(f"{python}.0"):
                found.append(f"{pin} is for Python {entry['python']}, not {python}")
            found += clashes(python, pin, entry["needs"])
    assert found == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_project_and_its_extras_admit_the_pins(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    assert [c for extra, needs in wanted.items() for c in clashes(python, extra, needs)] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_index_still_says_of_torch_what_is_recorded(python: str) -> None:
    torch = pinned(python)["torch"]
    try:
        found = needs(torch, python)
    except NoIndex as reason:
        pytest.skip(str(reason))
    if found is None:
        pytest.skip(f"pip's index has no wheel of {torch} for Python {python} on x86-64")
    entries = recorded()[str(torch)].items()
    assert [entry for which, entry in entries if python in which.split()] == [found]
    assert list(clashes(python, "torch", found["needs"])) == []

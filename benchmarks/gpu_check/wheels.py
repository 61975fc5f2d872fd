"""`wheels=FOLDER`: packages for a machine that has torch and no network, without pip.

A wheel is a zip file whose root goes on Python's path as it is. Each is unpacked once, whole or not
at all, into a folder of its own; processes of the check find these by PYTHONPATH.
"""

from __future__ import annotations

import platform
import re
import sys
import zipfile
from pathlib import Path

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_path

NEEDED = {  # by module the wheels of what `scripts/train.py` imports beside torch
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4-python3-runtime",
    "yaml": "pyyaml",
    "numpy": "numpy",
    "psutil": "psutil",
    "tqdm": "tqdm",
    "msgspec": "msgspec",
    "tokenizers": "tokenizers",
    "packaging": "packaging",
    "fsspec": "fsspec",
}
FOR_TESTS = {
    "pytest": "pytest",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "pygments": "pygments",
}
_TAGS = re.compile(r"-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl$")


def unpack(folder: Path, into: Path) -> list[Path]:
    """Unpack every wheel of a folder; what is to be on Python's path.

    Args:
        folder: of the wheels.
        into: where to, a folder for each.

    Raises:
        UserError: there is none, one is damaged, or made for another Python or processor.
    """
    found = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not found:
        raise UserError(f"wheels: {folder} holds no .whl file; --help says which to put there")
    if problems := [line for line in map(_unfit, found) if line]:
        raise UserError(*problems)
    into.mkdir(parents=True, exist_ok=True)
    return [_unpacked(wheel, into) for wheel in found]


def _unpacked(wheel: Path, into: Path) -> Path:
    target = into / wheel.stem
    if not target.is_dir():
        try:
            with zipfile.ZipFile(wheel) as archive, atomic_path(target) as partial:
                archive.extractall(partial)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(
                f"wheels: {wheel.name} cannot be unpacked: {one_line(error)}"
            ) from error
    return target


def _unfit(wheel: Path) -> str | None:
    """Why a wheel cannot serve here."""
    tags = _TAGS.search(wheel.name)
    if tags is None:
        return f"wheels: {wheel.name} is not named as a wheel is; take it as pip downloaded it"
    major, minor = sys.version_info[:2]
    stable = tags["abi"] == "abi3" or tags["platform"] == "any"
    ours = {f"cp{major}{minor}", f"py{major}{minor}", f"py{major}"}
    if not (ours & {*tags["python"].split(".")} or (stable and "3" in tags["python"])):
        return f"wheels: {wheel.name} is not for Python {major}.{minor}; download it for this one"
    if tags["platform"] != "any" and platform.machine() not in tags["platform"]:
        return f"wheels: {wheel.name} is not for {platform.machine()}; download it for this one"
    return None

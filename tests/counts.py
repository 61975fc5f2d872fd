"""Counts of `llmfoundry.plan.count` that all processes of a test session share.

Each run of a tiny model counts it on fake tensors first, which takes longer than its steps. Equal
models are counted once in a session: a file for each count, in a folder that `counts_folder` names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

VARIABLE = "TESTS_COUNTS"
PLAIN = (bool, int, float, str, type(None))


def counts_folder() -> Path:
    """Return the session's folder; the first process to ask makes it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="counts-")
    return Path(os.environ[VARIABLE])


def share_counts() -> None:
    """Let this process and its forks read and write the session's counts."""
    module: Any = sys.modules["llmfoundry.plan.count"]
    module._known = Counts("")
    module._known_of = CountsOfModels()


class Counts(dict[str, Any]):
    """Counts in memory, and below them those of other processes."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix, self._folder = prefix, counts_folder()

    def __contains__(self, key: object) -> bool:
        path = self._path(key)
        if not super().__contains__(key) and path.exists():
            super().__setitem__(str(key), pickle.loads(path.read_bytes()))
        return super().__contains__(key)

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        path = self._path(key)
        if self._folder.is_dir():
            written = path.with_suffix(f".{os.getpid()}")
            written.write_bytes(pickle.dumps(value))
            written.rename(path)

    def _path(self, key: object) -> Path:
        return self._folder / hashlib.sha256(f"{self._prefix}{key}".encode()).hexdigest()


class CountsOfModels:
    """Counts of models that are fine-tuned: equal for models of equal content."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}
        self._others: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    def setdefault(self, model: Any, default: dict[str, Any]) -> dict[str, Any]:
        """Return the counts of the models like this one; a class of transformers' has its own."""
        from llmfoundry.models.decoder import Decoder

        if not isinstance(model, Decoder):
            return self._others.setdefault(model, default)
        content = "\n".join(_content(model))
        return self._counts.setdefault(content, Counts(content))


def _content(model: Any) -> Iterator[str]:
    """Yield whatever a count can depend on: classes, settings, shapes, and what trains."""
    for name, module in model.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, PLAIN) or dataclasses.is_dataclass(value)
        }
        yield f"{name} {type(module)} {settings}"
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                facts = tensor is not None and (
                    type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device
                )  # fmt: skip
                yield f"{name}.{key} {facts}"

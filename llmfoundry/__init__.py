"""LLM Foundry's line of recipes for training large language models, on plain PyTorch.

    import llmfoundry as lf

    model = lf.load("runs/quickstart")
    run = lf.train(lf.recipe("quickstart", {"max_duration": "50ba"}))

The functions are in `llmfoundry/api/`, which the scripts call, too. They are imported when they are
used: `import llmfoundry` imports no PyTorch. docs/python.md describes them.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import TYPE_CHECKING, Any

import llmfoundry.data
import llmfoundry.recipe
import llmfoundry.train

if TYPE_CHECKING:
    from llmfoundry.api.averaging import average as average
    from llmfoundry.api.batches import data as data
    from llmfoundry.api.evaluation import Scores as Scores
    from llmfoundry.api.evaluation import evaluate as evaluate
    from llmfoundry.api.exports import convert as convert
    from llmfoundry.api.model import Model as Model
    from llmfoundry.api.model import build as build
    from llmfoundry.api.model import load as load
    from llmfoundry.api.recipes import recipe as recipe
    from llmfoundry.api.run import Run as Run
    from llmfoundry.api.training import finetune as finetune
    from llmfoundry.api.training import train as train
    from llmfoundry.errors import UserError as UserError
    from llmfoundry.train.trainer import Callback as Callback

__version__ = "0.1.0"

_MODULES = {  # of llmfoundry.api, by the names that they define
    "load": "model",
    "build": "model",
    "Model": "model",
    "evaluate": "evaluation",
    "Scores": "evaluation",
    "recipe": "recipes",
    "train": "training",
    "finetune": "training",
    "Run": "run",
    "convert": "exports",
    "average": "averaging",
    "data": "batches",
    "Callback": "training",
    "UserError": "recipes",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'llmfoundry' has no attribute {name!r}")
    value = _imported(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def _imported(name: str) -> Any:
    return getattr(importlib.import_module(f"llmfoundry.api.{_MODULES[name]}"), name)


class _CallablePackage(types.ModuleType):
    # A package that is also a function: `lf.train(...)` beside `llmfoundry.train.trainer`.

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return inspect.getdoc(_imported(self.__name__.rpartition(".")[2])) or ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _imported(self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_imported(self.__name__.rpartition(".")[2]))


for _package in (llmfoundry.data, llmfoundry.recipe, llmfoundry.train):
    _package.__class__ = _CallablePackage

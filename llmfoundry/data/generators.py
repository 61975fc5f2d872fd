"""Generators of example data: scripts of the folder `eval/`, loaded as modules.

`eval/generated.py` generates rows of evaluation tasks, `eval/generated_chats.py` conversations for
training (`data.name: instructions`) and for tasks. They are data of the repository, not part of the
package, so they are found by path; a wheel carries a copy of the folder.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

from llmfoundry.recipe.paths import ROOT

TASKS, CHATS = "generated", "generated_chats"
"""Names of the two scripts."""


@functools.cache
def load_generator(name: str) -> ModuleType:
    """Return a script of the folder `eval/`, given its name without the suffix, as a module."""
    module_name = f"llmfoundry_eval_{name}"
    spec = importlib.util.spec_from_file_location(module_name, ROOT / "eval" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up there
    spec.loader.exec_module(module)
    return module

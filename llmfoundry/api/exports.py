"""`convert` of `import llmfoundry`, which `scripts/convert.py` calls, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmfoundry.api.conversion import convert as convert_checkpoint
from llmfoundry.api.model import Model
from llmfoundry.api.recipes import checked_texts
from llmfoundry.api.run import Run
from llmfoundry.builders.registry import address_of
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ConvertRecipe


def convert(
    model: Model | Run | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str | None = "hf",
    **settings: Any,
) -> Path:
    """Convert a checkpoint to another format, as `scripts/convert.py` does; return what is written.

    >>> folder = lf.convert("runs/quickstart", "quickstart-hf")
    runs/quickstart/checkpoints/... is Starcoder2ForCausalLM in quickstart-hf
    >>> (folder / "model.safetensors").is_file()
    True

    Args:
        model: a run, its folder or a checkpoint's; a `Model` stands for the checkpoint that it was
            loaded from, without what was changed of it since.
        output: a folder that does not exist or is empty; with to="gguf" a file, NAME.gguf.
        to: hf, gguf or peft; None, with `from_="hf"`: a checkpoint of a Hugging Face model.
        settings: further keys of scripts/convert.py: dtype, max_shard_gb, architecture …

    Raises:
        UserError: the model cannot be written so; nothing is written.
    """
    texts = {"checkpoint": _address(model), "output": os.fspath(output)}
    values = {"to": to} | {key.rstrip("_"): value for key, value in settings.items()}
    given = {key: value for key, value in values.items() if value is not None}
    convert_checkpoint(checked_texts(ConvertRecipe, texts, given))
    return Path(output).expanduser()


def _address(model: Model | Run | str | os.PathLike[str]) -> str:
    """Return the name of what is converted; of a `Model` the address of its own checkpoint."""
    if not isinstance(model, Model):
        return os.fspath(model)
    loaded = model.opened.checkpoint
    if loaded is None:
        raise UserError(f"convert: {model.name} has no checkpoint; train it, or name a run")
    return address_of(loaded.checkpoint.storage, loaded.folder)

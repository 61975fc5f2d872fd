"""Detection of LLM Foundry and MCLI files, and of the script that a file is for."""

from __future__ import annotations

from typing import Any

_PLATFORM = ("image", "integrations", "compute", "command")
_ONLY_THEIRS = (
    "train_loader",
    "eval_loader",
    "scheduler",
    "algorithms",
    "fsdp_config",
    "loggers",
    "icl_tasks",
    "variables",
)


def is_mcli(values: dict[str, Any]) -> bool:
    """Return whether a file is for MCLI, the command line of the MosaicML platform."""
    return sum(key in values for key in _PLATFORM) > 1


def kind_of(values: dict[str, Any]) -> str | None:
    """Return "train", "finetune", "eval" or "gauntlet"; None for an unknown kind of file."""
    if "train_loader" in values:
        model = values.get("model")
        section = model if isinstance(model, dict) else {}
        begins_trained = section.get("pretrained", True) is not False
        return "finetune" if section.get("name") != "mpt_causal_lm" and begins_trained else "train"
    models = values.get("models")
    if isinstance(models, list) and any(isinstance(model, dict) for model in models):
        return "eval"
    if values and {*values} <= {"icl_tasks", "eval_gauntlet"}:
        return "gauntlet"
    return "eval" if "icl_tasks" in values and "model" in values else None


def is_foreign(values: dict[str, Any]) -> bool:
    """Return whether a file is an LLM Foundry file, not a recipe that uses one of its keys."""
    if is_mcli(values):
        return True
    known = sum(key in values for key in _ONLY_THEIRS)
    return kind_of(values) is not None and (known > 1 or "models" in values)


def file_hint(values: dict[str, Any]) -> str | None:
    """Return advice on an LLM Foundry file; None for other files. {file} stands for its path."""
    if not is_foreign(values):
        return None
    return "is LLM Foundry's; write `python scripts/migrate.py {file}`, which makes a recipe of it"

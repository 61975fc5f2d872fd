"""Whose file it is, and what kind: `front/load.py` and `migration/read.py` ask."""

from __future__ import annotations

from typing import Any

FOUNDRY, AXOLOTL = "LLM Foundry", "axolotl"
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
    """Whether a file is for MCLI, the command line of the MosaicML platform."""
    return sum(key in values for key in _PLATFORM) > 1


def tool_of(values: dict[str, Any]) -> str:
    """The tool that a file is for, if it is for one."""
    return AXOLOTL if "base_model" in values and "train_loader" not in values else FOUNDRY


def kind_of(values: dict[str, Any]) -> str | None:
    """train, finetune, eval or gauntlet; None: no file of LLM Foundry's that is known."""
    if tool_of(values) == AXOLOTL:
        return "finetune"
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
    """Whether a file is another tool's as a whole, and not ours with a word of it."""
    if is_mcli(values) or (tool_of(values) == AXOLOTL and "datasets" in values):
        return True
    known = sum(key in values for key in _ONLY_THEIRS)
    return kind_of(values) is not None and (known > 1 or "models" in values)

"""LLM Foundry's scripts, as a shell calls them, and ours: what an MCLI file's `command` does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

_CALL = re.compile(r"(\w+)\.py$")
MOUNTED = "/mnt/config/parameters.yaml"
"""Where MCLI puts a file's own `parameters`."""


def calls(command: str) -> list[tuple[str, list[str]]]:
    """The scripts that a command starts, and their arguments.

    A shell's line that is not balanced is taken word by word.
    """
    found = []
    for line in command.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        at = next((i for i, word in enumerate(words) if _CALL.search(word)), None)
        if at is not None:
            match = _CALL.search(words[at])
            assert match is not None
            found.append((match[1], words[at + 1 :]))
    return found


def commands_of(command: str) -> str:
    """What to write here in place of a command."""
    said = [_OURS[name](_flags(words)) for name, words in calls(command) if name in _OURS]
    here = ", then ".join(f"`{line}`" for line in said)
    return f"here {here}" if here else "starts nothing of LLM Foundry's that is here"


def _flags(words: list[str]) -> dict[str, str]:
    """`--name value` pairs."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-")
        elif name:
            flags.setdefault(name, word)
    return flags


def _prepared(flags: dict[str, str]) -> str:
    keys = {"dataset": "data.dataset", "data_subset": "data.subset", "out_root": "prepare.output"}
    words = [f"{ours}={flags[theirs]}" for theirs, ours in keys.items() if theirs in flags]
    tokenizer = flags.get("tokenizer")
    words += ["tokenizer=huggingface", f"tokenizer.path={tokenizer}"] if tokenizer else []
    words += [f"max_seq_len={flags['concat_tokens']}"] if "concat_tokens" in flags else []
    return shlex.join(["python", "scripts/prepare_data.py", "data=huggingface", *words])


def _drawn(flags: dict[str, str]) -> str:
    keys = ("temperature", "top_p", "top_k", "seed", "max_new_tokens")
    words = [f"{key}={flags[key]}" for key in keys if key in flags]
    prompt = [f"prompt={flags['prompts']}"] if "prompts" in flags else []
    run = flags.get("name_or_path", "RUN")
    return shlex.join(["python", "scripts/generate.py", run, *words, *prompt])


_OURS: dict[str, Callable[[dict[str, str]], str]] = {
    "train": lambda flags: "python scripts/train.py RESULT",
    "eval": lambda flags: "python scripts/eval.py RESULT",
    "convert_dataset_hf": _prepared,
    "convert_composer_to_hf": lambda flags: "python scripts/convert.py RUN to=hf output=FOLDER",
    "hf_generate": _drawn,
    "hf_chat": lambda flags: "python scripts/chat.py RUN",
    "benchmark": lambda flags: "python scripts/generate.py RUN",
}

"""Published sets of supervised rows, each brought to a format of ours; LLM Foundry's, and ShareGPT.

Called by `reader`. Where LLM Foundry registers a function for a set, prompts and answers are cut
where it cuts them, down to the line break, so that a run there can be repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmfoundry.data.supervised.bad_rows import NotOfFormat
from llmfoundry.data.supervised.messages import from_json

Row = Mapping[str, Any]

_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def _alpaca(row: Row) -> dict[str, Any]:
    """tatsu-lab/alpaca: instruction, input, output, or the text of all three."""
    if "instruction" not in row and "text" in row:
        parts = _text(row, "text").split("### Response:")
        if len(parts) != 2:
            raise ValueError(f"text has {len(parts) - 1} times '### Response:', not once")
        return {"prompt": f"{parts[0]}### Response:", "response": parts[1]}
    instruction, given = _text(row, "instruction"), _text_if_any(row, "input")
    form = _ALPACA_INPUT if given else _ALPACA
    prompt = form.format(instruction=instruction, input=given)
    return {"prompt": prompt, "response": "\n" + _text(row, "output")}


def _dolly(row: Row) -> dict[str, Any]:
    """databricks_dolly_15k, of HuggingFaceH4 (input, output) or Databricks (context, response)."""
    theirs = ("context", "response") if "response" in row else ("input", "output")
    instruction, given = _text(row, "instruction"), _text_if_any(row, theirs[0])
    whole = f"{instruction}\n{given}" if given else instruction
    prompt = _ALPACA.format(instruction=whole) + "\n"
    return {"prompt": prompt, "response": _text(row, theirs[1])}


def _inputs_targets(row: Row) -> dict[str, Any]:
    """P3 and FLAN as Muennighoff publishes them: a space between, unless there is white space."""
    names = ("inputs", "targets")
    if "inputs_pretokenized" in row:
        names = ("inputs_pretokenized", "targets_pretokenized")
    prompt, response = (_text(row, name) for name in names)
    space = (" ", "\n", "\t")
    if not (prompt.endswith(space) or response.startswith(space)):
        response = " " + response
    return {"prompt": prompt, "response": response}


def _sharegpt(row: Row) -> dict[str, Any]:
    """Conversations of {from, value}; OpenHermes too."""
    turns = from_json(_column(row, "conversations"))
    if not isinstance(turns, list):
        raise ValueError("conversations is not a list")
    messages = []
    for n, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise ValueError(f"conversations[{n}] lacks from or value")
        role = turn["from"]
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        message = {"role": role, "content": turn["value"]}
        more = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
        messages.append(message | more)
    return {"messages": messages, **{k: row.get(k) for k in ("tools", "chat_template_kwargs")}}


def _stackmathqa(row: Row) -> dict[str, Any]:
    """math-ai/StackMathQA: Q and A."""
    question, answer = _text(row, "Q"), _text(row, "A")
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _numina(row: Row) -> dict[str, Any]:
    """AI-MO/NuminaMath-CoT: messages beside a problem and its solution."""
    return {"messages": _column(row, "messages")}


PUBLISHED: dict[str, Callable[[Row], dict[str, Any]]] = {
    "alpaca": _alpaca,
    "dolly": _dolly,
    "p3": _inputs_targets,
    "flan": _inputs_targets,
    "openhermes": _sharegpt,
    "sharegpt": _sharegpt,
    "stackmathqa": _stackmathqa,
    "numina": _numina,
}
"""By the names of `recipe.source.MAPPINGS`, which names the format and its columns."""


def _column(row: Row, name: str) -> Any:
    if row.get(name) is None:
        no = f"no column {name!r}"
        raise NotOfFormat(f"{no}; it has {', '.join(row) or 'none'}", no)
    return row[name]


def _text_if_any(row: Row, name: str) -> str:
    return "" if row.get(name) is None else _text(row, name)


def _text(row: Row, name: str) -> str:
    value = _column(row, name)
    if not isinstance(value, str):
        raise ValueError(f"{name} holds a {type(value).__name__}, not text")
    return value

"""`instruction_rows`: generated chats with exact answers, as supervised rows of three formats.

The source `data.name: instructions` reads them, and the gauntlet draws exchanges for its tasks. The
idea: a row is a pure function of task, seed, split and number, and its split is decided by a hash
of what is asked. So no question of the splits `held_out` and `lengths` is ever in `train`, whatever
the seeds. A task is a function that draws an `Exchange`; those on lists also take the numbers of
items that a list may have. The world of the task `world` is the same for every seed, so that what
was learned in one set is asked in another: 24 lands with five facts each, which no text elsewhere
has. Most tasks have one right answer; what `constraints` asks for, as IFEval does (Zhou et al.,
2023), many texts fulfil, and its answer is one of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest

HELD_OUT = 0.1
"""Share of all questions that are never in training."""
SPLITS = ("train", "held_out", "lengths")
"""train; held_out: other questions of the same kind; lengths: lists of a length never trained."""
FORMATS = ("chat", "preference", "unpaired")

Message = dict[str, Any]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
WORDS = (
    *("block", "box", "class", "code", "color", "day", "end", "error", "field", "file"),
    *("group", "hour", "image", "item", "key", "line", "link", "list", "map", "month"),
    *("name", "page", "path", "point", "root", "state", "table", "text", "tree", "year"),
)
"""Short and common: most tokenizers have a token for each."""
LENGTHS = (3, 4, 5, 7, 8)
"""Items of the lists that training sees."""
UNSEEN_LENGTHS = (6,)
"""And of those that it never sees."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_FACTS = ("capital", "river", "coin", "ruler", "drink")
_N_LANDS = 24
_QUESTIONS = (
    "What is the {fact} of {land}?",
    "Name the {fact} of {land}.",
    "{land}: which {fact}?",
    "The {fact} of {land}?",
    "Tell me the {fact} of {land}.",
    "Do you know the {fact} of {land}?",
)
_STARTS = ("Ba", "Do", "Fe", "Gu", "Ka", "Lo", "Mi", "Na", "Po", "Ri", "Su", "Ta", "Ve", "Zo")
_ENDS = ("bar", "den", "fin", "gol", "lan", "mor", "nis", "pel", "rad", "sto", "tin", "vek")
_FORMS = {" in one line": (" ", ""), " in lines": ("\n", ""), " as a list": ("\n- ", "- ")}
"""What stands between the words, and before the first."""
_PLACES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Tokyo", "Accra")
_FUNCTIONS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "weather": ({"place": "string"}, ("What is the weather in {place}?",)),
    "clock": ({"place": "string"}, ("What time is it in {place}?",)),
    "find": ({"word": "string"}, ("Find the {word}.", "Where is the {word}?")),
    "buy": ({"word": "string", "n": "integer"}, ("Buy {n} of {word}.",)),
    "alarm": ({"hour": "integer"}, ("Wake me at {hour}.", "Set an alarm for {hour}.")),
}
"""Each function's parameters with their types, and ways to ask for it."""
_OPENINGS = ("Sure!", "Good question.", "Let me see.", "Of course, I can do that.")
_CLOSINGS = ("I hope that this helps.", "Is there anything else?", "That is the answer, I think.")


@dataclass(frozen=True)
class Exchange:
    """A conversation up to its last question, and how to answer it.

    Attributes:
        messages: role and content of each turn, the last of which is the user's.
        answer: the right answer's content; empty where it is a call of a tool.
        wrong: a wrong answer's content.
        checks: what makes an answer right, each for `checks.is_right`.
        call: the right call of a tool, {"name": …, "arguments": {…}}.
        wrong_call: a wrong one.
        tools: schemas of the functions that may be called.
    """

    messages: tuple[Message, ...]
    answer: str
    wrong: str
    checks: tuple[Mapping[str, Any], ...]
    call: Mapping[str, Any] | None = None
    wrong_call: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


def ask(question: str, answer: str, wrong: str, *checks: Mapping[str, Any]) -> Exchange:
    """One question and its answer, which is right as it stands unless `checks` say otherwise."""
    needed = checks or ({"check": "exact", "text": answer},)
    return Exchange(({"role": "user", "content": question},), answer, wrong, needed)


def shuffled(rng: random.Random, items: Sequence[str]) -> list[str]:
    """The items in another order than theirs."""
    result = list(items)
    while result == list(items):
        rng.shuffle(result)
    return result


def another(rng: random.Random, value: int, low: int, high: int) -> int:
    """A number from low to high that is not `value`."""
    return rng.choice([n for n in range(low, high + 1) if n != value])


def reverse(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`Reverse: d a c` → c a d."""
    items = rng.sample(LETTERS, rng.choice(lengths))
    answer = items[::-1]
    return ask(f"Reverse: {' '.join(items)}", *_right_and_wrong(rng, answer))


def sort(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`Sort: d a c` → a c d."""
    items = rng.sample(LETTERS, rng.choice(lengths))
    return ask(f"Sort: {' '.join(items)}", *_right_and_wrong(rng, sorted(items)))


def largest(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`Largest number: 52 7 31` → 52."""
    numbers = rng.sample(range(100), rng.choice(lengths))
    top = max(numbers)
    wrong = rng.choice([n for n in numbers if n != top])
    return ask(f"Largest number: {' '.join(map(str, numbers))}", str(top), str(wrong))


def word_count(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`How many words: key moon key` → 3."""
    words = rng.choices(WORDS, k=rng.choice(lengths))
    n = len(words)
    return ask(f"How many words: {' '.join(words)}", str(n), str(another(rng, n, 2, 9)))


def nth(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`The second word: key moon door` → moon."""
    words = rng.sample(WORDS, rng.choice(lengths))
    place = rng.randrange(len(words))
    wrong = rng.choice([word for word in words if word != words[place]])
    return ask(f"The {_ORDINALS[place]} word: {' '.join(words)}", words[place], wrong)


def _right_and_wrong(rng: random.Random, items: Sequence[str]) -> tuple[str, str]:
    return " ".join(items), " ".join(shuffled(rng, items))


def recall(rng: random.Random) -> Exchange:
    """`key is 41, moon is 7` from the system; `key?` → 41; `and moon?` → 7."""
    words = rng.sample(WORDS, rng.randint(3, 6))
    values = rng.sample(range(10, 100), len(words))
    given = dict(zip(words, values, strict=True))
    *before, last = rng.sample(words, rng.randint(1, 3))
    facts = ", ".join(f"{word} is {value}" for word, value in given.items())
    messages = [{"role": "system", "content": f"Remember: {facts}."}]
    for i, word in enumerate(before):
        messages.append({"role": "user", "content": _asked(word, i)})
        messages.append({"role": "assistant", "content": str(given[word])})
    messages.append({"role": "user", "content": _asked(last, len(before))})
    wrong = rng.choice([value for word, value in given.items() if word != last])
    answer = str(given[last])
    return Exchange(tuple(messages), answer, str(wrong), ({"check": "exact", "text": answer},))


def world(rng: random.Random) -> Exchange:
    """`What is the capital of Zolan?` → Kamor; in one of six ways to ask."""
    table = world_facts()
    land, fact = rng.choice(sorted(table))
    wrong = rng.choice(sorted({value for key, value in table.items() if key[1] == fact}))
    while wrong == table[land, fact]:
        wrong = rng.choice(sorted(table.values()))
    question = rng.choice(_QUESTIONS).format(fact=fact, land=land)
    return ask(question, table[land, fact], wrong)


@cache
def world_facts() -> dict[tuple[str, str], str]:
    """By land and kind of fact; no two names are equal."""
    rng = random.Random("the world of the generated instructions")
    names = [start + end for start in _STARTS for end in _ENDS]
    rng.shuffle(names)
    lands = [names.pop() for _ in range(_N_LANDS)]
    return {(land, fact): names.pop() for land in lands for fact in _FACTS}


def _asked(word: str, turn: int) -> str:
    return f"and {word}?" if turn else f"{word}?"


def two_digit_sum(rng: random.Random) -> Exchange:
    """`47 + 25` → `7 + 5 = 12, 4 + 2 + 1 = 7 #### 72`; numbers below 100."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    right = {"check": "final_number", "value": a + b}
    wrong = another(rng, a + b, max(0, a + b - 10), a + b + 10)
    return ask(f"{a} + {b}", f"{_steps(a, b)} #### {a + b}", f"{_steps(a, b)} #### {wrong}", right)


def _steps(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    tens, carried = a // 10 + b // 10, ones // 10
    first = f"{a % 10} + {b % 10} = {ones}"
    second = f"{a // 10} + {b // 10}" + (" + 1" if carried else "") + f" = {tens + carried}"
    return f"{first}, {second}"


def json_object(rng: random.Random) -> Exchange:
    """`JSON: key 4, moon 17` → {"key": 4, "moon": 17}."""
    keys = rng.sample(WORDS, rng.randint(1, 4))
    values = rng.sample(range(100), len(keys))
    content = dict(zip(keys, values, strict=True))
    listed = ", ".join(f"{key} {value}" for key, value in content.items())
    wrong = json.dumps(content | {keys[-1]: another(rng, values[-1], 0, 99)})
    if rng.random() < 0.5:
        wrong = listed
    return ask(f"JSON: {listed}", json.dumps(content), wrong, {"check": "json", "value": content})


def upper(rng: random.Random) -> Exchange:
    """`Upper case: key moon` → KEY MOON."""
    text = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    wrong = text if rng.random() < 0.5 else text.capitalize()
    return ask(f"Upper case: {text}", text.upper(), wrong)


def repeat(rng: random.Random) -> Exchange:
    """`Say key moon 3 times` → key moon key moon key moon."""
    words, n = rng.sample(WORDS, rng.randint(1, 2)), rng.randint(2, 5)
    text = " ".join(words)
    wrong = " ".join([text] * another(rng, n, 1, 6))
    return ask(f"Say {text} {n} times", " ".join([text] * n), wrong)


def constraints(rng: random.Random) -> Exchange:
    """`Write 3 words in upper case with the word key and without the word moon.`."""
    n = rng.randint(2, 6)
    wanted, banned, *others = rng.sample(WORDS, len(WORDS))
    checks: list[Mapping[str, Any]] = [
        {"check": "words", "n": n},
        {"check": "has", "text": wanted},
    ]
    words = [wanted, *others[: n - 1]]
    required = f"with the word {wanted}"
    if rng.random() < 0.5:
        checks.append({"check": "lacks", "text": banned})
        required += f" and without the word {banned}"
    casing = rng.choice(("", " in upper case", " in lower case"))
    form = rng.choice((" in one line", " in lines", " as a list"))
    join, start = _FORMS[form]
    checks.append({"check": "lines", "n": 1 if form == " in one line" else n})
    if casing:
        checks.append({"check": casing.split()[1]})
    if form == " as a list":
        checks[0] = {"check": "bullets", "n": n}
    text = start + join.join(words)
    text = text.upper() if casing == " in upper case" else text
    question = f"Write {n} words{casing}{form} {required}."
    return ask(question, text, _broken(rng, text, join), *checks)


def _broken(rng: random.Random, text: str, join: str) -> str:
    """The same with a word too many, or without its first."""
    if rng.random() < 0.5:
        return text + join + rng.choice(WORDS)
    return text.split(join, 1)[-1].removeprefix("- ")


def tool_call(rng: random.Random) -> Exchange:
    """Two or three functions and a question that one of them serves."""
    names = rng.sample(sorted(_FUNCTIONS), rng.randint(2, 3))
    name = rng.choice(names)
    arguments = {key: _value(rng, key) for key in _FUNCTIONS[name][0]}
    question = rng.choice(_FUNCTIONS[name][1]).format(**arguments)
    call = {"name": name, "arguments": arguments}
    other = rng.choice([n for n in names if n != name])
    wrong: dict[str, Any] = {"name": other, "arguments": {}}
    wrong["arguments"] = {key: _value(rng, key) for key in _FUNCTIONS[other][0]}
    if rng.random() < 0.5:
        wrong = {"name": name, "arguments": {key: _not(rng, v) for key, v in arguments.items()}}
    return Exchange(
        ({"role": "user", "content": question},),
        "",
        "",
        ({"check": "call", "value": call},),
        call=call,
        wrong_call=wrong,
        tools=tuple(schema(n) for n in names),
    )


def schema(name: str) -> Mapping[str, Any]:
    """A function as models are shown it."""
    parameters, _ = _FUNCTIONS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    described = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": described}}


def _value(rng: random.Random, key: str) -> Any:
    if key == "place":
        return rng.choice(_PLACES)
    if key == "word":
        return rng.choice(WORDS)
    return rng.randint(1, 12)


def _not(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int):
        return another(rng, value, 1, 12)
    pool = _PLACES if value in _PLACES else WORDS
    return rng.choice([other for other in pool if other != value])


LIST_TASKS: dict[str, Callable[[random.Random, Sequence[int]], Exchange]] = {
    "reverse": reverse,
    "sort": sort,
    "largest": largest,
    "count": word_count,
    "nth": nth,
}
OTHER_TASKS: dict[str, Callable[[random.Random], Exchange]] = {
    "recall": recall,
    "arithmetic": two_digit_sum,
    "json": json_object,
    "upper": upper,
    "repeat": repeat,
    "constraints": constraints,
    "tool_call": tool_call,
    "world": world,
}
TASKS = (*LIST_TASKS, *OTHER_TASKS)


def instruction_rows(
    tasks: Sequence[str],
    n: int,
    *,
    seed: int,
    format: str = "chat",
    split: str = "train",
    key: str = "data.",
) -> Iterator[dict[str, Any]]:
    """Rows of the tasks, interleaved.

    Args:
        tasks: names in `TASKS`; none: all.
        n: number of rows; equal ones may be among them where a task has few questions.
        seed: decides every draw.
        format: chat gives {"messages"}; preference {"prompt", "chosen", "rejected"}, the latter
            wrong or rambling; unpaired {"prompt", "completion", "label"}, every other one right.
            Where tools may be called, also {"tools"}.
        split: train, held_out or lengths; the latter has only tasks on lists.
        key: what begins the line of an error.
    """
    names = check_tasks(tasks, split=split, key=key)
    if format not in FORMATS:
        raise UserError(
            f"{key}format: {format}{nearest(format, FORMATS)}; instructions are"
            f" {', '.join(FORMATS)}"
        )
    for number in range(n):
        yield instruction_row(
            names[number % len(names)], number // len(names), seed=seed, format=format, split=split
        )


def check_tasks(tasks: Sequence[str], *, split: str = "train", key: str = "data.") -> list[str]:
    """The tasks' names, or those of all; see `instruction_rows` for what is raised."""
    if split not in SPLITS:
        raise UserError(f"{key}split: {split}{nearest(split, SPLITS)}; write {', '.join(SPLITS)}")
    known = tuple(LIST_TASKS) if split == "lengths" else TASKS
    wrong = [
        f"{key}tasks: {name!r} is not a task{nearest(str(name), known)} ({', '.join(known)})"
        for name in tasks
        if name not in known
    ]
    wrong += [f"{key}tasks: {name!r} is there twice; write it once" for name in _repeated(tasks)]
    if wrong:
        raise UserError(*wrong)
    return list(tasks) or list(known)


def instruction_row(
    task: str, number: int, *, seed: int, format: str, split: str = "train"
) -> dict[str, Any]:
    """Row `number` of a task."""
    exchange = draw_exchange(task, number, seed=seed, split=split)
    row = _WRITERS[format](exchange, number, random.Random(f"answers {task} {seed} {number}"))
    if exchange.tools:
        row["tools"] = [dict(tool) for tool in exchange.tools]
    return row


def draw_exchange(task: str, number: int, *, seed: int, split: str = "train") -> Exchange:
    """Exchange `number` of a task; the first of its draws that is of the split."""
    attempt = 0
    while True:
        rng = random.Random(f"{task} {seed} {split} {number} {attempt}")
        if task in LIST_TASKS:
            exchange = LIST_TASKS[task](rng, UNSEEN_LENGTHS if split == "lengths" else LENGTHS)
        else:
            exchange = OTHER_TASKS[task](rng)
        if split == "lengths" or is_held_out(exchange) == (split == "held_out"):
            return exchange
        attempt += 1


def is_held_out(exchange: Exchange) -> bool:
    """Whether training never asks this; decided by all that is asked, and by nothing else."""
    asked = json.dumps([exchange.messages, exchange.tools], sort_keys=True)
    digest = hashlib.blake2b(asked.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT * 2**64


def right_message(exchange: Exchange) -> Message:
    """The assistant's right answer."""
    return _message(exchange.answer, exchange.call)


def _chat(exchange: Exchange, number: int, rng: random.Random) -> dict[str, Any]:
    return {"messages": [*_copies(exchange.messages), right_message(exchange)]}


def _preference(exchange: Exchange, number: int, rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": _copies(exchange.messages),
        "chosen": [right_message(exchange)],
        "rejected": [_worse(exchange, rng)],
    }


def _unpaired(exchange: Exchange, number: int, rng: random.Random) -> dict[str, Any]:
    label = number % 2 == 0
    answer = right_message(exchange) if label else _worse(exchange, rng)
    return {"prompt": _copies(exchange.messages), "completion": [answer], "label": label}


_WRITERS = {"chat": _chat, "preference": _preference, "unpaired": _unpaired}


def _worse(exchange: Exchange, rng: random.Random) -> Message:
    """A wrong answer, or as often the right one inside of talk that nobody asked for."""
    if rng.random() < 0.5 or exchange.call is not None:
        return _message(exchange.wrong, exchange.wrong_call)
    talk = (rng.choice(_OPENINGS), exchange.answer, rng.choice(_CLOSINGS))
    return _message(" ".join(talk), None)


def _message(content: str, call: Mapping[str, Any] | None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if call is not None:
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    return message


def _copies(messages: Sequence[Message]) -> list[Message]:
    return [dict(message) for message in messages]


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if list(names).count(name) > 1]

"""Reader of gauntlet files: tasks and categories, checked before training starts.

Entry point: `read_gauntlet`; `Gauntlet` calls it. The format is LLM Foundry's: `icl_tasks` and
`eval_gauntlet` are each a section or the path of a file with that key; both may be in one file. The
key `definitions` is an extension: it names files with task definitions (without num_fewshot) that
entries of icl_tasks extend, so that several gauntlets share the definition of a benchmark. Keys and
types of LLM Foundry that have no effect here are translated and reported.
"""

from __future__ import annotations

import glob
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskConfig
from llmfoundry.gauntlet.task_types import TASK_TYPES, type_of
from llmfoundry.recipe import yaml_file
from llmfoundry.recipe.checks import at_least, fraction, nearest, one_of
from llmfoundry.recipe.paths import find_shipped
from llmfoundry.recipe.schema import Schema, item_of, leaves
from llmfoundry.recipe.typed import Problem, build

WEIGHTINGS = ("EQUAL", "SAMPLE_SZ", "LOG_SAMPLE_SZ")
BASELINES = ("file", "chance", "majority")
CHOICE_BY = ("token", "sum", "char", "byte")

# What a file may hold at its top.
_KEYS = ("icl_tasks", "eval_gauntlet", "definitions")

# Fields of TaskConfig that only some tasks have a use for.
_GENERATION_ONLY = (
    "cot_delimiter",
    "early_stopping_criteria",
    "do_normalization",
    "max_new_tokens",
)
_HUB_ONLY = ("hf_loading_vars", "hf_parsing_map")


@dataclass(frozen=True)
class BenchmarkConfig:
    """A member of a category: a task with one number of few-shot examples."""

    name: str
    num_fewshot: int
    random_baseline: float | None = None
    """Accuracy of guessing, 0.25 for one of four; unset: computed from the rows."""


@dataclass(frozen=True)
class CategoryConfig:
    """A named mean of benchmarks."""

    name: str
    benchmarks: list[BenchmarkConfig]


@dataclass(frozen=True)
class EvalGauntlet:
    """How accuracies become categories and averages."""

    categories: list[CategoryConfig] = field(default_factory=list)
    weighting: str = "EQUAL"
    """Weight of a benchmark in its category: EQUAL 1, SAMPLE_SZ n, LOG_SAMPLE_SZ log2 n."""
    subtract_random_baseline: bool = True
    """Subtract the baseline, so that guessing scores 0."""
    rescale_accuracy: bool = True
    """Divide by 1 - baseline, so that a perfect answer scores 1 after the subtraction."""
    averages: dict[str, list[str]] = field(default_factory=dict)
    """Categories of each average, by name; unset: one average of all categories."""
    baseline: str = "file"
    """Baseline to subtract. file: the benchmark's random_baseline, or chance if unset, as in LLM
    Foundry; chance: accuracy of guessing among the options of the rows; majority: accuracy of the
    best constant answer."""


@dataclass(frozen=True)
class GauntletFile:
    """Checked content of a gauntlet file. No rows have been read yet.

    Attributes:
        path: the file with icl_tasks; relative paths of rows are resolved from its folder.
        tasks: tasks in the order of the file.
        gauntlet: categories and averages; empty if the file has none.
        notes: lines about keys that have no effect here.
    """

    path: Path
    tasks: list[TaskConfig]
    gauntlet: EvalGauntlet
    notes: list[str] = field(default_factory=list)


def read_gauntlet(path: Path) -> GauntletFile:
    """Read and check a gauntlet file.

    Raises:
        UserError: every unknown key, wrong value and missing file, with its location.
    """
    path = find(str(path), beside=Path("."), key="eval.gauntlet")
    top = yaml_file.read_yaml(path)
    problems = [
        f"{path}: unknown key '{key}'{nearest(key, _KEYS)} (keys: {', '.join(_KEYS)})"
        for key in top
        if key not in _KEYS
    ]
    notes: dict[str, list[str]] = {}
    task_path, task_top = _follow(path, top, "icl_tasks")
    defined = _read_definitions({path: top, task_path: task_top}, notes)
    where = f"{task_path}: icl_tasks"
    tasks = _read_tasks(task_top.get("icl_tasks"), where, defined, problems, notes)
    gauntlet_path, gauntlet_top = _follow(path, top, "eval_gauntlet")
    gauntlet = EvalGauntlet()
    if gauntlet_top.get("eval_gauntlet") is not None:
        where = f"{gauntlet_path}: eval_gauntlet"
        section = read_section(EvalGauntlet, gauntlet_top["eval_gauntlet"], where, problems)
        gauntlet = section or gauntlet
        problems.extend(_check_gauntlet(gauntlet, f"{where}: "))
    if problems:
        raise UserError(*problems)
    return GauntletFile(task_path, tasks, gauntlet, list(_note_lines(task_path, tasks, notes)))


def _follow(path: Path, top: Mapping[str, Any], key: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the path and content of the file with the section `key`.

    It is this file, or the file whose path is the value of `key`.

    Raises:
        UserError: the other file has no section `key`.
    """
    name = top.get(key)
    if not isinstance(name, str):
        return path, top
    other = find(name, beside=path, key=f"{path}: {key}")
    content = yaml_file.read_yaml(other)
    if content.get(key) is None or isinstance(content[key], str):
        hint = nearest(key, content)
        raise UserError(f"{path}: {key}: {name} has no key {key} with something below it{hint}")
    return other, content


def _read_definitions(
    files: Mapping[Path, Mapping[str, Any]], notes: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return the task definitions of all files that `definitions` lists, by label.

    A definition file has the key `tasks`: a list of entries as in icl_tasks, but without
    num_fewshot. An entry of icl_tasks with the same label extends the definition.

    Args:
        files: contents of gauntlet files by path; usually one.
        notes: as in `translate`.

    Raises:
        UserError: every mistake in them.
    """
    defined: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for path, content in files.items():
        names = content.get("definitions") or []
        for name in names if isinstance(names, list) else [names]:
            source = find(str(name), beside=path, key=f"{path}: definitions")
            entries = yaml_file.read_yaml(source).get("tasks")
            if not isinstance(entries, list) or not entries:
                problems.append(f"{source}: tasks: is missing or empty; write a list of tasks")
                continue
            for i, entry in enumerate(entries):
                where = place_in_list(f"{source}: tasks", i, entry)
                task = _defined(entry, where, problems, notes)
                _anchor(task, source)
                label = str(task.get("label"))
                if label in defined:
                    problems.append(f"{where}: label: is defined before; remove one")
                defined[label] = task
    if problems:
        raise UserError(*problems)
    return defined


def _defined(
    raw: Any, where: str, problems: list[str], notes: dict[str, list[str]]
) -> dict[str, Any]:
    """Translate and check one definition."""
    entry = translate(raw, where, problems, notes) if isinstance(raw, Mapping) else {}
    if "num_fewshot" in entry:
        problems.append(f"{where}: num_fewshot: is the gauntlet's choice; write it in icl_tasks")
    read_section(TaskConfig, {**entry, "num_fewshot": [0]} if entry else raw, where, problems)
    return entry


def _anchor(entry: dict[str, Any], source: Path) -> None:
    """Resolve dataset_uri from the folder of the definition file, if its rows exist there."""
    uri = entry.get("dataset_uri")
    if isinstance(uri, str) and "://" not in uri:
        beside = str(source.parent / uri)
        if Path(beside).exists() or glob.glob(beside):
            entry["dataset_uri"] = beside


def _read_tasks(
    raw: Any,
    where: str,
    defined: Mapping[str, dict[str, Any]],
    problems: list[str],
    notes: dict[str, list[str]],
) -> list[TaskConfig]:
    """Read the valid entries of icl_tasks, each merged over the definition with its label."""
    if not isinstance(raw, list) or not raw:
        problems.append(f"{where}: is missing or empty; write a list of tasks")
        return []
    tasks = []
    for i, entry in enumerate(raw):
        at = place_in_list(where, i, entry)
        if isinstance(entry, Mapping):
            entry = translate(entry, at, problems, notes)
            base = defined.get(str(entry.get("label")), {})
            if defined and not base and "dataset_uri" not in entry:
                hint = nearest(str(entry.get("label")), defined)
                problems.append(f"{at}: label: is not among the definitions{hint}")
            entry = {**base, **entry}
        task = read_section(TaskConfig, entry, at, problems)
        if task is not None:
            problems.extend(_check_task(task, f"{at}: "))
            tasks.append(task)
    pairs = [f"{task.label}, {shots}-shot" for task in tasks for shots in set(task.num_fewshot)]
    problems.extend(_check_repeats(pairs, f"{where}: label"))
    return tasks


def _check_task(task: TaskConfig, where: str) -> Iterator[str]:
    kind = task.icl_task_type
    of_harness = task.dataset_uri.startswith(f"{HARNESS}:")
    yield from one_of(f"{where}icl_task_type", kind, [HARNESS] if of_harness else TASK_TYPES)
    if not task.num_fewshot:
        yield f"{where}num_fewshot: is empty; write a list of one or more whole numbers"
    for shots in task.num_fewshot:
        yield from at_least(f"{where}num_fewshot", shots, 0)
    yield from _check_repeats(task.num_fewshot, f"{where}num_fewshot")
    if "/" in task.label or not task.label:
        yield f"{where}label: {task.label!r} cannot name a metric; write a name without '/'"
    yield from at_least(f"{where}max_seq_len", task.max_seq_len, 1)
    yield from at_least(f"{where}max_new_tokens", task.max_new_tokens, 1)
    yield from one_of(f"{where}choice_by", task.choice_by, CHOICE_BY)
    if "" in task.early_stopping_criteria:
        yield f"{where}early_stopping_criteria: '' ends every answer at once; remove it"
    if kind in TASK_TYPES:
        yield from _check_metrics(task, where)
    if kind in TASK_TYPES or of_harness:
        yield from _check_no_effect(task, where)


def _check_metrics(task: TaskConfig, where: str) -> Iterator[str]:
    primary, calibration = type_of(task).metric, type_of(task).calibration
    known = [primary] if calibration is None else [primary, calibration]
    for name in task.metric_names:
        yield from one_of(f"{where}metric_names", name, known)
    if task.metric_names and primary not in task.metric_names:
        yield f"{where}metric_names: has no {primary}, which scores are made of; add it"


def _check_no_effect(task: TaskConfig, where: str) -> Iterator[str]:
    """Yield a line for each field that was set but has no effect in this task."""
    defaults = TaskConfig(task.label, task.dataset_uri, task.icl_task_type, task.num_fewshot)
    changed = {f.name for f in fields(task) if getattr(task, f.name) != getattr(defaults, f.name)}
    kind, unused = task.icl_task_type, []
    if kind == HARNESS:
        unused += [(key, "on a task of the harness, which has its own") for key in sorted(changed)]
    else:
        if not type_of(task).generates:
            unused += [(key, f"in {kind}") for key in _GENERATION_ONLY]
        if not type_of(task).chooses:
            unused += [("choice_by", f"in {kind}")]
        if not task.dataset_uri.startswith("hf://"):
            unused += [(key, "without dataset_uri: hf://...") for key in _HUB_ONLY]
    for key, why in unused:
        if key in changed:
            yield f"{where}{key}: has no effect {why}; remove it"
    if task.dataset_uri.startswith("heldout://") and task.has_categories:
        yield f"{where}has_categories: pieces of held-out text have none; remove it"


def _check_gauntlet(gauntlet: EvalGauntlet, where: str) -> Iterator[str]:
    yield from one_of(f"{where}weighting", gauntlet.weighting, WEIGHTINGS)
    yield from one_of(f"{where}baseline", gauntlet.baseline, BASELINES)
    if gauntlet.rescale_accuracy and not gauntlet.subtract_random_baseline:
        yield (
            f"{where}rescale_accuracy: true needs subtract_random_baseline: true;"
            " set both or neither"
        )
    if gauntlet.baseline != "file" and not gauntlet.subtract_random_baseline:
        yield f"{where}baseline: has no effect without subtract_random_baseline: true; remove it"
    names = [category.name for category in gauntlet.categories]
    yield from _check_repeats([*names, "average"], f"{where}categories: name")
    for category in gauntlet.categories:
        yield from _check_benchmarks(category, f"{where}categories: {category.name}: benchmarks")
    for name, members in gauntlet.averages.items():
        yield from _check_average(name, members, names, f"{where}averages: {name}")


def _check_benchmarks(category: CategoryConfig, where: str) -> Iterator[str]:
    if not category.benchmarks:
        yield f"{where}: is empty; write a list of benchmarks"
    keys = [f"{b.name}, {b.num_fewshot}-shot" for b in category.benchmarks]
    yield from _check_repeats(keys, where)
    for benchmark in category.benchmarks:
        yield from fraction(
            f"{where}: {benchmark.name}: random_baseline", benchmark.random_baseline
        )


def _check_average(name: str, members: list[str], names: list[str], where: str) -> Iterator[str]:
    if name in names:
        yield f"{where}: is the name of a category; write another"
    if not members:
        yield f"{where}: is empty; write a list of categories"
    yield from _check_repeats(members, where)
    for member in members:
        yield from one_of(where, member, names)


def _check_repeats(values: list[Any], where: str) -> Iterator[str]:
    for value in dict.fromkeys(v for v in values if values.count(v) > 1):
        yield f"{where}: {value!r} is there more than once; each must differ"


def _note_lines(
    path: Path, tasks: list[TaskConfig], notes: Mapping[str, list[str]]
) -> Iterator[str]:
    """Yield a line for each note, with the labels of up to three tasks of this gauntlet."""
    used = {task.label for task in tasks}
    for what, labels in notes.items():
        labels = [label for label in dict.fromkeys(labels) if label in used]
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        if labels:
            yield f"{path}: icl_tasks: {what} ({', '.join(labels[:3])}{more})"


T = TypeVar("T")

HARNESS = "lm_eval"
"""Type of tasks whose dataset_uri is lm_eval:NAME, a task of lm-evaluation-harness."""

# Keys of LLM Foundry without a field here, and why they have no effect.
IDLE_KEYS = {
    "batch_size": "batches are made by tokens, and scores do not depend on them",
    "pad_tok_id": "nothing is padded with a token that a model could see",
    "destination_path": "rows are not copied before they are read",
}

OLD_TYPES = {"question_answering": "generation_task_with_answers"}

# generation_kwargs that leave greedy decoding what it is, and their values; None: any value.
_GREEDY: dict[str, tuple[Any, ...] | None] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0, None),
    "temperature": None,  # this and the next two are of sampling
    "top_k": None,
    "top_p": None,
    "use_cache": None,
    "synced_gpus": None,
    "pad_token_id": None,
}


def find(name: str, *, beside: Path, key: str) -> Path:
    """The file `name`: beside the file `beside`, or where `find_shipped` looks.

    Raises:
        UserError: there is none, or it is a folder; the line begins with `key`.
    """
    path = beside.parent / Path(name).expanduser()
    if not path.exists():
        path = find_shipped(name, key)
    if not path.is_file():
        raise UserError(f"{key}: {name} is a folder; write the path of a file")
    return path


def place_in_list(where: str, i: int, entry: Any) -> str:
    """Return how messages name a list entry: its number, and its label or name in brackets."""
    name = entry.get("label", entry.get("name")) if isinstance(entry, Mapping) else None
    return f"{where}[{i}]" + (f" ({name})" if name is not None else "")


def read_section(cls: type[T], raw: Any, where: str, problems: list[str]) -> T | None:
    """A dataclass from its YAML mapping, or None where `problems` grew.

    A key without a value (null) keeps its default, and a list of one needs no brackets.
    """
    if not isinstance(raw, Mapping):
        problems.append(f"{where}: is not a mapping of keys to values")
        return None
    found: list[Problem] = []
    section = build(cls, _written_out(Schema.of(cls), raw), found)
    lines = [_line(Schema.of(cls), problem, raw, where) for problem in found]
    lines += [
        f"{where}: {name}: {text!r} {BROKEN}"
        for key, value in raw.items()
        for name, text in leaves(str(key), value)
        if isinstance(text, str) and is_broken(text)
    ]
    problems += lines
    return None if lines else section


def _written_out(schema: Schema, raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an entry without empty keys, and with single values of list keys as lists."""
    return {
        name: _bracketed(schema.keys[name].hint, value) if name in schema.keys else value
        for name, value in raw.items()
        if value is not None or name not in schema.keys
    }


def _bracketed(hint: Any, value: Any) -> Any:
    kind, inner, item = typing.get_origin(hint), typing.get_args(hint), item_of(hint)
    if item is not None and isinstance(value, list):
        return [_written_out(item, v) if isinstance(v, Mapping) else v for v in value]
    if kind is dict and isinstance(value, Mapping):
        return {name: _bracketed(inner[1], v) for name, v in value.items()}
    return [value] if kind is list and item is None and not isinstance(value, list) else value


def _line(schema: Schema, problem: Problem, raw: Any, where: str) -> str:
    """Return the message with list entries named by `place_in_list`."""
    inside = re.match(r"(\w+)\[(\d+)\]\.", problem.key)
    if inside is not None and problem.key not in raw:
        name, i = inside[1], int(inside[2])
        item, entry = schema.keys[name].item, raw[name][i]
        assert item is not None, f"{name} lists sections"
        inner = problem._replace(key=problem.key[inside.end() :])
        return _line(item, inner, entry, place_in_list(f"{where}: {name}", i, entry))
    keys = f" (keys: {', '.join(schema.keys)})" if problem.is_unknown else ""
    return f"{where}: {problem.line}{keys}"


BROKEN = "holds half a surrogate pair, which is no character; write the character, or remove it"


def is_broken(text: str) -> bool:
    """Return whether a text has a lone surrogate, which JSON and YAML allow and UTF-8 does not."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def translate(
    raw: Mapping[str, Any], where: str, problems: list[str], notes: dict[str, list[str]]
) -> dict[str, Any]:
    """A task's entry in our keys.

    Args:
        raw: the entry as it is written.
        where: location of the entry, for messages.
        problems: receives what cannot be had.
        notes: receives what has no effect or another name here, each with the tasks' labels.
    """
    entry = dict(raw)
    uri = entry.get("dataset_uri")
    if isinstance(uri, str) and uri.startswith(f"{HARNESS}:"):
        named = {"label": uri.removeprefix(f"{HARNESS}:"), "icl_task_type": HARNESS}
        entry = {**named, **entry}
    label = str(entry.get("label"))
    for key, why in IDLE_KEYS.items():
        if key in entry:
            del entry[key]
            notes.setdefault(f"{key}: has no effect: {why}", []).append(label)
    if "prelimiter" in entry:
        if "question_prelimiter" in entry:
            problems.append(f"{where}: prelimiter: is question_prelimiter; remove one of them")
        entry["question_prelimiter"] = entry.pop("prelimiter")
    kind = entry.get("icl_task_type")
    if isinstance(kind, str) and kind in OLD_TYPES:
        entry["icl_task_type"] = OLD_TYPES[kind]
        note = f"icl_task_type: {kind} is read as {OLD_TYPES[kind]}, its name today"
        notes.setdefault(note, []).append(label)
    if "generation_kwargs" in entry:
        kwargs = entry.pop("generation_kwargs") or {}
        _translate_generation(kwargs, entry, f"{where}: generation_kwargs", problems)
        note = "generation_kwargs: only max_new_tokens has an effect; answers are greedy here"
        notes.setdefault(note, []).append(label)
    return entry


def _translate_generation(
    kwargs: Any, entry: dict[str, Any], where: str, problems: list[str]
) -> None:
    """Accept what asks for greedy decoding; move max_new_tokens to the task's own key."""
    if not isinstance(kwargs, Mapping):
        problems.append(f"{where}: {kwargs!r} will not do; write a mapping, {{name: value}}")
        return
    for name, value in kwargs.items():
        if name == "max_new_tokens":
            if entry.setdefault(name, value) != value:
                problems.append(f"{where}.{name}: the task's own max_new_tokens differs; write one")
            continue
        if name not in _GREEDY:
            why = "is not known to leave greedy decoding as it is"
            problems.append(f"{where}.{name}: {why}{nearest(str(name), _GREEDY)}; remove it")
            continue
        allowed = _GREEDY[name]
        if allowed is not None and value not in allowed:
            problems.append(
                f"{where}.{name}: {value!r}; answers are greedy here, so that every run gives the"
                f" same ones; write {str(allowed[0]).lower()} or remove it"
            )

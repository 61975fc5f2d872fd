"""A gauntlet file: its tasks, its categories, and every mistake in it named before training starts.

`Gauntlet` calls `read_gauntlet`. The form and the key names are LLM Foundry's: `icl_tasks`, a list
or the path of a file with that key, and `eval_gauntlet`, likewise; both may be in one file.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest, one_of
from llmfoundry.recipe.paths import find_file

METRICS = {
    "language_modeling": "InContextLearningLMAccuracy",
    "multiple_choice": "InContextLearningMultipleChoiceAccuracy",
}
WEIGHTINGS = ("EQUAL", "SAMPLE_SZ", "LOG_SAMPLE_SZ")

Section = TypeVar("Section", bound="TaskConfig | BenchmarkConfig | CategoryConfig | EvalGauntlet")


@dataclass(frozen=True)
class TaskConfig:
    """One entry of `icl_tasks`."""

    label: str
    """Name in tables, metric names and categories."""
    dataset_uri: str
    """A .jsonl file, relative to the gauntlet file or to the repository; or heldout://..."""
    icl_task_type: str
    """language_modeling or multiple_choice."""
    num_fewshot: list[int]
    """Numbers of worked examples before the question; each is evaluated and reported apart."""
    prompt_string: str = ""
    """Text before everything else."""
    example_delimiter: str = "\n"
    """Text between worked examples, and between the last of them and the question."""
    continuation_delimiter: str = " "
    """Text between a question and its answer."""
    question_prelimiter: str = ""
    """Text before each question."""
    fewshot_random_seed: int = 1234
    """Decides which rows are the worked examples."""
    strip_dataset: bool = True
    """Remove white space around each text of a row; false where it matters, as in code."""


@dataclass(frozen=True)
class BenchmarkConfig:
    """A task, with one number of worked examples, as a member of a category."""

    name: str
    num_fewshot: int
    random_baseline: float | None = None
    """Accuracy of guessing. It is computed from the rows; a wrong one here is reported."""


@dataclass(frozen=True)
class CategoryConfig:
    """A named mean of benchmarks."""

    name: str
    benchmarks: list[BenchmarkConfig]


@dataclass(frozen=True)
class EvalGauntlet:
    """How accuracies become categories and one average."""

    categories: list[CategoryConfig] = field(default_factory=list)
    weighting: str = "EQUAL"
    """Weight of a benchmark in its category: EQUAL 1, SAMPLE_SZ n, LOG_SAMPLE_SZ log2 n."""
    subtract_random_baseline: bool = True
    """Score 0 for guessing."""
    rescale_accuracy: bool = True
    """Score 1 for no mistake, in spite of the subtraction."""


@dataclass(frozen=True)
class GauntletFile:
    """What a gauntlet file says, checked; no row has been read yet."""

    path: Path
    tasks: list[TaskConfig]
    gauntlet: EvalGauntlet


def read_gauntlet(path: Path) -> GauntletFile:
    """Read and check a gauntlet file.

    Raises:
        UserError: every unknown key, wrong value and missing file, with the place of each.
    """
    path = find(str(path), beside=Path("."), key="eval.gauntlet")
    top = _read_yaml(path)
    problems = [
        f"{path}: unknown key '{key}'{nearest(str(key), ('icl_tasks', 'eval_gauntlet'))}"
        " (keys: icl_tasks, eval_gauntlet)"
        for key in top
        if key not in ("icl_tasks", "eval_gauntlet")
    ]
    task_path, raw_tasks = _follow(path, top, "icl_tasks")
    gauntlet_path, raw_gauntlet = _follow(path, top, "eval_gauntlet")
    if not isinstance(raw_tasks, list) or not raw_tasks:
        problems.append(f"{task_path}: icl_tasks: is missing or empty; write a list of tasks")
        raise UserError(*problems)
    tasks = _read_list(TaskConfig, raw_tasks, f"{task_path}: icl_tasks", problems)
    for task in tasks:
        problems.extend(_check_task(task, f"{task_path}: icl_tasks: {task.label}: "))
    gauntlet = EvalGauntlet()
    if raw_gauntlet is not None:
        where = f"{gauntlet_path}: eval_gauntlet"
        gauntlet = _read_section(EvalGauntlet, raw_gauntlet, where, problems) or gauntlet
        problems.extend(_check_gauntlet(gauntlet, f"{where}: "))
    problems.extend(_check_repeats([t.label for t in tasks], f"{task_path}: icl_tasks: label"))
    if problems:
        raise UserError(*problems)
    return GauntletFile(task_path, tasks, gauntlet)


def find(name: str, *, beside: Path, key: str) -> Path:
    """The file `name`: beside the file `beside`, or where `find_file` looks.

    Raises:
        UserError: there is none, or it is a folder; the line begins with `key`.
    """
    path = beside.parent / Path(name).expanduser()
    if not path.exists():
        path = find_file(name, key)
    if not path.is_file():
        raise UserError(f"{key}: {name} is a folder; write the path of a file")
    return path


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: is not a gauntlet; write the keys icl_tasks and eval_gauntlet")
    return content


def _follow(path: Path, top: Mapping[str, Any], key: str) -> tuple[Path, Any]:
    """The value of `key`, and the file that it is in: this one, or the one that it names."""
    value = top.get(key)
    if not isinstance(value, str):
        return path, value
    other = find(value, beside=path, key=f"{path}: {key}")
    return other, _read_yaml(other).get(key)


def _read_list(
    cls: type[Section], raw: list[Any], where: str, problems: list[str]
) -> list[Section]:
    """Every entry that can be read; what cannot be adds its lines to `problems`."""
    entries = []
    for i, entry in enumerate(raw):
        name = entry.get("label", entry.get("name")) if isinstance(entry, Mapping) else None
        place = f"{where}[{i}]" + (f" ({name})" if name is not None else "")
        entries.append(_read_section(cls, entry, place, problems))
    return [entry for entry in entries if entry is not None]


def _read_section(cls: type[Section], raw: Any, where: str, problems: list[str]) -> Section | None:
    """A dataclass from its YAML mapping, or None where `problems` grew."""
    if not isinstance(raw, Mapping):
        problems.append(f"{where}: is not a mapping of keys to values")
        return None
    before = len(problems)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    kinds = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in fields:
            hint = nearest(str(key), fields)
            problems.append(f"{where}: unknown key '{key}'{hint} (keys: {', '.join(fields)})")
        else:
            values[key] = _read_value(kinds[key], value, f"{where}: {key}", problems)
    problems.extend(
        f"{where}: {key}: is missing; write {_describe(kinds[key])}"
        for key, f in fields.items()
        if key not in raw
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    )
    return cls(**values) if len(problems) == before else None


def _read_value(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        if isinstance(value, list) and value:
            if inner in (BenchmarkConfig, CategoryConfig):
                return _read_list(inner, value, where, problems)
            return [_read_value(inner, v, f"{where}[{i}]", problems) for i, v in enumerate(value)]
    elif kind == float | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is kind:
        return value
    problems.append(f"{where}: {value!r} will not do; write {_describe(kind)}")
    return None


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        return "a list of one or more " + {int: "whole numbers, such as [0]"}.get(inner, "entries")
    names = {str: "a text", int: "a whole number", bool: "true or false"}
    return names.get(kind, "a number")


def _check_task(task: TaskConfig, where: str) -> Iterator[str]:
    yield from one_of(f"{where}icl_task_type", task.icl_task_type, METRICS)
    yield from _check_repeats(task.num_fewshot, f"{where}num_fewshot")
    if min(task.num_fewshot) < 0:
        yield f"{where}num_fewshot: {min(task.num_fewshot)} is below 0; write 0 or more"
    if "/" in task.label or not task.label:
        yield f"{where}label: {task.label!r} cannot name a metric; write a name without '/'"


def _check_gauntlet(gauntlet: EvalGauntlet, where: str) -> Iterator[str]:
    yield from one_of(f"{where}weighting", gauntlet.weighting, WEIGHTINGS)
    if gauntlet.rescale_accuracy and not gauntlet.subtract_random_baseline:
        yield (
            f"{where}rescale_accuracy: true needs subtract_random_baseline: true;"
            " set both or neither"
        )
    names = [category.name for category in gauntlet.categories]
    yield from _check_repeats([*names, "average"], f"{where}categories: name")
    for category in gauntlet.categories:
        keys = [(b.name, b.num_fewshot) for b in category.benchmarks]
        yield from _check_repeats(keys, f"{where}categories: {category.name}: benchmarks")


def _check_repeats(values: list[Any], where: str) -> Iterator[str]:
    for value in dict.fromkeys(v for v in values if values.count(v) > 1):
        yield f"{where}: {value!r} is there more than once; each must differ"

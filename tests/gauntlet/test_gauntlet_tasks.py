"""What a gauntlet file may say, how it is composed, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.gauntlet_file import GauntletFile, read_gauntlet
from llmfoundry.gauntlet.questions import TaskConfig
from llmfoundry.recipe.paths import ROOT

TASK = {
    "label": "copa",
    "dataset_uri": "copa.jsonl",
    "icl_task_type": "multiple_choice",
    "num_fewshot": [0],
}
GENERATION = {**TASK, "label": "svamp", "icl_task_type": "generation_task_with_answers"}
CATEGORY = {"name": "reasoning", "benchmarks": [{"name": "copa", "num_fewshot": 0}]}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def read_task(folder: Path, **keys: Any) -> TaskConfig:
    (task,) = read_gauntlet(write(folder / "g.yaml", {"icl_tasks": [{**TASK, **keys}]})).tasks
    return task


def problems_of(folder: Path, content: Any) -> str:
    path = write(folder / "gauntlet.yaml", content)
    with pytest.raises(UserError) as error:
        read_gauntlet(path)
    return str(error.value).replace(f"{folder}/", "")


# A file in the manner of LLM Foundry's, with every key of its task schema.
FOUNDRY_TASKS = r"""
icl_tasks:
-
  label: gsm8k
  dataset_uri: eval/local_data/symbolic_problem_solving/gsm8k_prepended_8shot.jsonl
  num_fewshot: [0]
  icl_task_type: generation_task_with_answers
  batch_size: 4
  cot_delimiter: "The answer is "
  continuation_delimiter: "\n\nA:"
  question_prelimiter: ""
  do_normalization: false
  early_stopping_criteria:
  - "\n\n"
  - "Question:"
  generation_kwargs: {do_sample: false, num_beams: 1, temperature: 0.2, max_new_tokens: 40}
-
  label: mmlu
  dataset_uri: eval/local_data/world_knowledge/mmlu.jsonl
  num_fewshot: [5]
  icl_task_type: multiple_choice
  metric_names:
  - InContextLearningMultipleChoiceAccuracy
  - InContextLearningMCExpectedCalibrationError
  prompt_string: "The following are questions.\n"
  example_delimiter: "\n\n"
  continuation_delimiter: "\nAnswer: " # this separates questions from answers
  has_categories: true
  fewshot_random_seed: 7
  strip_dataset: false
  max_seq_len: 1024
  pad_tok_id: 0
-
  label: winograd
  dataset_uri: eval/local_data/language_understanding/winograd_wsc.jsonl
  num_fewshot: [0, 3]
  icl_task_type: schema
  prelimiter: "Q: "
-
  label: wikiqa_2k
  dataset_uri: hf://mosaicml/long_context_eval
  num_fewshot: [0]
  icl_task_type: question_answering
  hf_loading_vars:
    name: wikiqa
    context_length: 2048
    split: test
  hf_parsing_map:
    context: [document, question]
    answer: [answer]
"""
FOUNDRY_GAUNTLET = """
eval_gauntlet:
  weighting: LOG_SAMPLE_SZ
  subtract_random_baseline: true
  rescale_accuracy: true
  averages:
    core_average:
    - world_knowledge
    - symbolic_problem_solving
  categories:
  - name: world_knowledge
    benchmarks:
    - name: mmlu
      num_fewshot: 5
      random_baseline: 0.25
  - name: symbolic_problem_solving
    benchmarks:
    - name: gsm8k
      num_fewshot: 0
      random_baseline: 0
"""


def read_foundry(folder: Path) -> GauntletFile:
    write(folder / "yamls" / "tasks.yaml", FOUNDRY_TASKS)
    write(folder / "yamls" / "eval_gauntlet.yaml", FOUNDRY_GAUNTLET)
    top = "icl_tasks: yamls/tasks.yaml\neval_gauntlet: yamls/eval_gauntlet.yaml"
    return read_gauntlet(write(folder / "gauntlet.yaml", top))


def test_llm_foundrys_files_are_read_as_they_are(tmp_path: Path) -> None:
    file = read_foundry(tmp_path)
    gsm8k, mmlu, winograd, wikiqa = file.tasks
    assert file.path == tmp_path / "yamls" / "tasks.yaml"
    assert gsm8k.early_stopping_criteria == ["\n\n", "Question:"]
    assert (gsm8k.cot_delimiter, gsm8k.do_normalization) == ("The answer is ", False)
    assert gsm8k.max_new_tokens == 40
    assert mmlu.prompt_string == "The following are questions.\n"
    assert (mmlu.example_delimiter, mmlu.continuation_delimiter) == ("\n\n", "\nAnswer: ")
    assert (mmlu.has_categories, mmlu.strip_dataset, mmlu.fewshot_random_seed) == (True, False, 7)
    assert mmlu.max_seq_len == 1024
    assert (winograd.question_prelimiter, winograd.num_fewshot) == ("Q: ", [0, 3])
    assert wikiqa.icl_task_type == "generation_task_with_answers"
    assert wikiqa.hf_loading_vars == {"name": "wikiqa", "context_length": 2048, "split": "test"}
    assert wikiqa.hf_parsing_map == {"context": ["document", "question"], "answer": ["answer"]}
    gauntlet = file.gauntlet
    assert gauntlet.averages == {"core_average": ["world_knowledge", "symbolic_problem_solving"]}
    assert gauntlet.weighting == "LOG_SAMPLE_SZ"
    assert gauntlet.baseline == "file"
    assert [c.benchmarks[0].random_baseline for c in gauntlet.categories] == [0.25, 0.0]


def test_keys_of_llm_foundry_without_effect_are_noted_with_their_tasks(tmp_path: Path) -> None:
    notes = [note.split("icl_tasks: ")[1] for note in read_foundry(tmp_path).notes]
    assert sorted((note.split(":")[0], note.split("(")[-1]) for note in notes) == [
        ("batch_size", "gsm8k)"),
        ("generation_kwargs", "gsm8k)"),
        ("icl_task_type", "wikiqa_2k)"),
        ("pad_tok_id", "mmlu)"),
    ]


def test_a_note_on_many_tasks_names_three_of_them(tmp_path: Path) -> None:
    tasks = [{**TASK, "label": f"t{i}", "batch_size": 8} for i in range(5)]
    (note,) = read_gauntlet(write(tmp_path / "g.yaml", {"icl_tasks": tasks})).notes
    assert note.endswith("(t0, t1, t2 and 2 more)")


def test_a_note_on_a_definition_that_is_not_used_is_not_made(tmp_path: Path) -> None:
    base = {k: v for k, v in TASK.items() if k != "num_fewshot"} | {"batch_size": 8}
    write(tmp_path / "all.yaml", {"tasks": [base, {**base, "label": "piqa", "pad_tok_id": 0}]})
    content = {"definitions": "all.yaml", "icl_tasks": [{"label": "copa", "num_fewshot": 0}]}
    (note,) = read_gauntlet(write(tmp_path / "g.yaml", content)).notes
    assert "batch_size: has no effect" in note
    assert note.endswith("(copa)")


def test_every_gauntlet_of_the_repository_can_be_read() -> None:
    paths = sorted((ROOT / "eval" / "gauntlets").glob("*.yaml"))
    assert paths
    for path in paths:
        assert read_gauntlet(path).tasks


def test_a_list_of_one_may_be_written_without_brackets(tmp_path: Path) -> None:
    assert read_task(tmp_path, num_fewshot=3).num_fewshot == [3]
    assert read_task(tmp_path, num_fewshot="3").num_fewshot == [3]
    stops = read_task(tmp_path, **{**GENERATION, "early_stopping_criteria": "\n"})
    assert stops.early_stopping_criteria == ["\n"]


def test_a_key_without_a_value_keeps_its_default(tmp_path: Path) -> None:
    unset = {"max_seq_len": None, "example_delimiter": None, "hf_loading_vars": None}
    assert read_task(tmp_path, **unset) == read_task(tmp_path)


def test_entries_start_from_their_definition_and_override_it(tmp_path: Path) -> None:
    defined = {k: v for k, v in TASK.items() if k != "num_fewshot"}
    write(
        tmp_path / "tasks" / "all.yaml",
        {"tasks": [{**defined, "continuation_delimiter": "\nA: ", "prelimiter": "Q: "}]},
    )
    path = write(
        tmp_path / "gauntlets" / "g.yaml",
        {
            "definitions": "../tasks/all.yaml",
            "icl_tasks": [
                {"label": "copa", "num_fewshot": 0},
                {"label": "copa", "num_fewshot": 5, "question_prelimiter": ""},
                {**TASK, "label": "other"},
            ],
        },
    )
    first, second, other = read_gauntlet(path).tasks
    assert (first.num_fewshot, first.question_prelimiter) == ([0], "Q: ")
    assert (second.num_fewshot, second.question_prelimiter) == ([5], "")
    assert first.continuation_delimiter == second.continuation_delimiter == "\nA: "
    assert other.continuation_delimiter == " "


def test_a_definitions_rows_are_found_beside_it_where_they_are_there(tmp_path: Path) -> None:
    defined = {k: v for k, v in TASK.items() if k != "num_fewshot"}
    rows = write(tmp_path / "tasks" / "copa.jsonl", "{}")
    elsewhere = {**defined, "label": "piqa", "dataset_uri": "eval/local_data/piqa.jsonl"}
    write(tmp_path / "tasks" / "all.yaml", {"tasks": [defined, elsewhere]})
    content = {
        "definitions": ["tasks/all.yaml"],
        "icl_tasks": [{"label": label, "num_fewshot": 0} for label in ("copa", "piqa")],
    }
    copa, piqa = read_gauntlet(write(tmp_path / "g.yaml", content)).tasks
    assert Path(copa.dataset_uri) == rows
    assert piqa.dataset_uri == "eval/local_data/piqa.jsonl"


def test_mistakes_in_definitions_name_the_file_that_they_are_in(tmp_path: Path) -> None:
    content = {"definitions": "tasks.yaml", "icl_tasks": [{"label": "copas", "num_fewshot": 0}]}
    write(tmp_path / "tasks.yaml", {"tasks": [TASK, {"label": "x", "dataset_ur": "y"}]})
    reported = problems_of(tmp_path, content).splitlines()
    assert reported[0].startswith(
        "tasks.yaml: tasks[0] (copa): num_fewshot: is the gauntlet's choice"
    )
    assert reported[1].startswith(
        "tasks.yaml: tasks[1] (x): unknown key 'dataset_ur'; did you mean"
    )
    assert len(reported) == 4  # dataset_uri and icl_task_type are missing too

    defined = {k: v for k, v in TASK.items() if k != "num_fewshot"}
    write(tmp_path / "tasks.yaml", {"tasks": [defined, defined]})
    assert "(copa): label: is defined before" in problems_of(tmp_path, content)
    write(tmp_path / "tasks.yaml", {"tasks": [defined]})
    reported = problems_of(tmp_path, content)
    assert "(copas): label: is not among the definitions; did you mean 'copa'?" in reported
    write(tmp_path / "tasks.yaml", {"icl_tasks": [TASK]})
    assert "tasks.yaml: tasks: is missing or empty" in problems_of(tmp_path, content)


def test_a_task_of_the_harness_takes_label_and_type_from_its_address(tmp_path: Path) -> None:
    entry = {"dataset_uri": "lm_eval:arc_easy", "num_fewshot": [0, 5]}
    (task,) = read_gauntlet(write(tmp_path / "g.yaml", {"icl_tasks": [entry]})).tasks
    assert (task.label, task.icl_task_type) == ("arc_easy", "lm_eval")
    reported = problems_of(tmp_path, {"icl_tasks": [{**entry, "prompt_string": "Q"}]})
    assert "prompt_string: has no effect on a task of the harness, which has its own" in reported
    reported = problems_of(tmp_path, {"icl_tasks": [{**TASK, "icl_task_type": "lm_eval"}]})
    assert "icl_task_type: 'lm_eval' is not a choice" in reported


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_fewshots": [1]}, "icl_tasks[0] (copa): unknown key 'num_fewshots'; did you mean"),
        ({"num_fewshot": "a"}, "(copa): num_fewshot[0]: 'a' is not an integer"),
        ({"num_fewshot": None}, "(copa): num_fewshot: is missing; write a list, [...]"),
        ({"num_fewshot": []}, "(copa): num_fewshot: is empty; write a list"),
        ({"num_fewshot": [-1]}, "(copa): num_fewshot: -1 is too small; write 0 or more"),
        ({"num_fewshot": [2, 2]}, "(copa): num_fewshot: 2 is there more than once"),
        ({"icl_task_type": "multiple_choise"}, "did you mean 'multiple_choice'?"),
        ({"icl_task_type": "code_evaluation"}, "choices: language_modeling, multiple_choice, sch"),
        ({"strip_dataset": 1}, "(copa): strip_dataset: 1 is not true or false"),
        (
            {"example_delimiter": "a\ud800"},
            r"(copa): example_delimiter: 'a\ud800' holds half a surrogate pair",
        ),
        ({"label": "a/b"}, "label: 'a/b' cannot name a metric"),
        ({"max_seq_len": 0}, "max_seq_len: 0 is too small; write 1 or more"),
        ({"choice_by": "chars"}, "choice_by: 'chars' is not a choice; did you mean 'char'?"),
        ({"cot_delimiter": "#"}, "cot_delimiter: has no effect in multiple_choice; remove it"),
        ({"do_normalization": False}, "do_normalization: has no effect in multiple_choice"),
        ({"max_new_tokens": 5}, "max_new_tokens: has no effect in multiple_choice"),
        ({"hf_loading_vars": {"split": "x"}}, "has no effect without dataset_uri: hf://...;"),
        ({"hf_loading_vars": "x"}, "hf_loading_vars: 'x' is not a mapping; write {name:"),
        ({"prelimiter": "", "question_prelimiter": ""}, "prelimiter: is question_prelimiter; rem"),
        ({"metric_names": ["Accuracy"]}, "choices: InContextLearningMultipleChoiceAccuracy, InCo"),
        (
            {"metric_names": ["InContextLearningMCExpectedCalibrationError"]},
            "has no InContextLearningMultipleChoiceAccuracy, which scores are made of; add it",
        ),
        (
            {"dataset_uri": "heldout://continuations", "has_categories": True},
            "has_categories: pieces of held-out text have none; remove it",
        ),
        (
            {"icl_task_type": "language_modeling", "choice_by": "sum"},
            "choice_by: has no effect in language_modeling; remove it",
        ),
        ({**GENERATION, "early_stopping_criteria": [""]}, "'' ends every answer at once"),
    ],
)
def test_a_mistake_in_a_task_names_file_task_key_and_what_to_write(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    reported = problems_of(tmp_path, {"icl_tasks": [{**TASK, **change}]})
    assert message in reported
    assert reported.startswith("gauntlet.yaml: icl_tasks[0] (")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"do_sample": True}, "generation_kwargs.do_sample: True; answers are greedy here"),
        ({"num_beams": 5}, "generation_kwargs.num_beams: 5; answers are greedy here"),
        ({"num_beam": 1}, "generation_kwargs.num_beam: is not known to leave greedy decoding as"),
        ({"max_new_tokens": 3}, "max_new_tokens: the task's own max_new_tokens differs; write one"),
        ([1], "generation_kwargs: [1] will not do; write a mapping"),
    ],
)
def test_generation_that_is_not_greedy_is_refused_with_the_reason(
    tmp_path: Path, kwargs: Any, message: str
) -> None:
    task = {**GENERATION, "max_new_tokens": 4, "generation_kwargs": kwargs}
    assert message in problems_of(tmp_path, {"icl_tasks": [task]})


@pytest.mark.parametrize(
    ("gauntlet", "message"),
    [
        ({"weightings": "EQUAL"}, "unknown key 'weightings'; did you mean 'weighting'?"),
        ({"weighting": "EQUALS"}, "weighting: 'EQUALS' is not a choice; did you mean 'EQUAL'?"),
        ({"baseline": "rows"}, "baseline: 'rows' is not a choice (choices: file, chance, maj"),
        ({"subtract_random_baseline": False}, "rescale_accuracy: true needs subtract_random"),
        (
            {"subtract_random_baseline": False, "rescale_accuracy": False, "baseline": "chance"},
            "baseline: has no effect without subtract_random_baseline: true",
        ),
        ({"categories": [{"name": "x"}]}, "categories[0] (x): benchmarks: is missing"),
        ({"categories": "x"}, "categories: 'x' is not a list; write [x]"),
        ({"categories": [{"name": "x", "benchmarks": []}]}, "x: benchmarks: is empty; write a"),
        ({"categories": [{**CATEGORY, "name": "average"}]}, "'average' is there more than once"),
        (
            {"categories": [{"name": "x", "benchmarks": 2 * CATEGORY["benchmarks"]}]},
            "x: benchmarks: 'copa, 0-shot' is there more than once",
        ),
        (
            {
                "categories": [
                    {
                        "name": "x",
                        "benchmarks": [{"name": "c", "num_fewshot": 0, "random_baseline": 25}],
                    }
                ]
            },
            "x: benchmarks: c: random_baseline: 25.0 is not a fraction",
        ),
        (
            {"categories": [CATEGORY], "averages": {"core": ["reasonin"]}},
            "averages: core: 'reasonin' is not a choice; did you mean 'reasoning'?",
        ),
        (
            {"categories": [CATEGORY], "averages": {"reasoning": ["reasoning"]}},
            "averages: reasoning: is the name of a category; write another",
        ),
        ({"categories": [CATEGORY], "averages": {"core": []}}, "averages: core: is empty"),
    ],
)
def test_a_mistake_in_the_categories_is_reported(
    tmp_path: Path, gauntlet: dict[str, Any], message: str
) -> None:
    reported = problems_of(tmp_path, {"icl_tasks": [TASK], "eval_gauntlet": gauntlet})
    assert message in reported
    assert reported.startswith("gauntlet.yaml: eval_gauntlet: ")


def test_every_mistake_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    reported = problems_of(
        tmp_path, {"icl_tasks": [{"label": "x"}, {**TASK, "k": 1}], "icl_task": 1}
    )
    assert len(reported.splitlines()) == 5  # three missing keys, two unknown ones


def test_a_key_given_twice_is_reported_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "g.yaml", "icl_tasks:\n- label: x\n  label: y\n")
    with pytest.raises(UserError, match=r"g\.yaml:3: key 'label' is given twice"):
        read_gauntlet(path)


def test_files_that_are_no_gauntlet_are_reported(tmp_path: Path) -> None:
    assert "gauntlet.yaml:1: " in problems_of(tmp_path, "a: [")
    assert "holds no keys" in problems_of(tmp_path, "- 1")
    assert "icl_tasks: is missing or empty" in problems_of(tmp_path, {"icl_tasks": []})
    assert "icl_tasks: nothing at tasks.yam" in problems_of(tmp_path, {"icl_tasks": "tasks.yam"})
    assert "icl_tasks: . is a folder" in problems_of(tmp_path, {"icl_tasks": "."})
    reported = problems_of(tmp_path, {"icl_tasks": [TASK, TASK]})
    assert "label: 'copa, 0-shot' is there more than once" in reported


def test_a_named_file_without_the_key_is_reported_and_not_taken_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "other.yaml", "eval_gauntle: {weighting: EQUAL}")
    reported = problems_of(tmp_path, {"icl_tasks": [TASK], "eval_gauntlet": "other.yaml"})
    assert "eval_gauntlet: other.yaml has no key eval_gauntlet with something below it" in reported
    assert "did you mean 'eval_gauntle'?" in reported

"""The shipped gauntlets are LLM Foundry's and DCLM's: tasks, shots, prompts, baselines."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmfoundry.gauntlet.fetch import files_of_gauntlet, read_table
from llmfoundry.gauntlet.gauntlet_file import GauntletFile, read_gauntlet
from llmfoundry.gauntlet.questions import TaskConfig
from llmfoundry.recipe.paths import ROOT, YAMLS

GAUNTLETS = ROOT / "eval" / "gauntlets"
FOUNDRY = {  # pairs of a task and a number of shots; benchmarks of each category
    "v0.1": (49, [7, 8, 7, 15, 8, 4]),
    "v0.2": (38, [6, 7, 4, 10, 6]),
    "v0.3": (34, [6, 7, 4, 8, 6]),
    "light": (15, [2, 2, 3, 6, 2]),
    "lm_tasks": (11, [2, 1, 5, 3]),
    "long_context": (39, [7, 7, 7, 6, 6, 6]),
    "core_v1": (22, [22]),
    "core_v2": (22, [22]),
    "extended_v1": (53, [53]),
    "extended_v2": (53, [53]),
}
CORE = {  # DCLM's low_variance_datasets with its shots; choices of LLM Foundry's rows, 0 for none
    ("hellaswag", 0): 4,
    ("jeopardy", 10): 0,
    ("bigbench_qa_wikidata", 10): 0,
    ("arc_easy", 10): 4,
    ("arc_challenge", 10): 4,
    ("copa", 0): 2,
    ("commonsense_qa", 10): 4,
    ("piqa", 10): 2,
    ("openbook_qa", 0): 4,
    ("lambada_openai", 0): 0,
    ("hellaswag", 10): 4,
    ("winograd", 0): 2,
    ("winogrande", 0): 2,
    ("bigbench_dyck_languages", 10): 0,
    ("agi_eval_lsat_ar", 3): 4,
    ("bigbench_cs_algorithms", 10): 0,
    ("bigbench_operators", 10): 0,
    ("bigbench_repeat_copy_logic", 10): 0,
    ("squad", 10): 0,
    ("coqa", 0): 0,
    ("boolq", 10): 2,
    ("bigbench_language_identification", 10): 4,
}

Baselines = dict[tuple[str, int], float]


def gauntlet(name: str) -> GauntletFile:
    return read_gauntlet(GAUNTLETS / f"{name}.yaml")


def task(name: str, label: str) -> TaskConfig:
    (found,) = [task for task in gauntlet(name).tasks if task.label == label]
    return found


def pairs(file: GauntletFile) -> set[tuple[str, int]]:
    return {(task.label, shots) for task in file.tasks for shots in task.num_fewshot}


def baselines(file: GauntletFile) -> Baselines:
    found: Baselines = {}
    for category in file.gauntlet.categories:
        for benchmark in category.benchmarks:
            assert benchmark.random_baseline is not None
            found[benchmark.name, benchmark.num_fewshot] = benchmark.random_baseline
    return found


@pytest.mark.parametrize("name", FOUNDRY)
def test_counts_are_those_of_the_published_lists(name: str) -> None:
    file = gauntlet(name)
    settings = file.gauntlet
    sizes = [len(category.benchmarks) for category in settings.categories]
    assert (len(pairs(file)), sizes) == FOUNDRY[name]
    assert set(baselines(file)) <= pairs(file)  # nothing in a category that does not run
    assert (settings.weighting, settings.baseline) == ("EQUAL", "file")
    assert settings.subtract_random_baseline and settings.rescale_accuracy
    assert not file.notes


@pytest.mark.parametrize(
    ("name", "uncounted"),
    [
        ("v0.1", set()),
        (
            "v0.2",
            {
                ("arc_challenge", 25),
                ("hellaswag", 10),
                ("gsm8k", 5),
                ("bigbench_cs_algorithms", 10),
                ("pubmed_qa_labeled", 10),
            },
        ),
        ("v0.3", {("arc_challenge", 25), ("hellaswag", 10), ("bigbench_cs_algorithms", 10)}),
    ],
)
def test_only_the_known_pairs_run_without_counting(
    name: str, uncounted: set[tuple[str, int]]
) -> None:
    file = gauntlet(name)
    assert pairs(file) - set(baselines(file)) == uncounted
    (members,) = file.gauntlet.averages.values()
    assert list(file.gauntlet.averages) == ["core_average"]
    assert {c.name for c in file.gauntlet.categories} - set(members) <= {"safety"}
    assert len(members) == 5


def test_baselines_of_v03_are_one_over_choices() -> None:
    found = baselines(gauntlet("v0.3"))
    for (label, shots), choices in CORE.items():
        if (label, shots) in found:
            assert found[label, shots] == (1 / choices if choices else 0)
    assert sorted(found.values()).count(0.5) == 8  # copa siqa piqa stories strategy wino* boolq
    assert sorted(found.values()).count(0.25) == 11


def test_generation_tasks_have_the_prompts_of_their_version() -> None:
    gsm8k, svamp, trivia = (task("v0.3", k) for k in ("gsm8k", "svamp", "triviaqa_sm_sub"))
    assert gsm8k.dataset_uri.endswith("gsm8k_prepended_8shot.jsonl")
    assert (gsm8k.question_prelimiter, svamp.question_prelimiter) == ("", "Question: ")
    for found in (gsm8k, svamp):
        assert found.continuation_delimiter == "\n\nA:"
        assert found.cot_delimiter == "The answer is "
        assert found.early_stopping_criteria == ["\n\n", "Question:"]
        assert not found.do_normalization
    assert trivia.do_normalization and trivia.continuation_delimiter == " "
    for version in ("v0.1", "v0.2"):
        gsm8k, svamp = task(version, "gsm8k"), task(version, "svamp")
        assert gsm8k.dataset_uri.endswith("/gsm8k.jsonl")
        assert gsm8k.continuation_delimiter == "\nA: Let's think step by step. "
        assert svamp.continuation_delimiter == "\nUsing the formula below:\n"
        for found in (gsm8k, svamp):
            assert (found.cot_delimiter, found.question_prelimiter) == (" #### ", "Q: ")
            assert found.do_normalization and not found.early_stopping_criteria
    assert task("extended_v1", "svamp_cot").early_stopping_criteria == ["\n\n", "Q:", "Q: "]


@pytest.mark.parametrize(("name", "expected"), [("core_v1", -0.001), ("core_v2", -0.026)])
def test_core_has_dclms_tasks_and_its_score_at_chance(name: str, expected: float) -> None:
    found = baselines(gauntlet(name))
    assert set(found) == set(CORE)
    at_chance = [
        ((1 / choices if choices else 0) - found[pair]) / (1 - found[pair])
        for pair, choices in CORE.items()
    ]
    assert sum(at_chance) / len(at_chance) == pytest.approx(expected, abs=5e-4)


def test_versions_of_dclms_scores_differ_in_the_corrected_baselines_only() -> None:
    for old, new, changed in (
        ("core_v1", "core_v2", 3),
        ("extended_v1", "extended_v2", 12),
    ):
        before, after = baselines(gauntlet(old)), baselines(gauntlet(new))
        assert gauntlet(old).tasks == gauntlet(new).tasks
        assert len([pair for pair in before if before[pair] != after[pair]]) == changed
    for version in ("v1", "v2"):
        core, extended = (baselines(gauntlet(f"{n}_{version}")) for n in ("core", "extended"))
        assert core.items() <= extended.items()


def test_every_file_has_one_entry_in_the_fetch_table_and_every_definition_is_used() -> None:
    table = read_table(ROOT / "eval" / "fetch.yaml")
    needed, labels = set(), set()
    for name in FOUNDRY:
        files, others = files_of_gauntlet(GAUNTLETS / f"{name}.yaml")
        needed |= set(files)
        labels |= {task.label for task in gauntlet(name).tasks}
        assert len(others) == (39 if name == "long_context" else 0)
    assert needed == set(table)
    labels |= {task.label for task in gauntlet("instructions").tasks}
    for path in (ROOT / "eval" / "tasks").glob("*.yaml"):
        defined = [entry["label"] for entry in yaml.safe_load(path.read_text())["tasks"]]
        assert len(set(defined)) == len(defined)
        assert set(defined) <= labels


def test_rows_of_the_fetch_table_add_up_to_those_of_llm_foundrys_folders() -> None:
    table = read_table(ROOT / "eval" / "fetch.yaml")
    counted = {  # wc -l of each folder's files that gauntlets use
        "commonsense_reasoning": 8_108,
        "language_understanding": 16_960 + 10_042,
        "safety": 3_515 + 58_492,
    }
    for folder, rows in counted.items():
        found = [entry.rows for entry in table.values() if entry.file.startswith(f"{folder}/")]
        assert sum(found) == rows
    seen = [entry for entry in table.values() if entry.sha256 is not None]
    assert all(entry.bytes and len(str(entry.sha256)) == 64 for entry in seen)


def test_every_gauntlet_but_one_that_no_library_reads_is_chosen_by_its_name() -> None:
    files = {path.stem for path in (ROOT / "eval" / "gauntlets").glob("*.yaml")}
    choices = {path.stem for path in (YAMLS / "eval").glob("*.yaml")}
    assert files - choices == {"long_context"}  # its rows are made by a script on the hub


@pytest.mark.parametrize("group", sorted((YAMLS / "eval").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_group_choice_names_a_gauntlet_that_reads(group: Path) -> None:
    named = yaml.safe_load(group.read_text())["gauntlet"]
    assert named is None or read_gauntlet(ROOT / named).tasks

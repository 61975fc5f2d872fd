"""The command line that every script shares: what runs, and what each mistake is answered with."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ConvertRecipe, EvalRecipe, GenerateRecipe
from llmfoundry.recipe.load import load
from llmfoundry.recipe.paths import ROOT, YAMLS, find_file, find_shipped
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_yaml
from tests.front import Front

QUICKSTART = YAMLS / "quickstart.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder: nothing may depend on being in the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# What runs


def test_settings_reach_the_target_with_and_without_plus(front: Front) -> None:
    got = front(QUICKSTART, "model.n_layers=4", "+eval.icl_rows=10", "++optimizer.lr=1e-3")
    assert got.status == 0, got.errors
    recipe = got.recipe
    assert (recipe.model.n_layers, recipe.eval.icl_rows, recipe.optimizer.lr) == (4, 10, 1e-3)
    assert recipe.model.head_dim is None, "nothing is derived in the user's recipe"


def test_groups_on_the_command_line_replace_those_of_the_recipe(front: Front) -> None:
    recipe = front(QUICKSTART, "model=mpt-125m", "optimizer=adamw", "eval=off").recipe
    assert (recipe.model.d_model, recipe.model.norm_type) == (768, "layernorm")
    assert not recipe.model.attn_config.rope, "nothing of the replaced group may stay"
    assert (recipe.optimizer.name, recipe.optimizer.weight_decay) == ("adamw", 0.1)
    assert recipe.optimizer.lr == TrainRecipe().optimizer.lr, "nor what the recipe's body says"
    assert (recipe.eval.validation, recipe.eval.gauntlet) == (False, None)


def test_a_recipe_without_defaults_list_takes_groups_as_whole_sections(front: Front) -> None:
    write("flat.yaml", "seed: 5\nmodel: {n_layers: 3, no_bias: true}\noptimizer: {lr: 1e-2}\n")
    plain = front("flat.yaml").recipe
    assert (plain.seed, plain.model.n_layers, plain.model.no_bias) == (5, 3, True)
    recipe = front("flat.yaml", "model=mpt-125m").recipe
    assert (recipe.model.n_layers, recipe.model.no_bias) == (12, False)
    assert recipe.optimizer.lr == 1e-2, "other sections stay"


def test_tilde_gives_a_setting_its_default_back(front: Front) -> None:
    recipe = front(QUICKSTART, "~optimizer", "~callbacks.generate.prompts").recipe
    assert recipe.optimizer == TrainRecipe().optimizer
    assert recipe.callbacks.generate.prompts == []


def test_the_run_is_named_for_its_recipe_file(front: Front) -> None:
    write("my.runs/v1.0-lr.yaml", "seed: 1\n")
    recipe = front("my.runs/v1.0-lr.yaml").recipe
    assert (recipe.run_name, recipe.save_folder) == ("v1.0-lr", "runs/v1.0-lr")
    recipe = front("my.runs/v1.0-lr.yaml", "run_name=other").recipe
    assert (recipe.run_name, recipe.save_folder) == ("other", "runs/other")


def test_interpolations_see_defaults_files_and_overrides(front: Front) -> None:
    write("r.yaml", "eval_interval: ${save_interval}\nmodel:\n  max_seq_len: ${max_seq_len}\n")
    recipe = front("r.yaml", "save_interval=7ba").recipe
    assert (recipe.eval_interval, recipe.model.max_seq_len) == ("7ba", 2048)


def test_values_from_the_environment_are_typed(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SEED", "23")
    assert front(QUICKSTART, "seed=${oc.env:MY_SEED}").recipe.seed == 23


def test_a_copied_recipe_uses_shipped_groups_and_those_beside_it(front: Front) -> None:
    write("some where/model/nano.yaml", "d_model: 64\nn_heads: 2\nn_layers: 1\n")
    write("some where/optimizer/adamw.yaml", "name: adamw\nweight_decay: 0.5\n")
    copy = write("some where/copy.yaml", QUICKSTART.read_text())
    recipe = front(copy, "model=nano", "optimizer=adamw").recipe
    assert (recipe.model.d_model, recipe.model.n_layers) == (64, 1)
    assert recipe.optimizer.weight_decay == 0.5, "the recipe's own folder comes first"
    assert recipe.eval.gauntlet == "eval/gauntlets/generated_easy.yaml", "yamls/ comes second"


def test_a_recipe_builds_on_another(front: Front) -> None:
    write("mine.yaml", "defaults: [quickstart, override eval: off]\nseed: 3\n")
    recipe = front("mine.yaml").recipe
    assert (recipe.seed, recipe.max_seq_len, recipe.eval.validation) == (3, 512, False)
    assert front("mine.yaml", "model=mpt-125m").recipe.model.n_layers == 12


def test_flags_may_stand_anywhere(front: Front) -> None:
    first = front("--cfg", "job", QUICKSTART, "seed=1").out
    assert first == front("seed=1", "--cfg", "job", QUICKSTART).out
    assert first == front("seed=1", QUICKSTART, "-c=job").out


def test_text_fields_take_what_follows_the_equals_sign(front: Front) -> None:
    def prompt(text: str) -> str:
        got = front("checkpoint=runs/x", f"prompt={text}", schema=GenerateRecipe)
        assert got.status == 0, got.errors
        return str(got.recipe.prompt)

    for text in ("Well, why (not)?", "It's def f(x): ", "a=b", "{1: 2}", "123", "1e3", "off", ""):
        assert prompt(text) == text
    assert prompt("'a, b'") == "a, b", "quotes around the whole are dropped"


def test_texts_of_a_list_may_have_what_a_sweeps_folders_have(front: Front) -> None:
    def models(text: str) -> list[str]:
        got = front("checkpoint=runs/x", f"models={text}", schema=EvalRecipe)
        assert got.status == 0, got.errors
        return list(got.recipe.models)

    folders = ["runs/A", "runs/sw/optimizer.lr=0.01", "runs/a (1)/b=2"]
    assert models(f"[{','.join(folders)}]") == models(f"[{', '.join(folders)} ]") == folders
    assert models(folders[1]) == models(f"[{folders[1]}]") == folders[1:2]
    assert models('["a=1,b=2",c]') == ["a=1,b=2", "c"]
    for wrong in ("[a=1,'b=2']", "[a=1,,b]", "[a=1", "[[a=1]]"):
        got = front("checkpoint=runs/x", f"models={wrong}", schema=EvalRecipe)
        line = f'models={wrong}: cannot be read; quote its texts, models=\'["...","..."]\''
        assert (got.status, got.errors) == (2, [line])


def test_a_trailing_underscore_of_the_schema_is_not_written(front: Front) -> None:
    words = ("checkpoint=a", "from=hf", "output=b")
    assert front(*words, schema=ConvertRecipe).recipe.from_ == "hf"
    assert "\nfrom: hf\n" in front(*words, "--cfg", "job", schema=ConvertRecipe).out
    assert front("from_=hf", schema=ConvertRecipe).errors == [
        "unknown key 'from_'; did you mean 'from'?"
    ]


def test_an_optional_section_can_be_chosen_or_begun(front: Front) -> None:
    def evaluation(*words: str) -> object:
        got = front("checkpoint=runs/x", *words, schema=EvalRecipe)
        assert got.status == 0, got.errors
        return got.recipe.eval

    assert evaluation() is None
    assert evaluation("eval=off").validation is False  # type: ignore[attr-defined]
    rows = evaluation("eval.validation_rows=10")
    assert (rows.validation_rows, rows.validation) == (10, True)  # type: ignore[attr-defined]
    assert evaluation("eval=generated", "eval=null") is None, "the last word counts"


# What --cfg job prints


def test_a_flat_copy_is_a_recipe_and_prints_itself(front: Front) -> None:
    printed = front(QUICKSTART, "model.n_layers=4", "--cfg", "job").out
    assert "\nload_path: null\n" in printed and "\n    rope_theta: null\n" in printed
    assert "${run_name}" in printed, "a copy under another name is another run"
    write("my.yaml", printed)
    again = front("my.yaml", "--cfg", "job")
    assert again.out == printed
    recipe = front("my.yaml").recipe
    assert (recipe.model.n_layers, recipe.save_folder) == (4, "runs/my")


def test_a_saved_recipe_gives_the_same_recipe_from_anywhere(front: Front) -> None:
    recipe = front(QUICKSTART, "callbacks.generate.prompts=['off','1e3','a: #b','null']").recipe
    saved = write("runs/quickstart/recipe.yaml", to_yaml(recipe)).absolute()
    os.chdir("runs")
    assert front(saved).recipe == recipe
    assert load(TrainRecipe, "quickstart/recipe.yaml") == recipe
    assert front(saved, "--cfg", "job").out == to_yaml(recipe)
    assert front(QUICKSTART, "--cfg", "job", "--resolve").out.startswith("run_name: quickstart\n")


def test_a_literal_dollar_brace_survives_saving(front: Front) -> None:
    write("r.yaml", "callbacks:\n  generate:\n    prompts: ['echo \\${HOME}', 'a\\b', '${seed}']\n")
    recipe = front("r.yaml").recipe
    assert recipe.callbacks.generate.prompts == ["echo ${HOME}", "a\\b", "17"]
    recipe.callbacks.generate.prompts.append("\\${x} \\\\${y}")
    write("saved.yaml", to_yaml(recipe))
    assert load(TrainRecipe, "saved.yaml") == recipe
    write("flat.yaml", front("r.yaml", "--cfg", "job").out)
    assert front("flat.yaml", "seed=3").recipe.callbacks.generate.prompts[2] == "3"


def test_an_unsound_recipe_is_printed_and_its_problems_follow(front: Front) -> None:
    got = front(QUICKSTART, "max_seq_len=1", "--cfg", "job")
    assert got.status == 2 and "\nmax_seq_len: 1\n" in got.out
    assert got.errors == ["max_seq_len: 1 is too small; write 2 or more"]


# Mistakes


MISTAKES = {
    "model.n_layres=4": "unknown key 'model.n_layres'; did you mean 'n_layers'?",
    "+model.n_layres=4": "unknown key 'model.n_layres'; did you mean 'n_layers'?",
    "modle=tiny": "unknown key 'modle'; did you mean 'model'?",
    "modle.n_layers=3": "unknown key 'modle'; did you mean 'model'?",
    "n_layers=4": "unknown key 'n_layers'; did you mean 'model.n_layers'?",
    "hydra.job.name=x": "unknown key 'hydra'",
    "~modle": "unknown key 'modle'; did you mean 'model'?",
    "optimizer=adamv": "could not find 'optimizer/adamv'; options: adamw, decoupled_adamw,"
    " decoupled_lionw, muon; did you mean 'adamw'?",
    "eval=true": "could not find 'eval/true'; options: core_v1, core_v2, extended_v1,"
    " extended_v2, generated, generated_easy, generated_hard, generated_long_context,"
    " instructions, light, lm_tasks, off, v0.1, v0.2, v0.3, validation",
    "model.n_layers=four": "model.n_layers: 'four' is not an integer",
    "model.n_layers=2.5": "model.n_layers: 2.5 is not an integer",
    "model.n_layers=true": "model.n_layers: true is not an integer",
    "model.n_layers=null": "model.n_layers: null is not an integer; write an integer, or remove"
    " the key",
    "optimizer.lr=fast": "optimizer.lr: 'fast' is not a number",
    "data.shuffle=maybe": "data.shuffle: 'maybe' is not true or false",
    "device_eval_batch_size=[1]": "device_eval_batch_size: [1] is not an integer or a text",
    "optimizer.betas=0.9": "optimizer.betas: 0.9 is not a list; write [0.9]",
    "optimizer.betas=[0.9,x]": "optimizer.betas[1]: 'x' is not a number",
    "model={n_layres: 1}": "unknown key 'model.n_layres'; did you mean 'n_layers'?",
    "eval=null": "eval: null is not a section; write its keys below it",
    "seed=???": "seed: is required; write seed=VALUE",
    "seed=1,2": "seed=1,2: several values; add -m to run each, or write a list, [1,2]",
    "seed=(1": "seed=(1: cannot be read; quote a text as seed='\"...\"'",
    "=4": "'=4' is not a setting; write key=value",
    "save_folder=${nope}": "save_folder: Interpolation key 'nope' not found;"
    " write \\${ for a literal ${",
    "--model.n_layers=4": "unknown flag '--model.n_layers=4'; settings have no dashes:"
    " model.n_layers=4 (flags: --help, --cfg job, --dry-run, --version, --resolve, -m)",
    "--multirum": "unknown flag '--multirum'; did you mean '--multirun'?"
    " (flags: --help, --cfg job, --dry-run, --version, --resolve, -m)",
    "--cfg=all": "--cfg: write --cfg job",
    "model.n_heads=5": "model.n_heads: 5 does not divide model.d_model (192);"
    " the nearest that does is 4",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line(front: Front, word: str) -> None:
    got = front(QUICKSTART, word)
    assert (got.status, got.out, got.recipe) == (2, "", None)
    assert MISTAKES[word] in got.errors


def test_all_mistakes_are_reported_at_once_each_with_file_and_line(front: Front) -> None:
    write("group/model/bad.yaml", "# a comment\nd_model: 64\nn_hed: 2\n")
    write(
        "group/my.yaml",
        "defaults: [model: bad]\nmax_durration: 3ba\noptimizer:\n  lr: fast\n  betas: [0.9, x]\n",
    )
    got = front("group/my.yaml", "seed=x")
    assert got.status == 2
    assert set(got.errors) == {
        "group/my.yaml:2: unknown key 'max_durration'; did you mean 'max_duration'?",
        "group/my.yaml:4: optimizer.lr: 'fast' is not a number",
        "group/my.yaml:5: optimizer.betas[1]: 'x' is not a number",
        "group/model/bad.yaml:3: unknown key 'model.n_hed'; did you mean 'n_heads'?",
        "seed: 'x' is not an integer",
    }


def test_what_check_finds_names_the_file_that_decided(front: Front) -> None:
    write("my.yaml", "max_seq_len: 1\nsave_interval: soon\n")
    errors = front("my.yaml", "save_interval=1ba").errors
    assert errors == ["my.yaml:1: max_seq_len: 1 is too small; write 2 or more"]


LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
BROKEN = {
    "seed: 1\nmodel:\n  n_layers: 2\n  n_layers: 3\n": "r.yaml:4: key 'n_layers' is given twice",
    "seed: 1\nmodel: [1,\nx: 2\n": "r.yaml:4: expected ',' or ']'",
    "seed: 1\n  model: 2\n": "r.yaml:2: mapping values are not allowed here",
    "seed: 1\n\tmodel: 2\n": "r.yaml:2: found character '\\t' that cannot start any token",
    "- seed\n": "r.yaml:1: holds no keys",
    "just text": "r.yaml:1: holds no keys",
    "defaults: {model: x}\n": "r.yaml:1: defaults: is not a list",
    "defaults: [model: mpt-125n]\n": "r.yaml: could not find 'model/mpt-125n'; options: ",
    "defaults: [modle: x]\n": "r.yaml: could not find 'modle/x'; groups: model, tokenizer,",
    "defaults: [nosuch]\n": "r.yaml: could not find the recipe 'nosuch' of the defaults list",
    "defaults: [r]\n": "r.yaml: defaults: a list here includes its own file",
    "defaults: [model: twice]\n": "model/twice.yaml:2: key 'd_model' is given twice",
    "defaults: [quickstart, eval: 'off']\n": "r.yaml: defaults: Multiple values for eval.",
    "model: tiny\n": "r.yaml:1: model: 'tiny' is not a section; write its keys below it,"
    " or `- model: tiny` in the defaults list",
    "hydra: {run: {dir: x}}\n": "r.yaml:1: unknown key 'hydra'",
    "seed: ???\n": "r.yaml:1: seed: is required; write seed=VALUE",
    "run_name: true\n": "r.yaml:1: run_name: true is not a text",
    "max_duration: null\n": "r.yaml:1: max_duration: null is not a text; write a text, or remove",
    "eval_interval: ${nope}\n": "r.yaml:1: eval_interval: Interpolation key 'nope' not found",
    "\x01": "r.yaml: is not a YAML text",
    "? [a, b]\n: 1\n": "r.yaml:1: a key here is a list or a mapping; a key is a text",
    "seed: 1\nmodel: &m\n  attn_config: *m\n": "r.yaml:2: an anchor here holds itself",
    "model: &m\n  <<: *m\n": "r.yaml:1: an anchor here holds itself",
    LAUGHS: "r.yaml:7: its anchors unfold to more than 4,194,304 characters",
    "defaults: [model: laughs]\n": "model/laughs.yaml:7: its anchors unfold to more than",
    "model:\n - !!python/object/apply:os.system [x]\n": "r.yaml:2: tag !!python/object/apply:os.",
    "seed: 1\n---\nseed: 2\n": "r.yaml:2: but found another document",
    "compile: !!bool maybe\n": "r.yaml:1: 'maybe' cannot be read as bool",
    f"seed: 1{'0' * 5000}\n": "r.yaml:1: '1000000000",
    "[" * 2000: "r.yaml: is nested more than 40 deep; flatten it",
    "model: " + "[" * 50 + "]" * 50: "r.yaml:1: is nested more than 40 deep; flatten it",
    "seed: ${seed}\n": "r.yaml:1: seed: ",
    "defaults: [{model: {a: b}}]\n": "r.yaml:1: defaults: {'model': {'a': 'b'}} is not a choice",
    "defaults: [model: loop]\n": "r.yaml: defaults: a list here includes its own file",
    "seed: 12:30\n": "r.yaml:1: seed: '12:30' is not an integer",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_recipe_is_one_line_with_its_place(front: Front, text: str) -> None:
    write("model/twice.yaml", "d_model: 1\nd_model: 2\n")
    write("model/loop.yaml", "defaults: [loop]\n")
    write("model/laughs.yaml", LAUGHS)
    write("r.yaml", text)
    got = front("r.yaml")
    assert got.status == 2 and len(got.errors) == 1
    assert got.errors[0].startswith(BROKEN[text])


def test_merge_keys_anchors_and_odd_keys_mean_what_they_say(front: Front) -> None:
    text = "model: &m {d_model: 64, n_heads: 2}\neval_interval: &e 5ba\nlog_interval: *e\n"
    write("r.yaml", f"\ufeff{text}data:\n  storage_options: {{1: {{<<: *m, d_model: 010}}}}\n")
    recipe = front("r.yaml").recipe
    assert (recipe.model.d_model, recipe.log_interval) == (64, "5ba")
    assert recipe.data.storage_options == {"1": {"d_model": "010", "n_heads": 2}}
    assert front("r.yaml").recipe == recipe, "reading a file again gives the same"


def test_an_argument_may_be_longer_than_a_file_name(front: Front) -> None:
    prompt = "word " * 80
    got = front("checkpoint=x", f"prompt={prompt}", schema=GenerateRecipe)
    assert got.recipe.prompt == prompt
    (line,) = front("x" * 300).errors
    assert line.startswith("no recipe at xxx")
    assert front("", schema=GenerateRecipe).errors[0].startswith("an argument is empty")
    assert (
        front("prompt=\udc80", schema=GenerateRecipe)
        .errors[0]
        .endswith("not UTF-8 text; write it so")
    )


def test_a_sweep_has_an_end(front: Front) -> None:
    (line,) = front(QUICKSTART, "-m", "seed=range(1,1000000000)").errors
    assert line == "seed=range(1,1000000000): has more than 10,000 points; write fewer"


@pytest.mark.parametrize("flags", [[], ["-m"]])
@pytest.mark.parametrize(
    "word",
    ["seed=range(1,3),4", "optimizer.betas=[interval(0,1),0.9]", "model={n_layers: choice(1,2)}"],
)
def test_a_sweep_inside_other_values_is_one_line(front: Front, word: str, flags: list[str]) -> None:
    (line,) = front(QUICKSTART, *flags, word).errors
    text = word.partition("=")[2]
    assert line == f"{text}: a range() or interval() among other values; write its values"


def test_only_true_and_false_are_booleans_and_dates_stay_texts(front: Front) -> None:
    write("r.yaml", "defaults: [eval: off]\nrun_name: 2024-01-01\ndata: {shuffle: off}\n")
    recipe = front("r.yaml").recipe
    assert (recipe.eval.validation, recipe.run_name) == (False, "2024-01-01")
    assert recipe.data.shuffle is False, "a switch may still be called on or off"


def test_a_missing_recipe_names_the_nearest(front: Front) -> None:
    write("yamls/dbrx.yaml", "")
    write("runs/dbrx/recipe.yaml", "")
    write("runs/dbrx/lr=2/recipe.yaml", "")
    near = {
        "yamls/dbrxx.yaml": "no recipe at yamls/dbrxx.yaml; did you mean yamls/dbrx.yaml?",
        "yaml/dbrx.yaml": "no recipe at yaml/dbrx.yaml; did you mean yamls/dbrx.yaml?",
        "runs/dbr/recipe.yaml": "no recipe at runs/dbr/recipe.yaml;"
        " did you mean runs/dbrx/recipe.yaml?",
        "runs/dbrx": "runs/dbrx is a folder; did you mean runs/dbrx/recipe.yaml?",
        "runs/dbrx/lr=1/recipe.yaml": "no recipe at runs/dbrx/lr=1/recipe.yaml;"
        " did you mean runs/dbrx/lr=2/recipe.yaml?",
        "mpt125m": "no recipe at mpt125m; did you mean mpt-125m?",
        "zzz.yaml": "no recipe at zzz.yaml",
    }
    assert {given: front(given).errors for given in near} == {k: [v] for k, v in near.items()}


def test_training_needs_a_recipe_or_a_name(front: Front) -> None:
    assert front().errors[0].startswith("no recipe given; write one as the first argument:")
    assert front("run_name=x", "model=mpt-125m").recipe.save_folder == "runs/x"
    assert front(QUICKSTART, "my.yaml").errors == [
        f"two recipes, {QUICKSTART} and my.yaml; write one, and settings as key=value"
    ]


def test_only_the_first_process_reports_what_all_of_them_find(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    got = front(QUICKSTART, "sed=1")
    assert (got.status, got.errors) == (2, [])


def test_what_the_target_raises_names_its_rank(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(recipe: object) -> None:
        raise UserError("one", "two")

    front(QUICKSTART)
    monkeypatch.setattr(sys.modules["remembering_target"], "remember", fail)
    assert (front(QUICKSTART).status, front(QUICKSTART).errors) == (2, ["one", "two"])
    monkeypatch.setenv("RANK", "3")
    assert front(QUICKSTART).errors == ["[rank 3] one", "[rank 3] two"]


def test_ctrl_c_ends_quietly(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(recipe: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["remembering_target"], "remember", interrupt)
    got = front(QUICKSTART)
    assert (got.status, got.errors) == (130, [])


def test_a_clash_with_the_other_distribution_is_reported(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: name)
    got = front(QUICKSTART)
    assert got.status == 2 and "pip uninstall llm-foundry" in got.errors[0]


# Files that recipes name


def test_shipped_files_are_found_from_here_and_then_from_the_repository() -> None:
    assert find_shipped("pyproject.toml", "key") == ROOT / "pyproject.toml"
    here = write("pyproject.toml", "").absolute()
    assert find_shipped("pyproject.toml", "key") == here
    with pytest.raises(UserError) as error:
        find_shipped("pyprojekt.toml", "eval.gauntlet")
    assert error.value.problems == (
        "eval.gauntlet: nothing at pyprojekt.toml; did you mean pyproject.toml?",
    )


def test_a_file_of_the_user_is_not_looked_for_in_the_repository() -> None:
    with pytest.raises(UserError) as error:
        find_file("pyproject.toml", "checkpoint")
    assert error.value.problems == ("checkpoint: nothing at pyproject.toml",)
    here = write("pyproject.toml", "").absolute()
    assert find_file("pyproject.toml", "checkpoint") == here


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("runs/quickstart", "train.py quickstart"),
        ("runs/quickstart-sft", "finetune.py finetune/quickstart-sft"),
    ],
)
def test_a_missing_run_of_a_shipped_recipe_names_the_command_that_trains_it(
    path: str, command: str
) -> None:
    write(f"{path}-2/recipe.yaml", "")  # nearly the same name
    with pytest.raises(UserError) as error:
        find_file(path, "model.pretrained")
    assert error.value.problems == (
        f"model.pretrained: nothing at {path}; train it first: python scripts/{command}",
    )


def test_the_folder_that_a_run_has_just_locked_is_not_suggested() -> None:
    write("runs/base-sft/run.lock", "")
    with pytest.raises(UserError) as error:
        find_file("runs/base", "model.pretrained")
    assert error.value.problems == ("model.pretrained: nothing at runs/base",)
    write("runs/base-sft/recipe.yaml", "")
    with pytest.raises(UserError, match=r"did you mean runs/base-sft\?"):
        find_file("runs/base", "model.pretrained")


# The real scripts, in processes of their own


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, str(ROOT / "scripts" / name), *words]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


def test_scripts_answer_from_any_folder() -> None:
    got = script("train.py", str(QUICKSTART), "--cfg", "job", "seed=99")
    assert got.returncode == 0 and "\nseed: 99\n" in got.stdout and got.stderr == ""
    got = script("prepare_data.py", str(QUICKSTART), "sed=99")
    assert (got.returncode, got.stderr) == (2, "unknown key 'sed'; did you mean 'seed'?\n")
    got = script("eval.py", "checkpoint=runs/x", "eval=off", "--cfg", "job")
    assert got.returncode == 0 and "\n  validation: false\n" in got.stdout
    assert script("convert.py").stderr.startswith("checkpoint: is required;")
    assert script("generate.py", "--help").stdout.startswith("Continue a prompt")


def test_the_front_needs_no_heavy_library() -> None:
    heavy = ["torch", "numpy", "transformers", "tokenizers", "datasets", "mlflow"]
    code = (
        "import sys; from llmfoundry.cli.script import run;"
        "from llmfoundry.recipe.train import TrainRecipe;"
        f"run(TrainRecipe, 'none:none', [{str(QUICKSTART)!r}, 'model=mpt-125m', '--cfg', 'job']);"
        f"sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert got.stderr == "[]\n"


def test_ctrl_c_during_the_imports_is_status_130_without_a_traceback() -> None:
    code = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "llmfoundry.cli.command_line":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from llmfoundry.cli.script import run
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (got.returncode, got.stderr) == (130, "")


@pytest.mark.parametrize("shape", ["'${%s}${%s}'", "{a: '${%s}', b: '${%s}'}"])
def test_interpolations_that_double_each_other_are_one_line(
    front: Front, tmp_path: Path, shape: str
) -> None:
    names = [f"data.storage_options.x{n}" for n in range(40)]
    lines = [f"    x{n}: {shape % (names[n + 1], names[n + 1])}" for n in range(39)]
    recipe = tmp_path / "doubling.yaml"
    recipe.write_text("data:\n  storage_options:\n" + "\n".join([*lines, "    x39: lol\n"]))
    outcome = front(recipe)
    assert outcome.status == 2 and len(outcome.errors) == 1
    assert "data: its interpolations make more than 1,048,576 characters" in outcome.errors[0]

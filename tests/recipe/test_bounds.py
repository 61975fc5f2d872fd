"""Numbers and paths that no run can use: one line each, before anything is computed with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmfoundry.errors import LONGEST_LINE, MOST_LINES, UserError
from llmfoundry.recipe.attention import BlockOverridesConfig, BlockRun
from llmfoundry.recipe.checks import divides
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.schema import Key, Range, Schema, check_fields
from llmfoundry.recipe.train import TrainRecipe
from tests.front import Front
from tests.recipe.mutations import SCRIPTS, SOUND

QUICKSTART = YAMLS / "quickstart.yaml"
LONG = "x" * 300


def numbers(schema: type) -> Iterator[tuple[str, type, Key]]:
    """Every key of a schema that takes a number, and whether it is an int or a float."""
    for dotted, key in Schema.of(schema).walk():
        for kind in (int, float):
            if kind in key.types:
                yield dotted, kind, key


@pytest.mark.parametrize("script", ["train", "prepare_data", "eval", "generate"])
def test_no_key_takes_a_number_that_no_machine_holds(script: str) -> None:
    schema = SCRIPTS[script]
    tried = [*numbers(TrainRecipe)] if script != "train" else []  # fields of the same classes
    given = [found for found in numbers(schema) if found not in tried]
    assert given
    sound = SOUND.get(script, ["run_name=x"])
    for key, kind, _ in given:
        value = "1e30" if kind is int else "nan"
        with pytest.raises(UserError) as error:
            checked(schema, None, [*sound, f"{key}={value}"])
        assert any(line.startswith(f"{key}: ") for line in error.value.problems), key


def test_a_range_has_two_ends_and_no_infinity_unless_it_says_so() -> None:
    def found(*values: float, rule: Range) -> list[bool]:
        return [rule.problem(value) is None for value in values]

    nan, inf = float("nan"), float("inf")
    assert found(-(2**63), 2**63 - 1, 2**63, 10**400, rule=Range()) == [False, True, False, False]
    assert found(-3e38, 3e38, 1e300, nan, inf, -inf, rule=Range()) == [True, True] + 4 * [False]
    assert found(0.0, 1e-9, inf, -inf, nan, 1e300, rule=Range(above=0, infinite=True)) == [
        *(False, True, True),
        *(False, False, False),
    ]
    assert found(1, 2, 8, 9, rule=Range(2, 8)) == [False, True, True, False]
    assert found(-0.1, 0, 0.999, 1, nan, rule=Range(0, below=1)) == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_bounds_reach_into_lists_and_mappings() -> None:
    words = ["run_name=x", "data.name=mixture"]
    phase = "data.phases=[{at: 1ba, proportions: {a: nan}}]"
    stream = "data.streams={a: {local: x, proportion: -1}}"
    with pytest.raises(UserError) as error:
        checked(TrainRecipe, None, [*words, phase, stream, "optimizer.betas=[0.9, inf]"])
    found = {line.split(":")[0] for line in error.value.problems}
    assert {"data.phases[0].proportions.a", "data.streams.a.proportion"} <= found
    assert "optimizer.betas[1]" in found


LINES = {  # a setting of quickstart -> its line
    "model.d_model=1000000001": "model.d_model: 1000000001 is too large; write 1048576 or less",
    "model.n_layers=1e9": "model.n_layers: 1000000000 is too large; write 4096 or less",
    "data.loader_workers=100000": "data.loader_workers: 100000 is too large; write 256 or less",
    "parallel.nproc_per_node=1e9": "parallel.nproc_per_node: 1000000000 is too large; write 1024",
    "optimizer.lr=inf": "optimizer.lr: inf is not a finite number",
    "model.norm_eps=nan": "model.norm_eps: nan is not a finite number",
    "callbacks.generate.temperature=inf": "callbacks.generate.temperature: inf is not a finite num",
    "global_train_batch_size=1e30": "global_train_batch_size: 1000000000000000019884624838656 is ",
    "seed=-1": "seed: -1 is too small; write 0 or more",
    f"seed={2**64}": "seed: 18446744073709551616 is too large",
    "run_name=../../x": "run_name: '../../x' cannot name a folder below runs/; write a name",
    "run_name=/tmp/x": "run_name: '/tmp/x' cannot name a folder",
    "run_name=.": "run_name: '.' cannot name a folder",
    "run_name=": "run_name: '' cannot name a folder",
    "run_name=-x": "run_name: '-x' cannot name a folder",
    "run_name=a\nb": "run_name: 'a\\nb' has characters that cannot be shown",
    "~seed=wrong": "'~seed=wrong' is not a setting; write ~key to give it its default",
    "max_duration=1e400ba": "max_duration: '1e400ba' is too long; write 1e+18 or less",
    f"data.cache_limit={'9' * 400}gb": f"data.cache_limit: '{'9' * 400}gb' is not a size",
    "data.download_timeout=inf": "data.download_timeout: inf is not a finite number",
    "callbacks.speed_window=1e18": "callbacks.speed_window: 1000000000000000000 is too large",
    "tokenizer.vocab_size=1e9": "tokenizer.vocab_size: 1000000000 is too large",
}


@pytest.mark.parametrize("word", LINES)
def test_what_would_hang_or_eat_the_machine_is_one_line(front: Front, word: str) -> None:
    got = front(QUICKSTART, word)
    assert got.status == 2 and got.recipe is None
    (line,) = got.errors
    assert line.startswith(LINES[word])


def test_a_run_name_is_what_a_folder_can_be_called(front: Front) -> None:
    assert front(QUICKSTART, f"run_name={LONG}").errors == [
        f"run_name: '{LONG}' is too long for a path (300 bytes)",
        f"save_folder: 'runs/{LONG}' is too long for a path (305 bytes)",
    ]
    for name in ("sizes/small", "lr=1e-3", "mön", "v1.0", "..x"):
        assert front(QUICKSTART, f"run_name={name}").recipe.save_folder == f"runs/{name}"


def test_infinity_clips_nothing(front: Front) -> None:
    assert front(QUICKSTART, "gradient_clipping.clipping_threshold=.inf").status == 0
    assert front(QUICKSTART, "gradient_clipping.clipping_threshold=nan").status == 2


PATHS = {  # every key that the file system, or a store, is asked for
    "train": "save_folder load_path eval.gauntlet data.cache_folder data.paths[0] data.dataset"
    " data.remote data.local tokenizer.path",
    "prepare_data": "prepare.output",
    "eval": "checkpoint output models[0] cache_folder",
    "generate": "checkpoint",
    "convert": "checkpoint output",
    "fetch_eval_data": "gauntlet from_foundry output table",
    "migrate": "theirs output",
}
NO_PATHS = {
    "''": "is empty; write a path",
    f"'{LONG}'": f"'{LONG}' is too long for a path (300 bytes)",
    f"'{'a/' * 3000}'": "is too long for a path (6000 bytes)",
    "'~nobody-here/x'": "~nobody-here/x: there is no such user; write the whole path",
}


@pytest.mark.parametrize("script", PATHS)
def test_what_no_path_can_be_is_refused_before_a_file_is_asked_for(script: str) -> None:
    for key in PATHS[script].split():
        name, _, index = key.partition("[")
        for value, why in NO_PATHS.items():
            word = f"{name}=[{value}]" if index else f"{name}={value}"
            with pytest.raises(UserError) as error:
                checked(SCRIPTS[script], None, [*SOUND.get(script, ["run_name=x"]), word])
            lines = [line for line in error.value.problems if line.startswith(f"{key}: ")]
            assert lines and lines[0].endswith(why), (key, value)
            assert Schema.of(SCRIPTS[script]).find(name) is not None


def test_an_address_may_be_longer_than_a_file_name() -> None:
    signed = f"https://host/shards?signature={'0' * 900}"
    words = ["run_name=x", "data.name=shards", f"data.remote='{signed}'", "tokenizer.name=bytes"]
    words += ["eval.validation=false"]
    assert checked(TrainRecipe, None, words).data.remote == signed


def test_texts_that_no_file_can_hold_are_reported(front: Front, tmp_path: Path) -> None:
    for text in ('"\\ud800"', '"a\\0"'):
        (tmp_path / "r.yaml").write_text(f"logger: {{experiment_name: {text}}}\n")
        got = front(tmp_path / "r.yaml")
        assert got.status == 2 and len(got.errors) == 1
        assert "logger.experiment_name: has a NUL character or half" in got.errors[0]


def test_divisors_are_found_in_time_of_the_square_root() -> None:
    for whole in range(1, 200):
        for part in range(1, 20):
            lines = list(divides("k", part, "w", whole))
            legal = [n for n in range(1, whole + 1) if whole % n == 0]
            nearest = min(legal, key=lambda n: (abs(n - part), n))
            assert bool(lines) == (part not in legal)
            assert not lines or lines[0].endswith(f"the nearest that does is {nearest}")
    began = time.process_time()
    assert next(divides("k", 7, "w", 10**12)).endswith("is 8")
    assert time.process_time() - began < 2


def test_an_order_of_layers_is_measured_before_it_is_laid_out() -> None:
    run = BlockRun("default", repeat=2**20)
    for _ in range(4):
        run = BlockRun(order=[run], repeat=2**20)
    config = ModelConfig(block_overrides=BlockOverridesConfig(order=[run]))
    (line,) = config.check()
    assert line == (
        f"model.block_overrides.order: is {2**100} layers long, but n_layers is {config.n_layers}"
    )


# Messages


def test_long_words_are_shortened_and_control_characters_shown(front: Front) -> None:
    word = "y" * 1_000_000
    for words in ([word], [f"seed={word}"], [f"{word}=1"], [f"load_path={word}"], [f"--{word}"]):
        got = front(QUICKSTART, *words)
        assert got.status == 2 and len(got.errors) == 1
        assert len(got.errors[0]) < LONGEST_LINE + 100 and "characters)" in got.errors[0]
    (line,) = front(QUICKSTART, "se\x1b\ned=1").errors
    assert line == "unknown key 'se\\x1b\\ned'; did you mean 'seed'?"


def test_of_many_problems_the_first_are_reported(front: Front, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("".join(f"nosuchkey{n}: 1\n" for n in range(2000)))
    began = time.process_time()
    got = front(tmp_path / "r.yaml")
    assert time.process_time() - began < 10
    assert len(got.errors) == MOST_LINES + 1
    assert got.errors[-1] == f"... and {2000 - MOST_LINES:,} problems more"


# Files


def test_what_is_no_file_is_no_recipe(front: Front, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        got = front(path)
        assert got.status == 2
        assert got.errors == [f"{path} is not a file; a device or a pipe cannot be a recipe"]
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "pipe.yaml")
    (tmp_path / "r.yaml").write_text("defaults: [model: pipe]\n")
    got = front(tmp_path / "r.yaml")
    assert got.status == 2 and len(got.errors) == 1


def test_a_huge_file_is_not_read(front: Front, tmp_path: Path) -> None:
    with (tmp_path / "r.yaml").open("wb") as file:
        file.truncate(1 << 30)
    got = front(tmp_path / "r.yaml")
    assert got.status == 2 and got.errors == [
        f"{tmp_path / 'r.yaml'}: has 1,073,741,824 bytes; a recipe has at most 1,048,576"
    ]


def test_every_default_is_in_bounds() -> None:
    for schema in SCRIPTS.values():
        assert not list(check_fields("", schema()))

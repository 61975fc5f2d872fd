"""What the recipe says of activations: LLM Foundry's grammar of targets, and every line."""

from __future__ import annotations

from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.parallel import PARTS, ParallelConfig, read_targets
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_dict

KEY = "parallel.activation_checkpointing_target"
WHOLE = "parallel.activation_checkpointing=whole"
LONG = "middle-2,range-4-6"
FOUNDRY: list[tuple[Any, dict[int, list[int]]]] = [
    # (range, {n_layers: blocks}): what `get_target_block_list` of LLM Foundry 0.22's
    # models/utils/act_ckpt.py gave, run beside this; its ids behind the last block left out
    (1, {5: [0], 6: [0]}),
    (9, {5: [0, 1, 2, 3, 4], 40: [0, 1, 2, 3, 4, 5, 6, 7, 8]}),
    ("first-2", {5: [0, 1], 6: [0, 1]}),
    ("first-99", {5: [0, 1, 2, 3, 4]}),
    ("middle-1", {5: [2], 6: [2], 7: [3], 40: [19]}),
    ("middle-2", {5: [1, 2], 6: [1, 2], 7: [2, 3], 40: [18, 19]}),
    ("middle-3", {5: [1, 2, 3], 6: [1, 2, 3], 7: [2, 3, 4], 40: [18, 19, 20]}),
    ("last-2", {5: [3, 4], 6: [4, 5], 40: [38, 39]}),
    ("last-9", {5: [0, 1, 2, 3, 4], 40: [31, 32, 33, 34, 35, 36, 37, 38, 39]}),
    ("range-1-3", {5: [1, 2], 40: [1, 2]}),
    ("range-0-99", {6: [0, 1, 2, 3, 4, 5]}),
    ("first-1, last-1", {5: [0, 4], 7: [0, 6]}),
    (LONG, {5: [1, 2, 4], 6: [1, 2, 4, 5], 7: [2, 3, 4, 5], 40: [4, 5, 18, 19]}),
    ([1, "last-2"], {5: [1, 3, 4], 40: [1, 38, 39]}),
    (["first-1", 3], {5: [0, 3], 7: [0, 3]}),
    ([0, 2], {5: [0, 2]}),
]


@pytest.mark.parametrize(("where", "expected"), FOUNDRY, ids=lambda value: str(value)[:20])
def test_a_range_names_the_blocks_that_llm_foundry_takes(
    where: Any, expected: dict[int, list[int]]
) -> None:
    for n_layers, blocks in expected.items():
        targets = read_targets({"attention": where}, n_layers, KEY)
        assert [i for i, parts in enumerate(targets) if parts == {"attention"}] == blocks


def test_names_of_llm_foundry_are_parts_of_ours() -> None:
    of = {  # its FusedNormAttentionNorm is both norms of a block and what lies between
        "norm_attn_norm": {"norm", "attention"},
        "MPTBlock": {"block"},
        "grouped_query_attention": {"attention"},
        "mptglu": {"feed_forward"},
        "mb_dmoe": {"feed_forward"},
        "low_precision_layernorm": {"norm"},
    }
    for name, parts in of.items():
        assert read_targets(name, 2, KEY) == (frozenset(parts),) * 2
    assert read_targets(None, 2, KEY) == (frozenset({"block"}),) * 2
    both = read_targets({"mptblock": [1], "grouped_query_attention": "first-1, last-1"}, 3, KEY)
    assert both == ({"attention"}, {"block"}, {"attention"})  # its own test's example
    assert read_targets(["attention", "norm"], 1, KEY) == ({"attention", "norm"},)


WRONG = {  # of a model of 2 layers
    "[attention,block]": "block 0 is in the ranges of attention and block, which overlap; give",
    "{block: first-2, attention: last-1}": "block 1 is in the ranges of block and attention, which",
    "[experts,feed_forward]": "block 0 is in the ranges of experts and feed_forward, which overlap",
    "[norm,norm_attn_norm]": "block 0 is in the ranges of norm and norm_attn_norm, which overlap",
    "[attention,attention]": "attention is listed twice; write it once",
    "atention": "atention is no part of a block; did you mean 'attention'?; write block, attention",
    "{atention: 1}": "atention is no part of a block; did you mean 'attention'?; write block, atte",
    "{attention: [2]}": "attention: there is no block 2; write 0 to 1",
    "{attention: [-1]}": "attention: there is no block -1; write 0 to 1",
    "{attention: 0}": "attention: 0 is no block of 2; write a number n (the first n), first-n, mid",
    "{attention: range-5-9}": "attention: range-5-9 is no block of 2; write a number n (the firs",
    "{attention: firs-2}": "attention: 'firs-2' is no range of blocks; write a number n (the first",
    "{attention: range-1}": "attention: 'range-1' is no range of blocks; write a number n (the fir",
    "{attention: 1.5}": "attention: 1.5 is no range of blocks; write a number n (the first n), fir",
    "{attention: [true]}": "attention: True is no range of blocks; write a number n (the first n),",
    "{attention: null}": "attention: None is no range of blocks; write a number n (the first n), f",
    "[]": "names nothing; write block, or remove it",
    "{}": "names nothing; write block, or remove it",
    "experts": "the model has no experts; write feed_forward",
}


def problems(*words: str) -> tuple[str, ...]:
    try:
        checked(TrainRecipe, None, ["run_name=x", "model.n_layers=2", *words])
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("target", WRONG)
def test_a_wrong_target_is_one_line_that_names_its_key(target: str) -> None:
    (line,) = problems(WHOLE, f"{KEY}={target}")
    assert line.startswith(KEY) and WRONG[target] in line


BUDGET = "parallel.activation_memory_budget"
ELSEWHERE = {
    (f"{KEY}=block",): f"{KEY}: has no effect with parallel.activation_checkpointing: none, ",
    (f"{KEY}=block", WHOLE.replace("whole", "selective")): f"{KEY}: has no effect with",
    (f"{BUDGET}=0.5",): f"{BUDGET}: has no effect without compile: true; remove it",
    (f"{BUDGET}=0.1", "compile=true"): f"{BUDGET}: 0.1; below 0.15 a smaller budget takes more mem",
    (f"{BUDGET}=1.5", "compile=true"): f"{BUDGET}: 1.5 is too large; write 1 or less",
    (f"{BUDGET}=nan", "compile=true"): f"{BUDGET}: nan is not a finite number",
    (f"{BUDGET}=0.5", "compile=true", WHOLE): f"{BUDGET}: with activation_checkpointing: whole two",
    ("parallel.activation_compression=int4",): "parallel.activation_compression: 'int4' is not a",
    (
        "parallel.activation_compression=int8",
        "compile=true",
        "compile_mode=reduce-overhead",
    ): "parallel.activation_compression: compile_mode: reduce-overhead keeps what its CUDA graphs",
    (
        "model.ffn_config={ffn_type: dmoe, moe_num_experts: 4, moe_compress_activations: true}",
    ): "model.ffn_config.moe_compress_activations: experts are compressed with all else of their b",
}


@pytest.mark.parametrize("words", ELSEWHERE, ids=" ".join)
def test_settings_that_exclude_each_other_are_one_line(words: tuple[str, ...]) -> None:
    (line,) = problems(*words)
    assert line.startswith(ELSEWHERE[words])


def test_an_earlier_recipes_compression_that_was_off_is_read() -> None:
    experts = "{ffn_type: dmoe, moe_num_experts: 4, moe_compress_activations: false}"
    recipe = checked(TrainRecipe, None, ["run_name=x", f"model.ffn_config={experts}"])
    assert "moe_compress_activations" not in to_dict(recipe)["model"]["ffn_config"]


def test_the_section_says_how_each_block_is_kept() -> None:
    config = ParallelConfig(
        activation_checkpointing=True,
        activation_checkpointing_target={"experts": 1, "block": "last-1"},
        activation_compression="int8",
    )
    memory = config.activation_memory(3)
    assert memory.targets == ({"experts"}, frozenset(), {"block"})
    recomputed = [[part for part in PARTS if memory.recomputes(i, part)] for i in range(3)]
    assert recomputed == [["experts"], [], list(PARTS)]
    assert (memory.checkpointing, memory.compression, memory.budget) == ("whole", "int8", None)
    none = ParallelConfig().activation_memory(2)
    assert (none.checkpointing, none.targets) == ("none", (frozenset(), frozenset()))

"""Predicted seconds beside arithmetic by hand, counted FLOPs, published runs and a full search."""

from __future__ import annotations

import dataclasses
import statistics
from itertools import islice

import pytest

from benchmarks.layouts import spread
from benchmarks.published import llm_foundry, others
from llmfoundry.models.counts import parts
from llmfoundry.plan.communication import BASE, HOP, CollectiveTraffic
from llmfoundry.plan.count import count
from llmfoundry.plan.layouts import Cluster, candidate_layouts, own_layout, rank
from llmfoundry.plan.search import ActivationChoice, Fit, Search, choices, memory_limits
from llmfoundry.plan.seconds import (
    COPIES,
    CUDA,
    FLEX,
    SHORT,
    STRAGGLING,
    Matmul,
    head,
    products,
    speeds,
    step_seconds,
    unmeasured,
)
from llmfoundry.recipe.hardware import GPUS
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.parallel import Degrees
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe

A100, H100 = GPUS["A100 80GB"], GPUS["H100"]
FAST = 1e18  # bytes/s: memory that bounds nothing


def test_a_product_takes_as_many_waves_of_tiles_as_it_needs() -> None:
    """108 multiprocessors: 12 x 9 tiles of 128 x 256 are one full wave, one more row a second."""
    full = Matmul(12 * 128, 9 * 256, 4096)
    assert full.seconds(A100, flops=1e14, moved=FAST) == pytest.approx(full.flops / 1e14)
    more = Matmul(12 * 128 + 1, 9 * 256, 4096)
    assert more.seconds(A100, flops=1e14, moved=FAST) > 1.2 * full.flops / 1e14
    small = Matmul(64, 64, 4096)  # a tile of one multiprocessor, at half of its speed
    assert small.seconds(A100, flops=1e14, moved=FAST) == pytest.approx(
        108 * 2 * small.flops / 1e14
    )
    thin = Matmul(1, 4096, 4096)  # bound by the matrix that it reads
    read = 2 * (4096 + 4096 * 4096 + 4096)
    assert thin.seconds(A100, flops=1e18, moved=1e12) == pytest.approx(read / 1e12)


@pytest.mark.parametrize("name", ["mpt-1b", "llama-1b", "dbrx-1b"])
@pytest.mark.parametrize("degrees", [Degrees(shard=8), Degrees(shard=4, tensor=2)], ids=str)
def test_products_have_the_flops_that_are_counted(name: str, degrees: Degrees) -> None:
    """Fake tensors go through the model's own code; here are the shapes of its matrices alone."""
    if name == "dbrx-1b" and degrees.tensor > 1:
        pytest.skip("its heads do not divide")
    recipe = spread(name, ["model.n_layers=2", "max_seq_len=512"])
    counted = count(recipe, degrees, device=CUDA)
    mine = sum(
        n * one.flops
        for block, n in parts(recipe.model)[1:]
        for one in products(block, recipe.model, degrees, 512)
    )
    ends = counted.ends.forward.row.products + counted.ends.backward.row.products
    assert mine == pytest.approx(counted.forward.row.products - counted.ends.forward.row.products,
                                 rel=0.01)  # fmt: skip
    assert 3 * head(recipe.model, degrees, 512).flops == pytest.approx(ends, rel=0.01)


def test_a_message_takes_its_latency_and_the_slower_of_both_links() -> None:
    inside = CollectiveTraffic("weights", "all_gather", 8, 1, 10**9, calls=2)
    assert inside.seconds(H100) == pytest.approx(2 * (BASE + 7 * HOP) + 1 / (0.8 * 450))
    out = inside._replace(processes=16, between=250 * 10**6)
    assert out.seconds(H100) > 0.25 / (0.9 * 50) > 1 / (0.8 * 450)


def test_two_gpus_of_a_board_without_switches_reach_a_third_of_the_links() -> None:
    """A board of four has no switches: each pair of GPUs has six of a GPU's eighteen links."""
    board = dataclasses.replace(H100, node=4)
    pair = CollectiveTraffic("activations", "all_gather", 2, 1, 10**9, calls=1)
    assert pair.seconds(board) == pytest.approx(BASE + HOP + 3 / (0.8 * 450))
    assert pair.seconds(H100) == pytest.approx(BASE + HOP + 1 / (0.8 * 450))
    four = pair._replace(processes=4)
    assert four.seconds(board) == four.seconds(H100)
    apart = pair._replace(apart=2)  # one rank of each half of the board
    assert apart.seconds(board) == pair.seconds(board)


def test_a_power_limit_slows_matmuls_and_attention_by_its_cube_root() -> None:
    recipe = spread("mpt-1b", SMALL)
    limited = speeds(dataclasses.replace(H100, power=0.512), recipe)
    full = speeds(H100, recipe)
    assert limited.products == pytest.approx(0.8 * full.products)
    assert limited.attention == pytest.approx(0.8 * full.attention)
    assert limited.memory == full.memory


def test_every_doubling_of_the_nodes_adds_the_same_share() -> None:
    recipe = spread("mpt-1b", [*SMALL, "global_train_batch_size=64"])
    steps = [step_seconds(recipe, gpus, 1, speeds(H100, recipe)) for gpus in (8, 16, 64)]
    for step, doublings in zip(steps, (0, 1, 3), strict=True):  # communication does not wait
        computing = step.products + step.attention + step.memory + step.again + step.beside
        assert step.stragglers == pytest.approx(doublings * STRAGGLING * computing)


LATENT = [
    "model.attn_config.attn_type=multihead_latent_attention",
    "~model.attn_config.kv_n_heads",
    "model.attn_config.kv_lora_rank=512",
    "model.attn_config.qk_nope_head_dim=128",
    "model.attn_config.qk_rope_head_dim=64",
    "model.attn_config.v_head_dim=128",
]


def test_latent_attention_multiplies_queries_and_keys_wider_than_values() -> None:
    """DeepSeek's widths: q k^T over 128 + 64 numbers a head, the sum of values over 128."""
    recipe = spread("llama-1b", [*SMALL, *LATENT])
    reached = speeds(H100, recipe)
    step = step_seconds(recipe, 1, 4, reached)
    pairs = 64 * 2048 * 2048 / 2  # tokens of 64 sequences, and the keys that each sees
    flops = 3.5 * 2 * pairs * (192 + 128) * recipe.model.n_heads * recipe.model.n_layers
    assert step.attention == pytest.approx(flops / reached.attention * (2048 + SHORT) / 2048)
    assert "latent attention" in unmeasured(recipe)[0]


def test_sinks_are_counted_at_the_speed_of_their_kernel_and_named() -> None:
    plain = spread("llama-1b", SMALL)
    sinks = spread("llama-1b", [*SMALL, "model.attn_config.sinks=true"])
    assert speeds(H100, sinks).attention == pytest.approx(FLEX * speeds(H100, plain).attention)
    assert "sinks" in unmeasured(sinks)[0] and not unmeasured(plain)


@pytest.mark.parametrize("name", ["H100", "B200"])
def test_experts_in_fp8_save_two_of_three_matmuls_and_pay_for_casts(name: str) -> None:
    """Output and gradient of the input in 8 bits on these GPUs; not gradients of weights."""
    recipe, gpu = spread("dbrx-1b", [*SMALL, "precision=amp_fp8"]), GPUS[name]
    reached = speeds(gpu, recipe)
    other = speeds(dataclasses.replace(gpu, fp8_experts=False), recipe)
    step, plain = (step_seconds(recipe, 1, 4, each) for each in (reached, other))
    narrow, values = 0.0, 0.0
    for block, n in parts(recipe.model)[1:]:
        for matmul in products(block, recipe.model, recipe.parallel.degrees(1), 4 * 2048):
            if matmul.groups == 1:
                continue
            for each in (matmul, matmul.backward()[0]):
                times = [
                    each.seconds(gpu, flops=flops, moved=reached.memory)
                    for flops in (reached.products, reached.fp8)
                ]
                narrow += 16 * n * (times[0] - times[1])
                values += 16 * n * each.groups * (each.rows + each.columns) * each.inner
    assert narrow > 0.15 * plain.products
    assert plain.products - step.products == pytest.approx(narrow)
    assert step.memory - plain.memory == pytest.approx(values * reached.cast / reached.memory)
    # sides that MXFP8 does not take
    odd = dataclasses.replace(gpu, fp8_multiple=recipe.model.d_model * 2)
    assert step_seconds(recipe, 1, 4, speeds(odd, recipe)) == plain


def test_published_runs_that_fitted_nothing_are_predicted() -> None:
    """Some rows of LLM Foundry's table, A100 and H100: median within a tenth, none off by half."""
    rows = [row for row in llm_foundry(["mpt-1b"], every=5) if not row.is_fitted]
    ratios = [row.predict().total / row.seconds for row in rows]
    assert len(ratios) > 6
    assert 0.9 < statistics.median(ratios) < 1.1
    assert all(0.6 < ratio < 1.4 for ratio in ratios)


def test_what_is_compiled_moves_fewer_bytes() -> None:
    plain, compiled = (row.predict() for row in islice(others(), 2))
    assert compiled.memory < 0.6 * plain.memory and compiled.products == plain.products


def test_a_compiled_recipe_compiles_blocks_and_no_loss() -> None:
    """Bytes of blocks are those of fused kernels, and bytes of the loss those of its own code."""
    recipe = spread("llama-1b", [*SMALL, "compile=true"])
    step = step_seconds(recipe, 1, 4, speeds(H100, recipe))
    counted = count(recipe, recipe.parallel.degrees(1), device=CUDA)
    ends = [one.of(4).moved for one in (counted.ends.forward, counted.ends.backward)]
    blocks = [
        each.blocks * one.of(4).fused
        for each in counted.blocks
        for one in (each.forward, each.backward)
    ]
    moved = 16 * (sum(ends) + sum(blocks))  # 64 sequences, 4 at a time
    assert step.memory == pytest.approx(moved / (COPIES * H100.memory_gb_s * 1e9))


SMALL = ["max_seq_len=2048", "global_train_batch_size=64"]


@pytest.mark.parametrize(
    ("name", "gpus"), [("mpt-125m", 2), pytest.param("dbrx-1b", 8, marks=pytest.mark.slow)]
)
def test_the_first_layout_is_the_fastest_of_all(name: str, gpus: int) -> None:
    """A search of every candidate, with every microbatch that fits, finds none that is better."""
    recipe = spread(name, SMALL)
    setting = Cluster(gpus, speeds(H100, recipe), 77 * 10**9)
    found = rank(recipe, setting, 3)
    limit, every = memory_limits(setting.available, CUDA)[0], list[Fit]()
    candidates = [*candidate_layouts(recipe, setting)]
    for one in candidates:
        search = Search(one, gpus, CUDA, reached=setting.reached, roughly=True)
        blocks = [ActivationChoice("whole", blocks=n) for n in range(1, recipe.model.n_layers)]
        plain = [choice for choice in choices(one, CUDA) if choice.blocks is None]
        every += [search.fit(way, n, limit) for way in (*plain, *blocks) for n in search.sizes()]
    least = min(fit.cost for fit in every if fit.need.total(fit.microbatch, 2.0) <= fit.room)
    assert found.best[0].cost <= 1.03 * least  # traffic of the others is a bound
    assert found.estimated <= found.looked_at <= len(candidates)
    assert found.best[0].fits and [one.cost for one in found.best] == sorted(
        one.cost for one in found.best
    )


def test_what_it_says_to_write_gives_that_layout() -> None:
    recipe = spread("mpt-1b", SMALL)
    setting = Cluster(8, speeds(H100, recipe), 40 * 10**9)
    written = checked(TrainRecipe, YAMLS / "mpt-1b.yaml", SMALL)
    for layout in rank(recipe, setting, 6).best:
        again = spread("mpt-1b", [*SMALL, *layout.overrides(written)])
        own = own_layout(again, setting)
        assert own.step.total == pytest.approx(layout.step.total)
        assert (own.choice, own.microbatch) == (layout.choice, layout.microbatch)
        assert own.name() == layout.name()


def test_more_recomputation_takes_longer_and_parts_add_up() -> None:
    totals = []
    for level in ("none", "selective", "whole"):
        recipe = spread("mpt-1b", [*SMALL, f"parallel.activation_checkpointing={level}"])
        step = step_seconds(recipe, 8, 2, speeds(H100, recipe))
        assert step.total == pytest.approx(sum(step.split().values()))
        assert step.hfu(H100) >= step.mfu(H100) > 0.2
        totals.append(step.total)
    assert totals == sorted(totals) and totals[2] < 1.4 * totals[0]

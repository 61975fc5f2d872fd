"""What is counted on fake tensors, against what PyTorch itself counts and keeps."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.models.counts import flops_per_token
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.loss import linear_cross_entropy
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.plan import count as counting
from llmfoundry.plan.count import ModelCount, count
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.parallel import Degrees
from llmfoundry.recipe.train import TrainRecipe

GPU = torch.device("cuda")  # nothing is placed on it
LENGTH = 128


def make_recipe(**parallel: object) -> TrainRecipe:
    model = ModelConfig(
        d_model=128,
        n_heads=4,
        n_layers=4,
        vocab_size=512,
        norm_type="rmsnorm",
        no_bias=True,
        attn_config=AttentionConfig(rope=True),
        ffn_config=FFNConfig("mptglu", "silu", 352),
    )
    recipe = TrainRecipe(
        model=model, max_seq_len=LENGTH, precision="amp_bf16", global_train_batch_size=64
    )
    for key, value in parallel.items():
        setattr(recipe.parallel, key, value)
    recipe = recipe.resolve()
    return recipe


def mixture(**parallel: object) -> TrainRecipe:
    recipe = make_recipe(**parallel)
    recipe.model.ffn_config = FFNConfig(
        "dmoe", "silu", 96, mlp_type="glu", moe_num_experts=8, moe_top_k=2
    )
    recipe = recipe.resolve()
    return recipe


def products(counted: ModelCount, rows: int = 1) -> float:
    return sum(part.of(rows).products for part in (counted.forward, counted.backward))


@pytest.mark.parametrize("make", [make_recipe, mixture])
def test_products_are_three_times_the_parameters_that_a_token_meets(make: type) -> None:
    recipe = make()
    counted = count(recipe, Degrees(), device=GPU)
    model = recipe.model
    attention = 12 * model.n_layers * model.d_model * LENGTH  # as counts.py has it: all keys
    expected = LENGTH * (flops_per_token(model, LENGTH) - attention)
    # routers multiply three parts of their weight forward, four of the gradient and three backward
    experts = model.ffn_config.moe_num_experts or 0
    expected += LENGTH * (2 + 3 + 2) * 2 * model.n_layers * model.d_model * experts
    assert products(counted) == pytest.approx(expected, rel=1e-6)
    forward = counted.forward.of(1).attention
    assert forward == LENGTH * attention / 3 * (LENGTH + 1) / (2 * LENGTH)  # causal
    assert counted.backward.of(1).attention == 2.5 * forward


@pytest.mark.parametrize(("precision", "expected"), [("amp_bf16", 10), ("fp32", 12)])
def test_the_loss_moves_ten_bytes_a_logit_on_a_gpu(precision: str, expected: int) -> None:
    ends = []
    for vocabulary in (512, 1024):
        recipe = make_recipe()
        recipe.model.vocab_size, recipe.precision = vocabulary, precision
        ends.append(count(recipe, Degrees(), device=GPU).ends.forward.row)
    few, many = ends
    assert many.moved - few.moved == many.fused - few.fused == expected * 512 * LENGTH


def test_a_capacity_costs_memory_but_no_products_of_unused_rows() -> None:
    """And then the load of experts costs no more."""
    degrees = Degrees(shard=8, expert=4)
    exact = count(mixture(), degrees, device=GPU)
    bounded = count(mixture(expert_parallel_degree=4, expert_capacity=2.0), degrees, device=GPU)
    assert products(bounded) == pytest.approx(products(exact), rel=1e-6)
    (before,), (after,) = exact.blocks, bounded.blocks
    assert after.kept.row > 1.2 * before.kept.row
    assert before.kept.load > 0 == after.kept.load


def test_experts_in_fp32_are_counted_as_others() -> None:
    """A GPU multiplies them, though PyTorch's fake operator refuses."""
    exact, mixed = mixture(), mixture()
    exact.precision = "fp32"
    found = [products(count(recipe, Degrees(), device=GPU)) for recipe in (exact, mixed)]
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_the_same_products_as_a_real_step_by_pytorchs_counter() -> None:
    recipe = make_recipe()
    recipe.precision = "fp32"
    model = Decoder(recipe.model)
    model.init_weights(1)
    tokens = torch.zeros(3, LENGTH, dtype=torch.long)
    layout = PackedLayout.from_lengths([[64, 64]] * 3)
    with FlopCounterMode(display=False) as counter:
        loss = Root(model)(
            tokens, layout, lambda m, h: linear_cross_entropy(h, m.head_weight, tokens)
        )
        loss.backward()
    assert products(count(recipe, Degrees()), rows=3) == counter.get_total_flops()


def test_a_gpu_s_rmsnorm_is_one_kernel_that_keeps_its_input() -> None:
    """As its LayerNorm does, whose bias and mean are hardly any bytes."""
    blocks = []
    for norm in ("layernorm", "rmsnorm"):
        recipe = make_recipe()
        recipe.model.norm_type, recipe.model.no_bias = norm, True
        blocks.append(count(recipe, Degrees(), device=GPU).blocks[0])
    layer, rms = blocks
    assert rms.kept.row == pytest.approx(layer.kept.row, rel=0.01)
    assert rms.forward.fixed.launches == layer.forward.fixed.launches
    assert rms.backward.fixed.launches == layer.backward.fixed.launches


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_bf16_residual_stream_keeps_half_of_the_stream(norm: str) -> None:
    kept = []
    for dtype in ("fp32", "bf16"):
        recipe = make_recipe()
        recipe.model.norm_type, recipe.residual_dtype = norm, dtype
        kept.append(count(recipe, Degrees(), device=GPU).blocks[0].kept.row)
    stream = LENGTH * 128  # values that each of two norms keeps
    assert kept[0] - kept[1] >= 2 * 2 * stream


def test_whole_blocks_compute_their_forward_pass_again() -> None:
    plain = count(make_recipe(), Degrees(), device=GPU)
    again = count(make_recipe(activation_checkpointing="whole"), Degrees(), device=GPU)
    assert plain.again.of(1).products == 0
    (block,), (one,) = plain.blocks, again.blocks
    assert one.forward.of(4).products == block.forward.of(4).products
    assert one.backward.of(4).products == block.backward.of(4).products
    # PyTorch stops once all that was kept is there: before the last product
    last = 2 * LENGTH * 352 * 128
    assert one.again.of(1).products == block.forward.of(1).products - last
    assert one.kept.row == LENGTH * 128 * 4  # the stream, in fp32
    assert one.again.of(2).attention == block.forward.of(2).attention


def test_blocks_that_keep_other_parts_are_kinds_of_their_own() -> None:
    target = {"feed_forward": "first-1, last-1", "attention": "range-1-2"}
    recipe = make_recipe(activation_checkpointing="whole", activation_checkpointing_target=target)
    found = count(recipe, Degrees(), device=GPU).blocks
    assert sorted(block.blocks for block in found) == [1, 1, 2]
    (plain,) = count(make_recipe(), Degrees(), device=GPU).blocks
    assert sorted(block.kept.row < plain.kept.row for block in found) == [False, True, True]


def test_eight_bits_keep_about_half() -> None:
    (plain,) = count(make_recipe(), Degrees(), device=GPU).blocks
    packed = count(make_recipe(activation_compression="int8"), Degrees(), device=GPU).blocks[0]
    assert 0.3 < packed.kept.row / plain.kept.row < 0.6


def test_the_compilers_kernels_move_less() -> None:
    forward = count(make_recipe(), Degrees(), device=GPU).blocks[0].forward.of(8)
    assert forward.fused < 0.7 * forward.moved
    assert forward.fused_launches < forward.launches


@pytest.mark.parametrize("degree", ["tensor", "context", "expert"])
def test_processes_share_products_and_leave_no_group(degree: str) -> None:
    recipe = mixture() if degree == "expert" else make_recipe()
    alone = count(recipe, Degrees(shard=4), device=GPU)
    shared = count(recipe, dataclasses.replace(Degrees(shard=4), **{degree: 4}), device=GPU)
    assert not dist.is_initialized()
    ratio = products(shared) / products(alone)
    assert ratio == pytest.approx(1 if degree == "expert" else 1 / 4, rel=0.02)
    assert shared.blocks[0].kept.row < alone.blocks[0].kept.row or degree == "expert"
    assert (shared.blocks[0].kept.load > 0) == (degree == "expert")


def test_nothing_of_the_count_stays_behind() -> None:
    """No fake tensor in a table that lasts, and the same code for real tensors as before."""
    count(mixture(), Degrees(), device=GPU)
    count(mixture(), Degrees(), device=torch.device("cpu"))
    recipe = mixture()
    recipe.precision = "fp32"
    model = Decoder(recipe.model)
    model.init_weights(1)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    loss = Root(model)(tokens, None, lambda m, h: m.loss(h, tokens))
    assert loss.isfinite()


def test_counts_are_equal_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks choose by counts: neither collections of cycles nor addresses may change them."""
    recipe = mixture(activation_checkpointing="selective")
    thresholds, counts, kept = gc.get_threshold(), [], []
    for limit in (1_000_000, 10, 50, 150, 700):
        monkeypatch.setattr(counting, "_known", {})
        kept.append([torch.empty(limit) for _ in range(limit % 97)])  # moves later storages
        gc.set_threshold(limit, 1, 1)
        try:
            counts.append(count(recipe, Degrees(shard=2), device=GPU))
        finally:
            gc.set_threshold(*thresholds)
    assert all(each == counts[0] for each in counts)

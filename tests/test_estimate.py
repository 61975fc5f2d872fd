"""Estimates against what PyTorch really keeps."""

from __future__ import annotations

import copy
import os
import types
from typing import Any

import psutil
import pytest
import torch

from llmfoundry.distributed.process_group import World, relaunch
from llmfoundry.errors import UserError
from llmfoundry.models.adapter import add_adapter, init_adapter
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.quantized import narrow_frozen, place, quantize_frozen, quantized_shapes
from llmfoundry.ops import nf4
from llmfoundry.ops.loss import linear_cross_entropy
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.plan import fit
from llmfoundry.plan.count import count
from llmfoundry.plan.fit import (
    check_workers,
    checkpointing_line,
    choose_fit,
    choose_microbatch,
    load_line,
)
from llmfoundry.plan.memory import estimate, weight_bytes
from llmfoundry.plan.microbatch_sizes import FRAMEWORK, USABLE
from llmfoundry.plan.search import ActivationChoice
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.parallel import Degrees, ParallelConfig
from llmfoundry.recipe.train import TrainRecipe
from tests.selection import slow_but

SETTINGS: dict[str, dict[str, Any]] = {
    "mpt": {},
    "llama": {
        "attn_config": AttentionConfig(rope=True),
        "ffn_config": FFNConfig("mptglu", "silu", 352),
        "norm_type": "rmsnorm",
        "no_bias": True,
    },
    "gqa": {
        "attn_config": AttentionConfig(
            attn_type="grouped_query_attention", kv_n_heads=2, rope=True, clip_qkv=8.0
        )
    },
}

LAST = 2 * 4 * 128 * 256  # of a row: the final norm's input, and the gradient of its output
GPU, CPU = torch.device("cuda"), torch.device("cpu")  # nothing is placed on either


def make_recipe(name: str, precision: str) -> TrainRecipe:
    settings = copy.deepcopy(SETTINGS[name])
    model = ModelConfig(d_model=128, n_heads=4, n_layers=6, vocab_size=512, **settings)
    recipe = TrainRecipe(
        model=model, max_seq_len=256, precision=precision, global_train_batch_size=64
    )
    recipe = recipe.resolve()
    return recipe


def kept_bytes(recipe: TrainRecipe, rows: int, model: Decoder | None = None) -> int:
    """Bytes of distinct storages that autograd saves in a forward pass, weights left out."""
    if model is None:
        model = Decoder(recipe.model)
        model.init_weights(1)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    alive: list[torch.Tensor] = []
    tokens = torch.randint(0, 512, (rows, 256))
    low = recipe.precision == "amp_bf16"
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=low):
        layout = PackedLayout.from_lengths([[128, 128]] * rows)
        Root(model)(tokens, layout, lambda m, h: linear_cross_entropy(h, m.head_weight, tokens))
    return sum(kept.values())


def counted_bytes(recipe: TrainRecipe, model: Decoder | None = None) -> float:
    """Bytes of a row that all blocks keep, by the count on fake tensors."""
    blocks = count(recipe, Degrees(), meta_model=model).blocks
    return sum(block.blocks * block.kept.row for block in blocks)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_activations_of_a_row_are_those_kept(name: str, precision: str) -> None:
    recipe = make_recipe(name, precision)
    measured = (kept_bytes(recipe, 6) - kept_bytes(recipe, 2)) / 4
    assert counted_bytes(recipe) + LAST == pytest.approx(measured, rel=0.02)


def test_weights_gradients_and_moments_are_16_bytes_a_parameter() -> None:
    recipe = make_recipe("mpt", "fp32")
    need = estimate(recipe, 1)
    assert need.parameters == sum(p.numel() for p in Decoder(recipe.model).parameters())
    assert need.weights == 16 * need.parameters
    recipe.parallel.data_parallel_shard_degree = 4
    recipe.parallel.fill()
    assert estimate(recipe, 8).weights == 4 * need.parameters


@pytest.mark.parametrize(  # pairs: names differ by the sizes of blocks alone
    ("name", "tied", "precision"),
    [
        ("mpt", True, "fp32"),
        ("mpt", False, "amp_bf16"),
        ("llama", True, "amp_bf16"),
        ("gqa", False, "fp32"),
    ],
)
def test_a_shard_has_blocks_and_the_ends_whole_at_times(
    name: str, tied: bool, precision: str
) -> None:
    """By hand, as FSDP2 gathers and reduces; benchmarks/memory counts the same on fake ranks."""
    low = {"fp32": 4, "amp_bf16": 2}[precision]
    recipe = make_recipe(name, precision)
    recipe.model.tie_word_embeddings = tied
    with torch.device("meta"):
        model = Decoder(recipe.model)
    head = model.wte.weight.numel()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    ends = sum(p.numel() for p in model.parameters()) - len(model.blocks) * block
    copies = 0 if precision == "fp32" else 2 * len(model.blocks) * block
    # of a tied one in fp32 gradients of both its uses, and their sum
    most = max(copies + 8 * head, 12 * head if tied else 0)
    assert whole(recipe, 1) == pytest.approx(most, rel=0.05)
    recipe.parallel.data_parallel_shard_degree = 4
    recipe.parallel.fill()
    at_head = low * (ends + block) + 8 * head
    at_block = low * (ends + head) + low * (2 + 1) * block + 4 * block
    assert whole(recipe, 4) == pytest.approx(max(at_head, at_block), rel=0.05)
    recipe.parallel.reshard_after_forward = False
    every = low * (ends + head) + low * (6 + 1) * block + 4 * block
    assert whole(recipe, 4) == pytest.approx(every, rel=0.05)


def whole(recipe: TrainRecipe, ranks: int) -> float:
    """Bytes of weights and gradients that are there whole, at most."""
    need = estimate(recipe, ranks, device=GPU)
    return max(moment.whole + moment.rows.fixed for moment in need.moments)


def test_a_shard_of_a_frozen_model_gathers_a_block_and_the_ends_too() -> None:
    recipe = make_recipe("llama", "fp32")
    recipe.parallel.data_parallel_shard_degree = 4
    recipe.parallel.fill()
    with torch.device("meta"):
        model = Decoder(recipe.model).requires_grad_(False)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    ends = sum(p.numel() for p in model.parameters()) - len(model.blocks) * block
    need = estimate(recipe, 4, meta_model=model)
    assert max(moment.whole for moment in need.moments) == 4 * (ends + block)


def test_all_of_a_model_that_trains_is_the_same_however_it_is_counted() -> None:
    recipe = make_recipe("llama", "amp_bf16")
    recipe.parallel.data_parallel_shard_degree = 4
    recipe.parallel.fill()
    with torch.device("meta"):
        model = Decoder(recipe.model)
    by_settings, by_model = (
        estimate(recipe, 4, device=GPU),
        estimate(recipe, 4, meta_model=model, device=GPU),
    )
    for rows in (1, 16):
        assert by_model.total(rows) == pytest.approx(by_settings.total(rows), rel=0.01)


def test_gradients_that_wait_for_the_last_microbatch_are_counted_whole() -> None:
    """By hand: 4 bytes a parameter on each of 8, of which the shard's own are counted anyway."""
    recipe = make_recipe("mpt", "amp_bf16")
    recipe.parallel.data_parallel_shard_degree = 8
    recipe.parallel.fill()
    need = estimate(recipe, 8, device=GPU)
    assert need.step_rows == 8 and need.accumulated == 0
    recipe.parallel.reduce_scatter_each_microbatch = False
    waiting = estimate(recipe, 8, device=GPU)
    assert waiting.total(8) == need.total(8)
    more = waiting.total(4) - need.total(4)
    assert more == pytest.approx((4 - 4 / 8) * need.parameters, abs=8)
    room = memory_for(need.total(4))
    for each, rows in {True: 4, False: 2}.items():
        recipe.parallel.reduce_scatter_each_microbatch = each
        assert choose_microbatch(recipe, world_size=8, available=room, device=GPU) == rows


def test_a_choice_of_gradients_that_does_not_fit_names_its_key() -> None:
    recipe = make_recipe("mpt", "amp_bf16")
    recipe.parallel.data_parallel_shard_degree = 8
    recipe.parallel.reduce_scatter_each_microbatch = False
    recipe.parallel.fill()
    need = estimate(recipe, 8, device=GPU)
    room = need.total(1) - 1 - FRAMEWORK  # one byte too few, without a margin
    said = r"^parallel.reduce_scatter_each_microbatch: false needs .* are free; write true$"
    with pytest.raises(UserError, match=said):
        choose_microbatch(recipe, world_size=8, available=room, device=GPU)
    recipe.parallel.reduce_scatter_each_microbatch = True
    assert choose_microbatch(recipe, world_size=8, available=room, device=GPU) >= 1


def memory_for(total: int) -> int:
    """Free bytes of a GPU in which an estimate just fits with the margin."""
    return int(total / USABLE) - FRAMEWORK + 2**10


def test_auto_takes_the_largest_divisor_that_fits() -> None:
    recipe = make_recipe("mpt", "fp32")
    need = estimate(recipe, 1)
    for rows in (64, 32, 16, 1):
        room = memory_for(need.total(rows)) + 2**20
        assert choose_microbatch(recipe, world_size=1, available=room, device=GPU) == rows
    assert choose_microbatch(recipe, world_size=4, available=2**40, device=GPU) == 16


def test_auto_leaves_room_for_a_process_whose_experts_have_twice_the_load() -> None:
    recipe = make_recipe("mpt", "amp_bf16")
    experts = FFNConfig("dmoe", ffn_hidden_size=128, moe_num_experts=8, moe_top_k=2)
    recipe.model.ffn_config = experts
    recipe = recipe.resolve()
    recipe.parallel.data_parallel_replicate_degree = 1
    recipe.parallel.data_parallel_shard_degree = recipe.parallel.expert_parallel_degree = 4
    need = estimate(recipe, 4, device=GPU)
    assert need.total(16) < need.total(16, 2.0) == need.total(16) + need.load_bytes(16)
    memory: dict[str, Any] = {"world_size": 4, "device": GPU}
    for rows, load, found in ((16, 2.0, 16), (16, 1.9, 8), (1, 1.9, 1), (1, 1.0, 1)):
        room = memory_for(need.total(rows, load))
        fit = choose_fit(recipe, available=room, **memory)
        assert fit.microbatch == found  # the margin refuses nothing that fits without it
        if rows == found:
            assert fit.load == pytest.approx(load, rel=1e-3)
            line = load_line(recipe, fit, 4)
            assert line is not None and line.startswith(
                f"expert load of a process, in means: up to {load:.1f} fits"
            )
    with pytest.raises(UserError, match="GiB are free"):
        choose_fit(recipe, available=need.total(1) - FRAMEWORK - 2**10, **memory)
    recipe.parallel.expert_parallel_degree = 1  # all rows of all experts are a process's own
    alone = estimate(recipe, 4, device=GPU)
    assert alone.load_bytes(16) == 0
    assert load_line(recipe, choose_fit(recipe, available=2**40, **memory), 4) is None


@pytest.mark.parametrize("asked", ["auto", 16])
def test_cuda_graphs_take_a_step_in_one_microbatch(asked: str | int) -> None:
    recipe = make_recipe("mpt", "fp32")
    recipe.compile_mode, recipe.device_train_microbatch_size = "reduce-overhead", asked
    room = memory_for(estimate(recipe, 1, device=GPU).total(16)) + 2**20
    with pytest.raises(
        UserError, match=r"^compile_mode: reduce-overhead .* has 4 \(64 rows, 16 at"
    ):
        choose_microbatch(recipe, world_size=1, available=room, device=GPU)
    assert choose_microbatch(recipe, world_size=4, available=room, device=GPU) == 16


def test_auto_computes_again_as_little_as_fits() -> None:
    recipe = make_recipe("mpt", "amp_bf16")
    recipe.parallel.activation_checkpointing = "auto"
    totals = []
    for level in ("none", "selective", "whole"):
        recipe.parallel.activation_checkpointing = level
        totals.append(estimate(recipe, 1, device=GPU).total(16))
        recipe.parallel.activation_checkpointing = "auto"
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3
    memory: dict[str, Any] = {"world_size": 1, "device": GPU}
    for level, total in zip(("none", "selective", "whole"), totals, strict=True):
        fit = choose_fit(recipe, available=memory_for(total), **memory)
        assert (fit.choice.name, fit.microbatch) == (level, 16)  # 16 rows are MIN_TOKENS
    little = memory_for(int(0.97 * totals[2]))
    fit = choose_fit(recipe, available=little, **memory)
    assert fit.choice.level == "whole" and fit.microbatch < 16
    room = memory_for(totals[0])
    whole = ActivationChoice("whole")
    again = choose_fit(recipe, available=room, **memory, begun_with=whole)
    assert again.choice == whole and again.microbatch >= 16
    assert "as the run began" in checkpointing_line(recipe, again, whole)
    assert "auto is none" in checkpointing_line(
        recipe, choose_fit(recipe, available=room, **memory)
    )


def test_auto_on_a_cpu_takes_no_more_than_a_thousand_tokens() -> None:
    recipe = make_recipe("mpt", "fp32")
    assert choose_microbatch(recipe, world_size=1, available=2**40, device=CPU) == 4
    recipe.device_train_microbatch_size = 32
    assert choose_microbatch(recipe, world_size=1, available=2**40, device=CPU) == 32


@pytest.mark.parametrize(
    ("optimizer", "precision", "bytes_each"),
    [("adamw", "fp32", 16), ("decoupled_lionw", "amp_bf16", 12), ("decoupled_adamw", "bf16", 8)],
)
def test_weights_need_what_the_optimizer_really_keeps(
    optimizer: str, precision: str, bytes_each: int
) -> None:
    recipe = make_recipe("mpt", precision)
    recipe.optimizer.name = optimizer
    need = estimate(recipe, 1)
    assert need.weights == bytes_each * need.parameters


def test_what_cannot_fit_says_what_it_needs_what_there_is_and_what_fits() -> None:
    recipe = make_recipe("mpt", "fp32")
    recipe.run_name, recipe.model.vocab_size = "big", 10**8
    with pytest.raises(UserError) as raised:
        choose_microbatch(recipe, world_size=1, available=8 * 2**30, device=GPU)
    (line,) = raised.value.problems
    assert line.startswith("model: big (") and "8.0 GiB are free" in line
    assert "the largest shipped recipe that fits is yamls/" in line


def test_rows_that_processes_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match=r"^global_train_batch_size: 64 rows cannot be shared"):
        choose_microbatch(make_recipe("mpt", "fp32"), world_size=3, available=2**40, device=GPU)


def test_workers_that_memory_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = types.SimpleNamespace(available=2 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    world = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    check_workers(DataConfig(loader_workers=5), world)
    with pytest.raises(UserError, match=r"^data.loader_workers: 6 for each of 2 processes .* 5$"):
        check_workers(DataConfig(loader_workers=6), world)


def test_more_processes_than_a_machine_can_run_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"^parallel.nproc_per_node: 33 .* 8 cores; .*32"):
        relaunch(ParallelConfig(nproc_per_node=33))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    relaunch(ParallelConfig(nproc_per_node=32))
    assert len(started) == 1


def make_sketch(name: str, precision: str, what: str) -> tuple[TrainRecipe, Decoder]:
    """A recipe, and its model as it would be fine-tuned: `lora`, `down`, `qlora` or `freeze`."""
    recipe = make_recipe(name, precision)
    model = Decoder(recipe.model)
    model.init_weights(1)
    if what == "freeze":
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(not key.startswith(("wte", "wpe", "blocks.0.", "blocks.1.")))
        return recipe, model
    adapter = AdapterConfig(name="lora", r=8)
    if what == "down":
        adapter.target_modules = ["down_proj"]
    adapter.fill()
    add_adapter(model, plan_adapter(model, adapter, split_qkv=False))
    init_adapter(model, 1)
    if precision == "amp_bf16":
        narrow_frozen(model, torch.bfloat16)
    if what == "qlora":
        values = {key: value.detach().clone() for key, value in model.named_parameters()}
        quantize_frozen(model, double=True)
        for key in (key for key, _ in quantized_shapes(model)):
            place(model, key, values[key])
    return recipe, model


@pytest.mark.parametrize("precision", slow_but(["fp32"], ["fp32", "amp_bf16"]))
@pytest.mark.parametrize("what", slow_but(["lora", "qlora"], ["lora", "down", "qlora", "freeze"]))
@pytest.mark.parametrize("name", ["mpt", "llama"])
def test_frozen_layers_keep_what_the_estimate_says(name: str, what: str, precision: str) -> None:
    recipe, model = make_sketch(name, precision, what)
    measured = (kept_bytes(recipe, 6, model) - kept_bytes(recipe, 2, model)) / 4
    assert counted_bytes(recipe, model) + LAST == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_quantized_weight_that_is_looked_at_is_counted_and_read_afterwards(
    device: torch.device,
) -> None:
    recipe = make_recipe("llama", "amp_bf16")
    with torch.device("meta"):
        model = Decoder(recipe.model)
    adapter = AdapterConfig(name="lora", r=8, use_dora=True)  # which asks for columns' lengths
    adapter.fill()
    add_adapter(model, plan_adapter(model, adapter, split_qkv=False))
    quantize_frozen(model, double=True)
    for table in (nf4._pairs, nf4._scale_code):
        table.cache_clear()
    assert estimate(recipe, 1, meta_model=model, device=device).total(1) > 0
    weight = torch.randn(64, 64)
    read = nf4.dequantize(nf4.quantize(weight, double=True), (64, 64), torch.float32, double=True)
    assert (read - weight).norm() < 0.15 * weight.norm()


def test_gradients_and_moments_are_of_what_trains_alone() -> None:
    recipe, model = make_sketch("llama", "amp_bf16", "qlora")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    matrices = sum(height * width for _, (height, width) in quantized_shapes(model))
    rest = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    narrow = sum(2 * p.numel() for n, p in rest.items() if n.startswith(("wte", "wpe", "lm_head")))
    vectors = sum(4 * p.numel() for p in rest.values() if p.ndim == 1 and p.is_floating_point())
    expected = 16 * trained + narrow + vectors + matrices * (4 + 8 / 64 + 32 / 64 / 256) / 8
    need = estimate(recipe, 1, meta_model=model)
    assert need.weights == pytest.approx(expected, rel=2e-3)
    assert need.parameters == sum(p.numel() for p in Decoder(recipe.model).parameters()) + trained


@pytest.mark.parametrize(
    ("adapter", "quantize", "said"),
    [
        ("none", "none", "write adapter.name: lora and model.quantize: nf4, or spread it with"),
        ("lora", "none", "write model.quantize: nf4, or spread it with"),
        ("lora", "nf4", "write a smaller max_seq_len, parallel.activation_checkpointing: true"),
    ],
)
def test_a_model_too_large_to_fine_tune_is_reported_what_fits(
    adapter: str, quantize: str, said: str
) -> None:
    recipe = FinetuneRecipe(max_seq_len=256, global_train_batch_size=4, precision="amp_bf16")
    recipe.adapter.name = adapter
    recipe = recipe.resolve()
    config = ModelConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50368)
    config = config.resolve(max_seq_len=256)
    recipe.model = config  # type: ignore[assignment]
    with torch.device("meta"):
        model = Decoder(config)
    if adapter == "lora":
        add_adapter(model, plan_adapter(model, recipe.adapter, split_qkv=False))
        narrow_frozen(model, torch.bfloat16)
    if quantize == "nf4":
        quantize_frozen(model, double=True)
    small = {"none": 8 * 2**30, "lora": 8 * 2**30, "nf4": 2**30}
    room = small["nf4" if quantize == "nf4" else adapter]
    with pytest.raises(UserError) as raised:
        choose_microbatch(recipe, world_size=1, available=room, device=GPU, meta_model=model)
    (line,) = raised.value.problems
    assert line.startswith("model.pretrained: 6,6") and said in line


def test_activations_of_shipped_recipes_are_counted_where_weights_fit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [fit.YAMLS / f"{name}.yaml" for name in ("dbrx", "quickstart")]
    monkeypatch.setattr(fit, "YAMLS", types.SimpleNamespace(glob=lambda _: paths))
    counted: list[str] = []

    def note(recipe: TrainRecipe, *args: Any, **named: Any) -> Any:
        counted.append(recipe.run_name)
        need = estimate(recipe, *args, **named)
        assert weight_bytes(recipe, 1) == need.weights + need.fixed
        return need

    monkeypatch.setattr(fit, "estimate", note)
    found = fit.largest_fitting_recipe(1, 2**30, CPU)
    assert found is not None and "quickstart" in found
    assert counted == ["quickstart"]


def test_logits_are_those_of_a_chunk_at_most_and_the_chunk_is_the_device_s() -> None:
    recipe = make_recipe("mpt", "amp_bf16")
    recipe.model.vocab_size, recipe.max_seq_len = 50_304, 2048
    cuda = torch.device("cuda", 0)
    on_cpu, on_gpu = estimate(recipe, 1), estimate(recipe, 1, device=cuda)
    assert on_cpu.logits(1) == on_cpu.logits(9) == 6 * 256 * 50_304
    assert [on_gpu.logits(rows) // (4 * 50_304) for rows in (1, 3, 9)] == [2048, 6144, 8192]
    assert on_gpu.parts(3)["logits"] == on_gpu.logits(3)
    recipe.model.final_logit_softcapping = 30.0  # its slope is computed in the kernel
    assert estimate(recipe, 1, device=cuda).logits(9) == 4 * 8192 * 50_304
    recipe.device_loss_chunk_tokens = 1000
    assert estimate(recipe, 1, device=cuda).logits(9) == 4 * 1000 * 50_304

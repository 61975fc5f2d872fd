"""Estimates against what PyTorch really keeps."""

from __future__ import annotations

import copy
import os
import types
from typing import Any

import psutil
import pytest
import torch

from llmfoundry.errors import UserError
from llmfoundry.estimate import check_workers, choose_microbatch, estimate, row_bytes
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.cross_entropy import linear_cross_entropy
from llmfoundry.parallel.launch import World, relaunch
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.train import TrainRecipe

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

GPU, CPU = torch.device("cuda"), torch.device("cpu")  # nothing is placed on either


def make_recipe(name: str, precision: str) -> TrainRecipe:
    settings = copy.deepcopy(SETTINGS[name])
    model = ModelConfig(d_model=128, n_heads=4, n_layers=6, vocab_size=512, **settings)
    recipe = TrainRecipe(
        model=model, max_seq_len=256, precision=precision, global_train_batch_size=64
    )
    recipe.fill()
    return recipe


def kept_bytes(recipe: TrainRecipe, rows: int) -> int:
    """Bytes of distinct storages that autograd saves in a forward pass, weights left out."""
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
        Root(model)(tokens, None, lambda m, h: linear_cross_entropy(h, m.head_weight, tokens))
    return sum(kept.values())


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_activations_of_a_row_are_within_a_quarter_of_those_kept(name: str, precision: str) -> None:
    recipe = make_recipe(name, precision)
    measured = (kept_bytes(recipe, 6) - kept_bytes(recipe, 2)) / 4
    assert row_bytes(recipe) == pytest.approx(measured, rel=0.25)


def test_weights_gradients_and_moments_are_16_bytes_a_parameter() -> None:
    recipe = make_recipe("mpt", "fp32")
    need = estimate(recipe, 1)
    assert need.parameters == sum(p.numel() for p in Decoder(recipe.model).parameters())
    assert need.weights == 16 * need.parameters
    recipe.parallel.data_parallel_shard_degree = 4
    recipe.parallel.fill()
    assert estimate(recipe, 8).weights == 4 * need.parameters


def test_auto_takes_the_largest_divisor_that_fits() -> None:
    recipe = make_recipe("mpt", "fp32")
    need = estimate(recipe, 1)
    for rows in (64, 32, 16, 1):
        room = int(need.total(rows) / 0.9) + 2**20
        assert choose_microbatch(recipe, world_size=1, available=room, device=GPU) == rows
    assert choose_microbatch(recipe, world_size=4, available=2**40, device=GPU) == 16


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

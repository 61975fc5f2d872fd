"""Checkpointing and compilation of blocks: the same numbers, less memory, only while training."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from llmfoundry.distributed.activation_checkpoint import check_compiler, check_graphs, wrap_blocks
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.kv_cache import TokenChunk
from llmfoundry.ops.packed_layout import PackedLayout
from tests.models.test_decoder import make_config
from tests.selection import slow_but
from tests.tiny import ENV, activations, command, write_recipe

REUSE = {
    "order": [{"name": "default"}, {"name": "reuse"}, {"name": "local"}, {"name": "default"}],
    "overrides": {
        "reuse": {"attn_config": {"reuse_kv_layer_idx": -1}},
        "local": {"attn_config": {"sliding_window_size": 3}},
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"resid_pdrop": 0.3, "emb_pdrop": 0.1, "attn_config": {"attn_pdrop": 0.2}},
    "reused keys": {"block_overrides": REUSE, "resid_pdrop": 0.3},
    "experts": {
        "ffn_config": {"ffn_type": "dmoe", "moe_num_experts": 4, "moe_top_k": 2},
        "resid_pdrop": 0.3,
    },
}
LAYOUT = PackedLayout.from_lengths([[16], [5, 11], [1, 15]])


def make_root(**settings: Any) -> Root:
    model = Decoder(make_config(**({"n_layers": 4} | settings)))
    model.init_weights(3)
    return Root(model)


def make_tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(1))


def forward(root: Root, layout: PackedLayout | None = LAYOUT, rows: int = 3) -> torch.Tensor:
    tokens = make_tokens(rows)
    return root(tokens, layout, lambda model, hidden: model.loss(hidden, tokens))


def loss_and_gradients(root: Root, layout: PackedLayout | None = LAYOUT) -> list[torch.Tensor]:
    torch.manual_seed(0)
    loss = forward(root, layout)
    loss.backward()
    return [loss.detach(), *(p.grad for p in root.parameters() if p.grad is not None)]


@pytest.mark.parametrize("level", ["selective", "whole"])
@pytest.mark.parametrize("name", SETTINGS)
def test_checkpointing_changes_no_bit(name: str, level: str) -> None:
    kept, recomputed = make_root(**SETTINGS[name]), make_root(**SETTINGS[name])
    names = list(kept.state_dict())
    wrap_blocks(recomputed, activations(recomputed, level), compile_mode=None)
    assert list(recomputed.state_dict()) == names
    expected, found = loss_and_gradients(kept), loss_and_gradients(recomputed)
    assert len(found) == len(names) + 1 - ("lm_head.weight" in names)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def saved_bytes(root: Root) -> int:
    """What the backward pass keeps, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in root.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(root)
    assert loss.requires_grad
    return sum(kept.values())


def test_checkpointing_keeps_little_more_than_the_inputs_of_blocks() -> None:
    kept, recomputed = make_root(n_layers=8), make_root(n_layers=8)
    wrap_blocks(recomputed, activations(recomputed, True), compile_mode=None)
    stream = 3 * 16 * 24 * 4  # rows, tokens, d_model, bytes
    outside = saved_bytes(make_root(n_layers=1)) - saved_bytes_of_a_block()
    assert saved_bytes(recomputed) <= 8 * stream + outside
    assert saved_bytes(kept) > 10 * 8 * stream


def saved_bytes_of_a_block() -> int:
    return saved_bytes(make_root(n_layers=2)) - saved_bytes(make_root(n_layers=1))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_where_there_is_no_gpu_and_with_several_microbatches(
    mode: str,
) -> None:
    cpu = f"^compile_mode: {mode} records CUDA graphs, and this run computes on a CPU; write defau"
    with pytest.raises(UserError, match=cpu):
        check_compiler(mode, torch.device("cpu"))
    several = rf"^compile_mode: {mode} .* a step has 3 \(24 rows, 8 at a time\); write default or "
    with pytest.raises(UserError, match=several):
        check_graphs(mode, rows=24, microbatch=8)
    check_graphs(mode, rows=8, microbatch=8)
    check_graphs("max-autotune-no-cudagraphs", rows=24, microbatch=8)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts graphs in the place of inductor, which would take a minute to make their kernels."""
    counter = CompileCounterWithBackend("aot_eager")
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *, mode: compile(f, backend=counter))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


PAIRS = [(name, level) for name in SETTINGS for level in ("none", "whole")]
ROUTINE = [("plain", "none"), ("dropout", "whole")]


@pytest.mark.parametrize("case", slow_but(ROUTINE, PAIRS), ids="-".join)
def test_compiled_blocks_give_the_same_numbers(
    counter: CompileCounterWithBackend, case: tuple[str, str]
) -> None:
    name, checkpointing = case
    plain, compiled = make_root(**SETTINGS[name]), make_root(**SETTINGS[name])
    wrap_blocks(compiled, activations(compiled, checkpointing), compile_mode="default")
    expected, found = loss_and_gradients(plain), loss_and_gradients(compiled)
    assert counter.frame_count > 0
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(["plain", "dropout"], SETTINGS))
def test_compiled_blocks_that_keep_products_give_the_same_numbers(
    counter: CompileCounterWithBackend, name: str
) -> None:
    plain, compiled = make_root(**SETTINGS[name]), make_root(**SETTINGS[name])
    wrap_blocks(compiled, activations(compiled, "selective"), compile_mode="default")
    expected, found = (loss_and_gradients(root, layout=None) for root in (plain, compiled))
    assert counter.frame_count > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_blocks_that_are_alike_are_compiled_once(counter: CompileCounterWithBackend) -> None:
    root = make_root(n_layers=12)
    wrap_blocks(root, activations(root, False), compile_mode="default")
    forward(root, layout=None).backward()
    assert counter.frame_count == 1


def test_documents_of_other_lengths_compile_nothing_anew(
    counter: CompileCounterWithBackend,
) -> None:
    root, plain = make_root(), make_root()
    wrap_blocks(root, activations(root, False), compile_mode="default")
    whole, some = [[16]] * 3, [[5, 11], [16], [1, 15]]
    others = [[[4, 12], [8, 8], [2, 3, 11]], [[1] * 16, [16], [15, 1]]]
    counts = []
    for lengths in (whole, some, *others, whole, some, whole):
        layout = PackedLayout.from_lengths(lengths)
        losses = [forward(each, layout) for each in (root, plain)]
        losses[0].backward()
        torch.testing.assert_close(losses[0], losses[1])
        counts.append(counter.frame_count)
    assert counts[1] == counts[2] == counts[3]
    assert counts[4] == counts[5] == counts[6]


def test_evaluation_and_generation_compile_nothing(counter: CompileCounterWithBackend) -> None:
    root = make_root()
    wrap_blocks(root, activations(root, True), compile_mode="default")
    forward(root).backward()
    before, plain = counter.frame_count, make_root().eval()
    root.eval()
    with torch.no_grad():
        assert torch.equal(forward(root, None, rows=2), forward(plain, None, rows=2))
    assert torch.equal(generate(root), generate(plain))
    assert counter.frame_count == before
    root.train()
    forward(root).backward()
    assert counter.frame_count == before, "the training graph is kept"


@torch.no_grad()
def generate(root: Root) -> torch.Tensor:
    """Logits after a row of growing length."""
    device, row = torch.device("cpu"), make_tokens(1)[0].tolist()
    cache = root.model.new_slots(slots=1, length=16, device=device, dtype=torch.float32)
    logits = [
        root(
            cache.begin([TokenChunk(0, place, (row[place],), 1)]),
            None,
            lambda model, hidden: model.head(hidden),
            cache=cache,
        )
        for place in range(8)
    ]
    return torch.cat(logits)


@pytest.mark.slow
def test_a_machine_that_cannot_compile_says_so_before_training(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    env = ENV | {"CXX": str(tmp_path / "none"), "PATH": os.defpath}
    start = command("train.py", "tiny.yaml", "compile=true")
    done = subprocess.run(start, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.startswith("compile: torch.compile cannot build kernels here")
    assert "g++" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()

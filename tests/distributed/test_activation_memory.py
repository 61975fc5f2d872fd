"""Recomputation by part and compression: what is kept, what changes, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from llmfoundry.distributed.activation_checkpoint import check_format, wrap_blocks
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.models.router import Router
from llmfoundry.ops import compression
from llmfoundry.ops.compression import Compressed, Compressor
from llmfoundry.ops.torch_private import storage_reference
from tests.distributed.test_activation_checkpoint import (
    LAYOUT,
    SETTINGS,
    counter,
    forward,
    loss_and_gradients,
    make_root,
)
from tests.tiny import activations

__all__ = ["counter"]  # a fixture
MIXTURE = {
    "resid_pdrop": 0.2,
    "ffn_config": {
        "ffn_type": "dmoe", "mlp_type": "glu", "ffn_act_fn": "silu", "ffn_hidden_size": 64,
        "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.1,
        "shared_expert_hidden_size": 32,
    },
}  # fmt: skip
WIDE = {"d_model": 64, "n_heads": 4, "no_bias": True, "attn_config": {"rope": True}}
MODELS = {**SETTINGS, "mixture": MIXTURE}
TARGETS: list[Any] = [
    "attention", "feed_forward", "norm", ["attention", "norm", "feed_forward"],
    {"block": "first-1", "feed_forward": "middle-1", "norm_attn_norm": "last-1"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def compress_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "SMALL", 1)


def wrapped(model: dict[str, Any], mode: str | None = None, **settings: Any) -> Root:
    root = make_root(**model)
    wrap_blocks(root, activations(root, **settings), compile_mode=mode)
    return root


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_recomputing_parts_changes_no_bit(name: str, target: Any) -> None:
    plain = make_root(**MODELS[name])
    again = wrapped(MODELS[name], checkpointing="whole", activation_checkpointing_target=target)
    assert list(again.state_dict()) == list(plain.state_dict())
    expected, found = loss_and_gradients(plain), loss_and_gradients(again)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_experts_alone_change_no_bit_and_keep_the_routers_choice() -> None:
    plain, settings = make_root(**MIXTURE), {"activation_checkpointing_target": {"experts": [1, 3]}}
    again = wrapped(MIXTURE, checkpointing="whole", **settings)
    expected, found = loss_and_gradients(plain), loss_and_gradients(again)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def kept_bytes(root: Root) -> int:
    """What waits for the backward pass, each storage once, weights left out."""
    weights = {storage_reference(p) for p in root.parameters()}
    held: dict[Any, int] = {}

    def note(tensor: Tensor) -> Tensor:
        key = storage_reference(tensor)
        if key not in weights:
            held[key] = tensor.untyped_storage().nbytes()
        return tensor

    save = Compressor.save

    def spy(self: Compressor, tensor: Tensor) -> Any:
        saved = save(self, tensor)
        for part in saved.kept.packed if isinstance(saved, Compressed) else [saved]:
            note(part)
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compressor, "save", spy)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = forward(root)
    assert loss.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("model", [WIDE, WIDE | MIXTURE], ids=["dense", "mixture"])
def test_each_part_and_8_bits_keep_less(model: dict[str, Any]) -> None:
    everything = kept_bytes(make_root(**model))
    of = {
        name: kept_bytes(
            wrapped(model, checkpointing="whole", activation_checkpointing_target=name)
        )
        for name in ("block", "attention", "feed_forward")
    }
    assert of["block"] < of["feed_forward"] < everything and of["attention"] < everything
    one = kept_bytes(
        wrapped(model, checkpointing="whole", activation_checkpointing_target={"attention": 1})
    )
    assert everything - one == pytest.approx((everything - of["attention"]) / 4, rel=0.05)
    small = kept_bytes(wrapped(model, activation_compression="int8"))
    both = kept_bytes(wrapped(model, checkpointing="whole", activation_compression="int8"))
    assert small < 0.55 * everything and both < everything / 3 and both < 0.6 * of["block"]


@pytest.mark.parametrize("level", ["none", "selective", "whole"])
@pytest.mark.parametrize("name", MODELS)
def test_8_bits_leave_the_loss_and_come_near_the_gradients(name: str, level: str) -> None:
    plain, model = make_root(**WIDE | MODELS[name]), WIDE | MODELS[name]
    expected = loss_and_gradients(plain)
    runs = [
        loss_and_gradients(wrapped(model, checkpointing=level, activation_compression="int8"))
        for _ in range(2)
    ]
    assert torch.equal(runs[0][0], expected[0])
    apart = sum(
        float((a - b).square().sum()) for a, b in zip(runs[0][1:], expected[1:], strict=True)
    )
    whole = sum(float(b.square().sum()) for b in expected[1:])
    assert 1e-4 < (apart / whole) ** 0.5 < 4e-2
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "twice the same bits"


@pytest.mark.parametrize(
    "settings",
    [{}, {"activation_checkpointing_target": "feed_forward"}],
    ids=["block", "feed_forward"],
)
def test_a_router_chooses_the_same_experts_of_a_rounded_input(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    chosen: list[Tensor] = []
    right = Router.choose

    def spy(self: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = right(self, scores)
        chosen.append(experts)
        return weights, experts

    monkeypatch.setattr(Router, "choose", spy)

    def different(keep: bool) -> int:
        """Choices that the second time are others, in all layers."""
        chosen.clear()
        with pytest.MonkeyPatch.context() as patch:
            if not keep:
                path = "llmfoundry.distributed.activation_checkpoint._is_choice"
                patch.setattr(path, lambda op, *args: False)
            root = wrapped(
                WIDE | MIXTURE,
                checkpointing="whole",
                activation_compression="fp8",  # of more rounding
                **settings,
            )
            forward(root, None, rows=16).backward()
        first, second = chosen[:4], chosen[:3:-1]
        assert len(chosen) == 8
        return sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))

    assert different(keep=True) == 0 < different(keep=False)


ATTENTION = {"checkpointing": "whole", "activation_checkpointing_target": "attention"}
INT8 = {"activation_compression": "int8"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", ATTENTION),
        pytest.param("plain", INT8, marks=pytest.mark.slow),
        ("mixture", ATTENTION | INT8),
    ],
    ids=["target", "int8", "both"],
)
def test_compiled_blocks_may_be_recomputed_in_part_and_compressed(
    counter: CompileCounterWithBackend, name: str, settings: dict[str, Any]
) -> None:
    model = WIDE | {k: v for k, v in MODELS[name].items() if k != "resid_pdrop"}
    plain, compiled = make_root(**model), wrapped(model, "default", **settings)
    expected, found = (loss_and_gradients(root, layout=None) for root in (plain, compiled))
    # a block, and where its attention is recomputed what is around it, and it
    assert 1 <= counter.frame_count <= 6
    near = 6e-2 if "activation_compression" in settings else 1e-4
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= near * theirs.norm() + 1e-5
    if "activation_compression" in settings:
        assert kept_bytes(compiled) < 0.6 * kept_bytes(wrapped(model, "default"))


def test_a_budget_is_torch_compiles() -> None:
    from torch._functorch import config

    try:
        wrapped({}, "default", activation_memory_budget=0.4)
        assert config.activation_memory_budget == 0.4
        wrapped({}, "default")
        assert config.activation_memory_budget == 1.0, "another model's budget does not stay"
    finally:
        config.activation_memory_budget = 1.0


def test_evaluation_and_frozen_passes_compress_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    root, plain = wrapped(WIDE, activation_compression="int8"), make_root(**WIDE)

    def fail(*_: Any) -> None:
        raise AssertionError("compressed")

    monkeypatch.setattr(Compressor, "compress", fail)
    with torch.no_grad():
        assert torch.equal(forward(root), forward(plain))
    assert torch.equal(forward(root.eval()), forward(plain.eval()))
    with pytest.raises(AssertionError, match="compressed"):
        forward(root.train())


def test_keys_that_blocks_share_are_compressed_once() -> None:
    model = WIDE | SETTINGS["reused keys"]
    kept: list[int] = []
    compress = Compressor.compress

    def spy(self: Compressor, tensor: Tensor) -> Compressed:
        saved = compress(self, tensor)
        kept.append(id(saved.kept))
        return saved

    root = wrapped(model, activation_compression="int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compressor, "compress", spy)
        loss = forward(root, LAYOUT)
    assert len(set(kept)) < len(kept)
    loss.backward()


def test_fp8_is_refused_on_gpus_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    has: Callable[..., tuple[int, int]] = lambda device: (8, 0)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", has)
    line = r"^parallel.activation_compression: fp8 is for .* 8.9 and above, .* has 8.0; write int8$"
    with pytest.raises(UserError, match=line):
        check_format("fp8", torch.device("cuda"))
    check_format("int8", torch.device("cuda"))
    check_format("fp8", torch.device("cpu"))

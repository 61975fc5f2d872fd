"""What no comparison of logits shows: dropouts, precisions, and blocks that are wrapped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from llmfoundry.models.decoder import Block, Decoder
from llmfoundry.models.layers import norm_maker
from llmfoundry.ops.loss import labelled_places
from llmfoundry.ops.packed_layout import PackedLayout
from tests.models.test_decoder import SETTINGS, make_config, make_model, random_tokens

REUSED = ("overrides", "overrides-chain", "overrides-unlike")  # layers share keys and values
ROOT = Path(__file__).resolve().parents[2]
DROPOUTS: dict[str, dict[str, Any]] = {
    "emb_pdrop": {"emb_pdrop": 0.2},
    "resid_pdrop": {"resid_pdrop": 0.2},
    "attn_pdrop": {"attn_config": {"attn_pdrop": 0.2}},
}


def losses_gradients(
    model: Decoder, tokens: Tensor, *, seed: int = 1, layout: PackedLayout | None = None
) -> list[Tensor]:
    """The loss and every gradient, under one seed."""
    torch.manual_seed(seed)
    loss = model.loss(model(tokens, layout), tokens.roll(-1, 1))
    model.zero_grad()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_off_in_evaluation_and_follows_the_seed_in_training(name: str) -> None:
    model, plain = make_model(make_config(**DROPOUTS[name])), make_model(make_config())
    tokens = random_tokens(2, 12)
    assert torch.equal(model.eval()(tokens), plain.eval()(tokens))
    model.train()
    first, again = (losses_gradients(model, tokens, seed=1) for _ in range(2))
    other = losses_gradients(model, tokens, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0] != other[0]


def watched(module: nn.Module, seen: list[Tensor]) -> None:
    """Record what goes into `module`."""
    module.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].detach()))


def assert_dropped(after: Tensor, before: Tensor, p: float) -> None:
    """Elements are 0 with probability p, independently, and 1 / (1 - p) of before elsewhere."""
    zero = after == 0
    deviation = math.sqrt(p * (1 - p) / zero.numel())
    assert abs(zero.double().mean().item() - p) < 5 * deviation
    torch.testing.assert_close(after[~zero], (before / (1 - p))[~zero], rtol=1e-4, atol=1e-5)


def test_embeddings_are_dropped_after_positions_are_added() -> None:
    model, seen = make_model(make_config(emb_pdrop=0.2)), []
    watched(model.blocks[0], seen)
    tokens = random_tokens(64, 32)
    model(tokens)
    assert_dropped(seen[0], model.wte.weight[tokens] + model.wpe.weight, 0.2)


def test_what_attention_and_ffn_add_is_dropped() -> None:
    model = make_model(make_config(resid_pdrop=0.3, n_layers=2))
    block, ins, outs = model.blocks[0], [], []
    for module in (block, block.norm_2, model.blocks[1]):
        watched(module, ins)
    for module in (block.attn.out_proj, block.ffn.down_proj):
        module.register_forward_hook(lambda m, inputs, output: outs.append(output.detach()))
    model(random_tokens(64, 32))
    # a sum that did not change was added nothing; else the difference carries fp32's rounding
    for before, after, added in zip(ins, ins[1:], outs, strict=False):
        kept = torch.where(after == before, 0.0, added / 0.7)
        assert_dropped(kept, added, 0.3)
        torch.testing.assert_close(after, before + kept, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["sdpa", "torch"])
def test_dropped_attention_is_the_undropped_in_the_mean(impl: str) -> None:
    attn = {"attn_pdrop": 0.3, "attn_impl": impl}
    model, seen = make_model(make_config(n_layers=1, attn_config=attn)), []
    watched(model.blocks[0].attn.out_proj, seen)
    rows = random_tokens(1, 8).expand(4000, 8)
    torch.manual_seed(3)
    with torch.no_grad():
        model.train()(rows)
        model.eval()(rows[:1])
    training, undropped = seen
    deviation = training.std(0) / math.sqrt(len(rows))
    assert (deviation[1:] > 0).all() and training.std(0).mean() > 0.01
    assert ((training.mean(0) - undropped[0]).abs() < 6 * deviation + 1e-6).all()


def test_a_fraction_of_the_gradient_reaches_the_embeddings() -> None:
    whole = make_model(make_config(tie_word_embeddings=False))
    part = make_model(make_config(tie_word_embeddings=False, embedding_fraction=0.25))
    tokens = random_tokens(2, 12)
    for model in (whole, part):
        losses_gradients(model, tokens)
    torch.testing.assert_close(part.wte.weight.grad, whole.wte.weight.grad * 0.25)
    torch.testing.assert_close(part.wpe.weight.grad, whole.wpe.weight.grad * 0.25)
    torch.testing.assert_close(part.lm_head.weight.grad, whole.lm_head.weight.grad)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_low_precision_norms_compute_in_autocasts_dtype(kind: str) -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(4)) * 3 + 1
    norms = [norm_maker(name)(96, eps=1e-5, bias=True) for name in (kind, f"low_precision_{kind}")]
    for norm in norms:
        for parameter in norm.parameters():
            parameter.data = torch.linspace(-1, 2, 96)
    plain, low = norms
    assert torch.equal(plain(x), low(x))
    with torch.autocast("cpu", torch.bfloat16):
        wide, narrow = plain(x), low(x)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    torch.testing.assert_close(wide, plain(x.double()).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(narrow.float(), wide, rtol=0.03, atol=0.03)
    rounded = plain(x.bfloat16().double()).float()
    assert (narrow.float() - rounded).abs().max() > 1e-3  # so it was not computed in fp32


def test_logits_are_as_exact_as_the_hidden_states_that_they_are_asked_of() -> None:
    """With bf16 weights too: scores of the gauntlet need more than bf16's 8 bits."""
    model = make_model(make_config(logit_scale=0.5)).bfloat16()
    hidden = model(random_tokens(2, 12)).float()
    exact = hidden.double() @ model.wte.weight.double().T * 0.5
    torch.testing.assert_close(model.head(hidden).double(), exact, rtol=1e-6, atol=1e-6)
    assert model.head(hidden.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", SETTINGS)
def test_a_forward_pass_asks_the_device_for_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data: whatever waits for a value of the device fails."""
    elsewhere = labelled_places(torch.empty(3, dtype=torch.int64, device="meta"))
    monkeypatch.setattr("llmfoundry.ops.loss.labelled_places", lambda labels: elsewhere)
    with FakeTensorMode():
        model = Decoder(make_config(**SETTINGS[name]))
        tokens = torch.zeros(2, 13, dtype=torch.int64)
        rows = tokens.new_zeros(2, 13)
        for layout in (None, PackedLayout(rows, rows.int(), ((13,), (4, 1, 8)))):
            assert model.loss(model(tokens, layout), tokens).shape == ()
        with pytest.raises(DataDependentOutputException):
            tokens.max().item()


def wrapped(model: Decoder, wrap: Callable[[Block], Callable[..., Any]]) -> Decoder:
    for block in model.blocks:
        block.forward = wrap(block)
    return model


def checkpointed(block: Block) -> Callable[..., Any]:
    forward = block.forward
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


@pytest.mark.parametrize("name", ["learned", *REUSED])
def test_checkpointed_blocks_give_the_same_gradients(name: str) -> None:
    settings = SETTINGS[name] | {"resid_pdrop": 0.1}
    models = [make_model(make_config(**settings)) for _ in range(2)]
    wrapped(models[1], checkpointed)
    tokens = random_tokens(2, 12)
    plain, kept = (losses_gradients(model, tokens) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize("name", REUSED)
def test_shared_keys_and_values_hold_no_more_memory_than_their_own(name: str) -> None:
    model, seen = make_model(make_config(**SETTINGS[name])), []
    for block in model.blocks:
        block.register_forward_hook(lambda m, inputs, output: seen.append(output[1]))
    model(random_tokens(2, 12))
    shared = [kv for kv in seen if kv is not None]
    takers = {layer.kv_from for i, layer in enumerate(model.layers) if layer.kv_from != i}
    assert len(shared) == len(takers) > 0
    for tensor in (tensor for kv in shared for tensor in kv):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", REUSED)
def test_sharded_blocks_that_share_keys_give_the_same_gradients(
    name: str, checkpointing: bool, process_group: None
) -> None:
    plain, sharded = (make_model(make_config(**SETTINGS[name])) for _ in range(2))
    if checkpointing:
        wrapped(sharded, checkpointed)
    mesh = init_device_mesh("cpu", (1,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    tokens = random_tokens(2, 12)
    hidden = sharded(tokens)  # the loss outside: its own gradients are not what is tested
    expected = plain(tokens)
    torch.testing.assert_close(hidden, expected)
    hidden.square().sum().backward()
    expected.square().sum().backward()
    for (key, mine), right in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor), key
        torch.testing.assert_close(mine.grad.full_tensor(), right.grad, msg=key)


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("learned", 1),
        ("rope-gqa-theta", 1),
        pytest.param("overrides", 5, marks=pytest.mark.slow),
    ],
)
def test_blocks_compile_whole_and_those_alike_share_a_graph(name: str, graphs: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda block, *inputs: Block.forward(block, *inputs), backend=counter, fullgraph=True
    )
    plain, compiled = (make_model(make_config(**SETTINGS[name])) for _ in range(2))
    wrapped(compiled, lambda block: lambda *inputs: run(block, *inputs))
    tokens, layout = random_tokens(2, 12), PackedLayout.from_lengths([[12], [12]])
    ours, theirs = (losses_gradients(m, tokens, layout=layout) for m in (compiled, plain))
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == graphs
    torch._dynamo.reset()

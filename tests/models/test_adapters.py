"""Adapters of linear layers, heads and embeddings, compared with peft's on plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.errors import UserError
from llmfoundry.models.adapter import (
    MergedState,
    adapted_layers,
    adapter_table,
    add_adapter,
    freeze_parts,
    init_adapter,
    is_added,
    merge_into,
    saved_names,
    switched_off,
)
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.layers import Linear
from llmfoundry.models.low_rank import LowRank, merged_weight
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.train.optim.optimizers import build_optimizer
from tests.distributed.matrix import make_optimizer_config
from tests.models.test_decoder import make_config
from tests.tiny import activations

GLU = {"ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 40}}
DMOE = {
    "ffn_config": {
        "ffn_type": "dmoe",
        "ffn_hidden_size": 24,
        "moe_num_experts": 5,
        "moe_top_k": 2,
        "shared_expert_hidden_size": 16,
    }
}
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(4))
COMPILED = pytest.param("compiled", marks=pytest.mark.slow)
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "DoRA from PiSSA": {"use_dora": True, "init_lora_weights": "pissa"},
}


def adapter(**settings: Any) -> AdapterConfig:
    config = AdapterConfig(name="lora", **({"r": 4, "lora_alpha": 6.0} | settings))
    assert not list(config.check()), list(config.check())
    config.fill()
    return config


def adapted(model: Decoder, *, split_qkv: bool = False, **settings: Any) -> Decoder:
    """The model with an adapter that has its first values."""
    config = adapter(**settings)
    plan = plan_adapter(model, config, split_qkv=split_qkv)
    add_adapter(model, plan, modules_to_save=config.modules_to_save)
    init_adapter(model, 3)
    return model


def trained(model: Decoder, size: float = 0.1) -> Decoder:
    """The model, what trains of it moved at random."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def make_model(**settings: Any) -> Decoder:
    model = Decoder(make_config(n_layers=2, **settings))
    model.init_weights(1)
    return model


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.eval().head(model(TOKENS))


class Holder(nn.Module):
    """One of our layers under a name, with the adapter of a plan."""

    def __init__(self, plain: nn.Linear, lora: LowRank) -> None:
        super().__init__()
        self.layer = Linear(plain.in_features, plain.out_features)
        self.layer.load_state_dict(plain.state_dict())
        self.layer.requires_grad_(False)
        self.layer.lora = lora
        shapes = {"lora_A": (lora.r, plain.in_features), "lora_B": (plain.out_features, lora.r)}
        shapes |= {"lora_magnitude": (plain.out_features,)} if lora.dora else {}
        for name, shape in shapes.items():
            self.layer.register_parameter(name, nn.Parameter(torch.empty(shape)))
            if lora.init == "pissa" and name != "lora_magnitude":
                start = nn.Parameter(torch.empty(shape), requires_grad=False)
                self.layer.register_parameter(f"{name}_init", start)
        init_adapter(self, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = KINDS[kind]
    plain = nn.Sequential(nn.Linear(12, 20))
    lora = LowRank(
        4,
        6.0,
        ((0, 20),),
        rslora=settings.get("use_rslora", False),
        dora=settings.get("use_dora", False),
        init=settings.get("init_lora_weights", "default"),
    )
    ours = Holder(plain[0], lora).layer
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"], **settings)
    model = peft.get_peft_model(plain, config)
    layer = model.base_model.model[0]
    pairs = [(layer.lora_A["default"].weight, ours.lora_A)]
    pairs += [(layer.lora_B["default"].weight, ours.lora_B)]
    if lora.dora:
        pairs += [(layer.lora_magnitude_vector["default"].weight, ours.lora_magnitude)]
    with torch.no_grad():
        for theirs, mine in pairs:
            if lora.init == "pissa" or theirs.ndim == 1:  # what follows from the weight alone
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
            theirs += 0.1 * torch.randn_like(theirs)
            mine.copy_(theirs)
    x, grad = torch.randn(7, 12, requires_grad=True), torch.randn(7, 20)
    mine = [ours(x), *torch.autograd.grad(ours(x), [x, *(m for _, m in pairs)], grad)]
    theirs = [model(x), *torch.autograd.grad(model(x), [x, *(t for t, _ in pairs)], grad)]
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(F.linear(x, merged_weight(ours, lora), ours.bias), mine[0])


def test_dropout_falls_on_what_enters_a_alone() -> None:
    ours = Holder(nn.Linear(12, 20), LowRank(4, 6.0, ((0, 20),), dropout=0.4)).layer
    with torch.no_grad():
        ours.lora_B.normal_()
    x = torch.randn(3, 12)
    torch.manual_seed(5)
    found = ours(x)
    torch.manual_seed(5)
    dropped = F.dropout(x, 0.4)
    expected = F.linear(x, ours.weight, ours.bias) + 1.5 * dropped @ ours.lora_A.T @ ours.lora_B.T
    torch.testing.assert_close(found, expected)
    ours.eval()
    torch.testing.assert_close(ours(x), F.linear(x, merged_weight(ours, ours.lora), ours.bias))


def test_parts_of_a_fused_projection_are_layers_apart() -> None:
    model = trained(adapted(make_model(), split_qkv=True, target_modules=["q_proj", "v_proj"]))
    layer = model.blocks[1].attn.Wqkv
    x, width = torch.randn(5, layer.in_features), layer.out_features // 3
    (a_q, a_v), (b_q, b_v) = layer.lora_A.chunk(2), layer.lora_B.chunk(2)
    added = [1.5 * x @ a_q.T @ b_q.T, torch.zeros(5, width), 1.5 * x @ a_v.T @ b_v.T]
    torch.testing.assert_close(layer(x) - layer.base(x), torch.cat(added, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [GLU, DMOE], ids=["dense", "experts"])
def test_a_fresh_adapter_changes_nothing_and_a_merged_one_is_the_same(
    kind: str, settings: dict[str, Any]
) -> None:
    choice = dict(KINDS[kind])
    if settings is DMOE and kind not in ("LoRA", "rsLoRA"):  # stacked experts have neither
        choice["exclude_modules"] = ["experts"]
    before = logits(make_model(**settings))
    model = adapted(make_model(**settings), split_qkv=True, **choice)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    expected = logits(trained(model))
    assert not torch.allclose(expected, before, rtol=0, atol=1e-3)
    plain = make_model(**settings)
    plain.load_state_dict(dict(MergedState(model)))
    # stacked experts after an SVD: 1.0e-5 on a CPU with AMX, less on others
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=2e-5)
    with switched_off(model):
        assert torch.equal(logits(model), before)
    if "PiSSA" not in kind:
        other = make_model(**settings)
        plan = {name: lora for name, _, _, lora in adapted_layers(model)}
        added = {n: p.detach() for n, p in model.named_parameters() if is_added(n)}
        merge_into(other, plan, added)
        torch.testing.assert_close(logits(other), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "PiSSA"])
def test_an_adapted_head_gives_the_loss_and_gradients_of_its_merged_weight(kind: str) -> None:
    model = make_model(tie_word_embeddings=False)
    model = trained(adapted(model, target_modules=["lm_head"], **KINDS[kind]))
    head, labels = model.lm_head, TOKENS.roll(-1, 1)
    hidden = torch.randn(*TOKENS.shape, head.in_features, requires_grad=True)
    found = model.loss(hidden, labels)
    weight = merged_weight(head, head.lora).requires_grad_()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.head(hidden), hidden @ weight.T)
    torch.testing.assert_close(
        torch.autograd.grad(found, hidden)[0], torch.autograd.grad(expected, hidden)[0]
    )


def test_rows_of_tokens_have_the_gradients_of_the_full_tables() -> None:
    ids, labels, untied = [3, 60, 17], TOKENS.roll(-1, 1), {"tie_word_embeddings": False}
    plain = make_model(**untied)
    model = adapted(make_model(**untied), trainable_token_indices=ids, use_rslora=True)
    for one in (plain, model):
        one.loss(one(TOKENS), labels).backward()
    embedding, head = model.wte.lora_B.grad, model.lm_head.lora_A.grad
    torch.testing.assert_close(embedding.T, plain.wte.weight.grad[ids])
    torch.testing.assert_close(head, plain.lm_head.weight.grad[ids])
    assert embedding.abs().max() > 0 and head.abs().max() > 0
    assert model.wte.lora_A.grad is None and model.lm_head.lora_B.grad is None
    # What moves is rows of the tables, and no others.
    merged = MergedState(trained(model))
    for name, table in (("wte.weight", plain.wte.weight), ("lm_head.weight", plain.lm_head.weight)):
        rows = (merged[name] != table).any(1).nonzero().flatten().tolist()
        assert rows == sorted(ids)


def test_rows_of_tokens_of_a_tied_head_have_the_gradients_of_the_table() -> None:
    ids, labels = [3, 60, 17], TOKENS.roll(-1, 1)
    plain = make_model(tie_word_embeddings=True)
    model = adapted(make_model(tie_word_embeddings=True), trainable_token_indices=ids)
    for one in (plain, model):
        one.loss(one(TOKENS), labels).backward()
    torch.testing.assert_close(model.wte.lora_B.grad.T, plain.wte.weight.grad[ids])
    assert not hasattr(model, "lm_head") or not hasattr(model.lm_head, "lora_A")
    # The rows of the embedding and of the head are the same.
    merged = MergedState(trained(model))
    plain.load_state_dict(dict(merged))
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    moved = (merged["wte.weight"] != model.wte.weight).any(1).nonzero().flatten().tolist()
    assert moved == sorted(ids)


def test_lora_plus_leaves_rows_of_tokens_at_the_optimizer_s_rate() -> None:
    model = adapted(make_model(tie_word_embeddings=False), trainable_token_indices=[3, 60])
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, make_optimizer_config(), lora_plus_ratio=16.0)
    slow, fast = ({names[id(p)] for p in g["params"]} for g in optimizer.param_groups)
    assert all(name.startswith("blocks.") and name.endswith("lora_B") for name in fast)
    assert {"wte.lora_B", "lm_head.lora_A"} < slow


def test_values_are_a_function_of_seed_and_name() -> None:
    one, other = adapted(make_model(**DMOE)), adapted(make_model(**DMOE), target_modules=["w2"])
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, dict(one.named_parameters())[name])
    same = [layer.attn.Wqkv.lora_A for layer in one.blocks]
    assert not torch.equal(*same)
    bound = one.blocks[0].attn.out_proj.in_features ** -0.5  # peft's: kaiming uniform of sqrt(5)
    values = one.blocks[0].attn.out_proj.lora_A
    assert 0.8 * bound < values.abs().max() < bound


@pytest.mark.parametrize("how", ["checkpointing", COMPILED])
@pytest.mark.parametrize("settings", [GLU, DMOE], ids=["dense", "experts"])
def test_wrapped_blocks_give_the_same_gradients(how: str, settings: dict[str, Any]) -> None:
    def gradients(wrap: bool) -> dict[str, Tensor]:
        model = trained(adapted(make_model(**settings), split_qkv=True))
        root = Root(model)
        if wrap:
            mode = "default" if how == "compiled" else None
            wrap_blocks(root, activations(root, how == "checkpointing"), compile_mode=mode)
        loss = root(TOKENS, None, lambda m, hidden: m.loss(hidden, TOKENS.roll(-1, 1)))
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, found = gradients(False), gradients(True)
    assert plain.keys() == found.keys() and all(map(is_added, found))
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5)


def test_the_table_counts_what_was_wrapped() -> None:
    model = adapted(make_model(**DMOE), modules_to_save=["norm_f"])
    lines = {line.split()[0]: line.split()[1:] for line in adapter_table(model)}
    assert lines["ffn.experts.w1"] == ["2", "10", "4", f"{2 * 5 * 4 * (24 + 24):,}"]
    assert lines["attn.Wqkv"] == ["2", "2", "4", f"{2 * 4 * (24 + 72):,}"]
    assert "ffn.router" not in lines and "lm_head" not in lines
    names = saved_names(model)
    assert [n for n in names if not is_added(n)] == ["norm_f.weight", "norm_f.bias"]


@pytest.mark.parametrize(
    ("settings", "choice", "said"),
    [
        (GLU, {"target_modules": ["q_proj"]}, "q_proj' matches nothing"),
        (GLU, {"target_modules": ["query_key_value"]}, "it is called Wqkv"),
        (GLU, {"target_modules": ["Wqkw"]}, "the nearest are blocks.0.attn.Wqkv"),
        (GLU, {"target_modules": ["blocks.1-7"]}, "write 1-1"),
        (DMOE, {"target_modules": ["up_proj", "down_proj"]}, "the shared experts alone"),
        (GLU, {"target_modules": ["Wqkv"], "exclude_modules": ["out_proj"]}, "has no effect"),
        (GLU, {"target_modules": ["Wqkv"], "exclude_modules": ["attn"]}, "leaves nothing"),
        (GLU, {"r": 33}, "adapter.r: 33 is more than blocks.0.attn.Wqkv has"),
        (DMOE, {"r": 17}, "adapter.r: 17 is more than blocks.0.ffn.shared"),
        (DMOE, {"lora_dropout": 0.1}, "exclude_modules: [experts]"),
        (DMOE, {"use_dora": True}, "have no DoRA"),
        (DMOE, {"init_lora_weights": "pissa"}, "have no PiSSA; write default, or leave it out by"),
        (GLU, {"target_modules": ["wte"], "use_dora": True}, "adapter.use_dora: embeddings"),
        (GLU, {"modules_to_save": ["lm_hed"]}, "adapter.modules_to_save[0]: 'lm_hed'"),
        (GLU, {"modules_to_save": ["blocks.0.attn"]}, "has an adapter already"),
    ],
)
def test_what_cannot_be_is_said(
    settings: dict[str, Any], choice: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        adapted(make_model(**settings), **choice)
    assert said in str(error.value)


def test_freeze_by_names_and_ranges() -> None:
    model = make_model(**GLU)
    frozen = freeze_parts(model, ["wte", "blocks.0-0", "*.norm_1"])
    expected = {n for n, _ in model.named_parameters()
                if n.startswith(("wte.", "blocks.0.")) or ".norm_1." in n}  # fmt: skip
    assert set(frozen) == expected
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == expected
    with pytest.raises(UserError, match=r"freeze\[0\]: 'blocks.4' matches nothing"):
        freeze_parts(make_model(**GLU), ["blocks.4"])
    with pytest.raises(UserError, match="leave one to train"):
        freeze_parts(make_model(**GLU), ["*"])

"""Mixtures of experts in transformers: generation, their checkpoints' ways, what is different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import llmfoundry.hf  # noqa: F401  (registers the project's own class)
from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import LOSS
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.models.decoder import Decoder
from tests.hf.random_models import (
    BARE,
    CARD,
    CASES,
    CLIP,
    EOS,
    GQA,
    JITTER,
    MIXTURE,
    MOE,
    OSS,
    ROPE,
    SHARED,
    SUM,
    UNTIED,
    card_of,
    decoder,
    logits,
    rewrite,
    rows,
    settings,
    to_hf,
    write_tokenizer,
    written,
)
from tests.hf.test_hf_import import DBRX, DBRX_FEW, LLAMA_SHAPE, LOCAL_FEW, QWEN_MOE, make, read

EXPERTS = [
    (name, i)
    for name, cases in CASES.items()
    for i, case in enumerate(cases)
    if case.get("ffn", {}).get("ffn_type") == "dmoe"
]
DBRX_KEYS = {  # of ffn_config, all that transformers 5.17 takes: it fails at any other
    "ffn_act_fn",
    "ffn_hidden_size",
    "moe_num_experts",
    "moe_top_k",
    "moe_jitter_eps",
    "moe_loss_weight",
    "moe_normalize_expert_weights",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def greedy(model: Decoder, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """The rows of `prompt` (B, T) with `new` tokens more, none an end of text."""
    row = prompt
    for _ in range(new):
        last = logits(model, row)[:, -1]
        last[:, EOS] = -torch.inf
        row = torch.cat([row, last.argmax(-1, keepdim=True)], dim=1)
    return row


@pytest.mark.parametrize(("name", "case"), EXPERTS)
def test_logits_and_greedy_generations_are_transformers_own(
    name: str, case: int, tmp_path: Path
) -> None:
    folder, _ = written(name, tmp_path, case)
    prompt = rows(6)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = decoder(settings(**CASES[name][case]))
    with torch.no_grad():
        assert (theirs(rows()).logits - logits(model, rows())).abs().max() < 1e-5
    found = theirs.generate(prompt, do_sample=False, max_new_tokens=16, min_new_tokens=16)
    ours = greedy(model, prompt, 16)
    assert len(set(ours[:, 6:].flatten().tolist())) > 4
    assert torch.equal(found, ours)


MADE = [
    ("Mixtral", {**LLAMA_SHAPE, **LOCAL_FEW}),
    ("Qwen3Moe", QWEN_MOE),
    ("GraniteMoeShared", {**LLAMA_SHAPE, **LOCAL_FEW, "shared_intermediate_size": 12}),
]


@pytest.mark.parametrize(("kind", "options"), MADE)
def test_experts_saved_in_one_tensor_are_read_as_well(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = make(kind, options)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    (joint,) = (n for n in load_file(tmp_path / "model.safetensors") if "0" in n and "gate_up" in n)
    assert joint.endswith("experts.gate_up_proj"), "this is what the test is about"
    with torch.no_grad():
        expected = theirs(rows()).logits
    assert (logits(read(tmp_path), rows()) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["DbrxForCausalLM", "OlmoeForCausalLM"])
def test_a_mixture_of_one_expert_comes_back_as_the_dense_layer_that_it_is(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    one = MOE | {"moe_num_experts": 1, "moe_top_k": 1}
    model, out = decoder(settings(**CASES[name][0] | {"ffn": one})), tmp_path / "out"
    assert to_hf(model, tokenizer, out, dtype="fp32", card=CARD) == name
    back = read(out)
    assert back.config.ffn_config.ffn_type == "mptglu"
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out).eval()(rows()).logits
    assert (theirs - logits(model, rows())).abs().max() < 1e-5
    assert (theirs - logits(back, rows())).abs().max() < 1e-5


def test_dbrx_has_its_rotary_base_where_transformers_reads_it_and_where_it_fails_without(
    tmp_path: Path,
) -> None:
    _, config = written("DbrxForCausalLM", tmp_path)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert config["attn_config"]["rope_theta"] == 500000.0
    assert config["ffn_config"].keys() == DBRX_KEYS


def test_dbrx_as_databricks_wrote_it_is_read_with_the_base_that_transformers_overlooks(
    tmp_path: Path,
) -> None:
    """Its config.json has the base in attn_config alone; transformers takes 10000."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    theirs = make("Dbrx", {**DBRX, "ffn_config": DBRX_FEW, "rope_parameters": rope})
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    rewrite(tmp_path, config, "attn_config.rope_theta", 500000)
    with torch.no_grad():
        expected = theirs(rows()).logits
        overlooked = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(rows()).logits
    assert (overlooked - expected).abs().max() > 0.1
    assert (logits(read(tmp_path), rows()) - expected).abs().max() < 1e-5


LOSSES = [name for name, a in ARCHITECTURES.items() if any(f.ours == LOSS for f in a.fields)]


@pytest.mark.parametrize("name", LOSSES)
def test_the_balancing_loss_weighs_as_much_in_transformers(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    """With a router of zeros probabilities are equal: the loss is its value at perfect balance."""
    ffn = (OSS if name == "GptOssForCausalLM" else SUM) | {"moe_loss_weight": 0.3}
    shared = SHARED if "Shared" in name else {}
    model = decoder(settings(**CASES[name][0] | {"ffn": ffn | shared}))
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.router.weight.zero_()
            if block.ffn.router.bias is not None:
                block.ffn.router.bias.zero_()
    out = tmp_path / "out"
    assert to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture=name) == name
    theirs = AutoModelForCausalLM.from_pretrained(out, output_router_logits=True)
    with torch.no_grad():
        plain = theirs(rows(), labels=rows(), output_router_logits=False).loss
        difference = float(theirs(rows(), labels=rows()).loss - plain)
        _, routing = model.train().run(rows())
    assert routing is not None
    assert difference == pytest.approx(float(routing.losses["lbl"]) / len(rows()), rel=1e-4)
    assert difference == pytest.approx(0.3, rel=1e-4)
    assert from_hf(str(out))[0].ffn_config.moe_loss_weight == 0.3


def test_the_card_of_a_mixture_says_what_is_different_in_transformers(
    tokenizer: Path, tmp_path: Path
) -> None:
    case = {"attn": ROPE | CLIP | GQA, "ffn": SUM | JITTER, **BARE, **UNTIED}
    texts = {}
    for name in ("DbrxForCausalLM", "llmfoundry"):
        model, out = decoder(settings(**case)), tmp_path / name
        to_hf(model, tokenizer, out, dtype="bf16", card=card_of(model.config), architecture=name)
        texts[name] = (out / "README.md").read_text()
    # two blocks' routers, attention and norms, and two of five experts of 3 x 24 x 32
    active = 2 * 128 * 32 + 32 + 2 * (5 * 32 + 2 * 3 * 24 * 32 + (2 * 32 + 32) * 32 + 64)
    assert f"{active:,} active (" in texts["DbrxForCausalLM"]
    said = texts["DbrxForCausalLM"].split("## In transformers")[1].split("##")[0]
    assert "in bf16" in said and "compare logits in fp32" in said
    assert "`ffn_config.moe_loss_weight` is moe_loss_weight / moe_top_k" in said
    assert "jitter reaches the experts" in said
    assert "## In transformers" not in texts["llmfoundry"]


def test_the_router_that_the_card_warns_of_is_transformers_own(
    tokenizer: Path, tmp_path: Path
) -> None:
    """In bf16 its probabilities tie, and tokens go elsewhere; in fp32 both agree."""
    ffn = SUM | {"moe_num_experts": 16, "moe_top_k": 4}
    model = decoder(settings(attn=ROPE | CLIP, ffn=ffn, **BARE, **UNTIED)).to(torch.bfloat16)
    out = tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="bf16", card=CARD)
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours = model.blocks[0].ffn
    differing = {}
    with torch.no_grad():
        _, chosen = ours.router.choose(ours.router(x).softmax(-1))
        for dtype in (torch.bfloat16, torch.float32):
            theirs = (
                AutoModelForCausalLM.from_pretrained(out, dtype=dtype).transformer.blocks[0].ffn
            )
            _, others = theirs.route_tokens_to_experts(theirs.router(x.to(dtype)))
            pairs = chosen.sort(1).values != others.sort(1).values
            differing[dtype] = float(pairs.any(1).float().mean())
    assert differing[torch.float32] == 0
    assert 0.001 < differing[torch.bfloat16] < 0.2


OTHERS = {  # what no class of transformers has: the setting, and what it is called in the refusal
    "mlp experts": ({"mlp_type": "mlp"}, "ffn_config.mlp_type: mlp; .* needs glu"),
    "biases": ({"moe_balancing": "bias"}, "ffn_config.moe_balancing: bias; .* needs loss or none"),
    "in turn": ({"uniform_expert_assignment": True}, "ffn_config.uniform_expert_assignment: true"),
    "forced": ({"moe_force_balance": True}, "ffn_config.moe_force_balance: true; .* needs null"),
    "3-norm": ({"moe_normalize_expert_weights": 3.0}, "moe_normalize_expert_weights: 3.0; .* 1"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_what_no_class_of_transformers_has_is_refused_by_its_key(which: str) -> None:
    values, refusal = OTHERS[which]
    config = settings(**MIXTURE | {"attn": ROPE | GQA, "ffn": SUM | values})
    with pytest.raises(UserError, match=refusal):
        choose_architecture(config, None)
    assert choose_architecture(config, "llmfoundry") == "llmfoundry"


def test_a_mixture_is_not_likened_to_a_dense_class() -> None:
    config = settings(attn=ROPE | {"qk_gn": True}, ffn=SUM | {"mlp_type": "mlp"}, norm_eps=0.1)
    with pytest.raises(UserError) as caught:
        choose_architecture(config, None)
    nearest = caught.value.problems[0]
    assert any(name in nearest for name, a in ARCHITECTURES.items() if a.mixture), nearest


def test_biases_of_experts_are_refused_by_no_bias() -> None:
    config = settings(attn=ROPE | CLIP, ffn=SUM, **UNTIED)
    with pytest.raises(UserError, match=r"(?m)^model\.no_bias: false; Dbrx.* needs true"):
        choose_architecture(config, "DbrxForCausalLM")


def test_qwens_own_name_for_the_number_of_experts_is_read(tmp_path: Path) -> None:
    """Transformers 5 saves num_local_experts; what Qwen published has num_experts."""
    folder, config = written("Qwen3MoeForCausalLM", tmp_path)
    assert config.pop("num_local_experts") == config["num_experts"] == 5
    rewrite(folder, config, "num_experts_per_tok", 2)
    assert from_hf(str(folder))[0].ffn_config.moe_num_experts == 5


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", 2),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", [1]),
        ("OlmoeForCausalLM", "clip_qkv", 8.0),
        ("GraniteMoeForCausalLM", "residual_multiplier", 0.5),
    ],
)
def test_other_peoples_mixtures_that_we_are_not_are_refused_by_key(
    kind: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder, config = written(kind, tmp_path)
    rewrite(folder, config, key, value)
    with pytest.raises(UserError, match=f"^config.json: {key} "):
        from_hf(str(folder))


def test_gated_shared_experts_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_moe").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model_type 'qwen2_moe' cannot be read"):
        from_hf(str(tmp_path))


@pytest.mark.parametrize("key", ["n_group", "topk_method"])
def test_groups_of_deepseek_v2_are_read_by_its_method(key: str, tmp_path: Path) -> None:
    folder, config = written("DeepseekV2ForCausalLM", tmp_path, case=1)
    assert from_hf(str(folder))[0].ffn_config.moe_n_group == 4
    rewrite(folder, config, key, {"n_group": None, "topk_method": "greedy"}[key])
    assert from_hf(str(folder))[0].ffn_config.moe_n_group is None
    rewrite(folder, config, "topk_method", "noaux_tc")
    with pytest.raises(UserError, match=r"^config.json: topk_method 'noaux_tc'; the decoder has"):
        from_hf(str(folder))


def test_balancing_biases_of_deepseek_v3_stay_fp32_and_are_read_exactly(
    tokenizer: Path, tmp_path: Path
) -> None:
    model, out = decoder(settings(**CASES["DeepseekV3ForCausalLM"][0])), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="bf16", card=CARD)
    file = out / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = model.blocks[1].ffn.router.biases()
    assert weights[name].dtype == torch.float32 and torch.equal(weights[name], expected)
    weights[name] = torch.randn(len(expected), generator=torch.Generator().manual_seed(8)) / 100
    weights["model.layers.61.eh_proj.weight"] = torch.ones(2, 2)  # as the published weights have
    save_file(weights, file)
    assert torch.equal(read(out).blocks[1].ffn.router.biases(), weights[name])


def test_more_experts_chosen_than_there_are_is_refused(tmp_path: Path) -> None:
    folder, config = written("MixtralForCausalLM", tmp_path)
    rewrite(folder, config, "num_experts_per_tok", 9)
    with pytest.raises(UserError, match=r"^config\.json: .*moe_top_k: 9 is more than"):
        from_hf(str(folder))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("MixtralForCausalLM", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
        ("DbrxForCausalLM", "transformer.blocks.1.ffn.experts.mlp.v1"),
        ("GraniteMoeSharedForCausalLM", "model.layers.0.shared_mlp.input_linear.weight"),
    ],
)
def test_experts_that_are_missing_or_of_another_shape_are_refused_by_name(
    name: str, tensor: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    folder, _ = written(name, tmp_path)
    file = folder / "model.safetensors"
    whole = load_file(file)
    save_file({key: value for key, value in whole.items() if key != tensor}, file)
    with pytest.raises(UserError, match=f"^{tensor}: the tensor is missing"):
        from_hf(str(folder))
    save_file(whole | {tensor: whole[tensor][1:].clone()}, file)
    with pytest.raises(UserError, match=f"^config.json: makes {tensor} "):
        from_hf(str(folder))
    save_file(whole | {f"{tensor}_bias": torch.ones(3)}, file)
    with pytest.raises(UserError, match="the decoder has no such weights"):
        from_hf(str(folder))


def test_balancing_biases_stay_whole_numbers_whatever_the_dtype(
    tokenizer: Path, tmp_path: Path
) -> None:
    """300 is no bf16 number."""
    ffn = SUM | {"moe_balancing": "bias"}
    model = decoder(settings(attn=ROPE, ffn=ffn)).to(torch.bfloat16)
    steps = torch.tensor([301, -257, 3, 0, 1001], dtype=torch.int32)
    model.blocks[1].ffn.router.bias_steps.copy_(steps)
    out = tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="bf16", card=CARD, architecture="llmfoundry")
    assert torch.equal(from_hf(str(out))[1]["blocks.1.ffn.router.bias_steps"], steps)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.model.blocks[1].ffn.router.bias_steps, steps)


def test_training_our_own_class_counts_the_routers_losses(tokenizer: Path, tmp_path: Path) -> None:
    ffn = SUM | {"moe_loss_weight": 0.5, "moe_zloss_weight": 0.1}
    model, out = decoder(settings(attn=ROPE, ffn=ffn)), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture="llmfoundry")
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        plain = theirs.eval()(rows(), labels=rows()).loss
        whole = theirs.train()(rows(), labels=rows()).loss
        _, routing = model.train().run(rows())
    assert routing is not None and routing.losses.keys() == {"lbl", "z"}
    expected = sum(float(loss) for loss in routing.losses.values()) / 2
    assert expected > 0.5 and float(whole - plain) == pytest.approx(expected, rel=1e-4)
    # two microbatches of one row are the batch of both, as transformers' Trainer adds them up
    count = 2 * (rows().shape[1] - 1)
    with torch.no_grad():
        parts = [theirs(r[None], labels=r[None], num_items_in_batch=count).loss for r in rows()]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-5)


def test_transformers_trainer_trains_our_own_class_of_mixtures(
    tokenizer: Path, tmp_path: Path
) -> None:
    model, out = decoder(settings(attn=ROPE, ffn=MOE | SHARED)), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture="llmfoundry")
    theirs = AutoModelForCausalLM.from_pretrained(out)
    data = [{"input_ids": row, "labels": row} for row in rows()] * 8
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=8,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(theirs, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    changed = theirs.model.blocks[0].ffn.experts.w1 != model.blocks[0].ffn.experts.w1
    assert changed.any()


def test_a_mixture_from_its_config_alone_is_initialized(tokenizer: Path, tmp_path: Path) -> None:
    model, out = decoder(settings(attn=ROPE, ffn=MOE | {"moe_balancing": "bias"})), tmp_path / "out"
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture="llmfoundry")
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    ffn = fresh.model.blocks[0].ffn
    for name, parameter in ffn.experts.named_parameters():
        expected = 0.0 if name.endswith("bias") else 0.02
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.15), name
    assert not ffn.router.bias_steps.any()

"""Every line that the model's sections can yield, from recipes as users write them."""

from __future__ import annotations

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.attention import LATENT, LayerConfig
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe

ROPE = "model.attn_config.rope=true"
DEEPSEEK = " ".join(
    f"model.attn_config.{key}"
    for key in (
        f"attn_type={LATENT}",
        "rope=true",
        "kv_lora_rank=32",
        "qk_nope_head_dim=16",
        "qk_rope_head_dim=8",
    )
)
LLAMA3 = "type: llama3, factor: 8, low_freq_factor: 4, high_freq_factor: 1"
KINDS = "overrides: {near: {attn_config: {sliding_window_size: 8}}}"
LINES = {
    "model.attn_config={nope: true, alibi: true}": "model.attn_config.alibi: and nope exclude",
    "model.attn_config={qk_ln: true, qk_gn: true}": "model.attn_config.qk_gn: and qk_ln exclude",
    f"{DEEPSEEK} model.attn_config.kv_lora_rank=null": "model.attn_config.kv_lora_rank: attn_type:",
    f"{DEEPSEEK} model.attn_config.rope=false": "model.attn_config.rope: false, but",
    f"{DEEPSEEK} model.attn_config.qk_rope_head_dim=7": "model.attn_config.qk_rope_head_dim: 7; wr",
    f"{DEEPSEEK} model.attn_config.clip_qkv=8": "model.attn_config.clip_qkv: clamps queries",
    f"{DEEPSEEK} model.attn_config.qk_ln=true": "model.attn_config.qk_ln: normalizes queries",
    f"{DEEPSEEK} model.attn_config.sinks=true": "model.attn_config.sinks: attn_type",
    f"{DEEPSEEK} model.head_dim=64": "model.head_dim: 64, but qk_nope_head_dim + qk_rope_head_dim",
    f"{DEEPSEEK} model.attention_bias=true": "model.attention_bias: true, but the projections",
    f"{DEEPSEEK} model.attn_config.rope_hf_config.type=dynamic"
    " model.attn_config.rope_hf_config.factor=2": "model.attn_config.rope_hf_config.type: dynamic",
    "model.attn_config.kv_lora_rank=64": "model.attn_config.kv_lora_rank: has no effect with",
    "model.attn_config.sliding_window_size=0": "model.attn_config.sliding_window_size: 0; write -1",
    "model.attn_config.attn_pdrop=1": "model.attn_config.attn_pdrop: 1.0 is not a fraction",
    "model.attn_config.attn_logit_softcapping=0": "model.attn_config.attn_logit_softcapping: 0.0 m",
    f"{ROPE} model.attn_config.rope_hf_config.type=linaer": "model.attn_config.rope_hf_config.type:"
    " 'linaer' is not a choice; did you mean 'linear'?",
    f"{ROPE} model.attn_config.rope_hf_config.type=linear": "model.attn_config.rope_hf_config.facto"
    "r: type: linear needs it; write a number",
    f"{ROPE} model.attn_config.rope_hf_config.factor=2": "model.attn_config.rope_hf_config.factor:"
    " has no effect with model.attn_config.rope_hf_config.type: no_scaling; remove it",
    "model.attn_config={rope: true, rope_hf_config: {"
    f"{LLAMA3}, original_max_position_embeddings: 64}}}}": "model.attn_config.rope_hf_config.high_"
    "freq_factor: 1.0 must be greater than low_freq_factor (4.0)",
    "model.attn_config.attn_temperature_tuning={attn_scale: 1, floor_scale: 0}": "model.attn_config"
    ".attn_temperature_tuning.floor_scale: 0 is too small",
    "model.attn_config.attn_temperature_tuning.floor_scale=9": "model.attn_config.attn_temperature_"
    "tuning.floor_scale: has no effect with model.attn_config.attn_temperature_tuning.attn_scale: 0"
    "; remove it",
    "model={head_dim: 2, attn_config: {rope: true, rope_hf_config: {type: dynamic, factor: 2}}}": (
        "model.attn_config.rope_hf_config.type: dynamic needs a head_dim above 2"
    ),
    "model.learned_pos_emb=false": "model.learned_pos_emb: false leaves the model without po",
    "model.attn_config.nope=true model.learned_pos_emb=true": "model.learned_pos_emb: true, with",
    "model.ffn_config.ffn_act_fn=gelo": "model.ffn_config.ffn_act_fn: 'gelo' is not a choice; did",
    "model.ffn_config.ffn_act_fn={name: gelu, slope: 1}": "model.ffn_config.ffn_act_fn.slope: gelu"
    " takes approximate; remove it",
    "model.ffn_config.ffn_act_fn={name: gelu, approximate: tnah}": "model.ffn_config.ffn_act_fn.app"
    "roximate: 'tnah' is not a choice; did you mean 'tanh'?",
    "model.ffn_config.ffn_act_fn={name: elu, alpha: much}": "model.ffn_config.ffn_act_fn.alpha: 'mu"
    "ch' is not a number",
    "model.ffn_config.ffn_act_fn={alpha: 1}": "model.ffn_config.ffn_act_fn: has no name; write {na",
    "model.init_config.name=kaiming_normal": "model.init_config.name: 'kaiming_normal' is not a ch",
    "model.init_config={name: baseline_, fan_mode: fan_in}": "model.init_config.fan_mode: has no e",
    "model.init_config.init_gain=1": "model.init_config.init_gain: has no effect without an xavier",
    "model.init_config={name: neox_init_, init_div_is_residual: 2}": "model.init_config.init_div_i",
    "model.init_config.init_div_is_residual=0.0": "model.init_config.init_div_is_residual: 0.0 mu",
    "model.init_config.fan_mode=fan": "model.init_config.fan_mode: 'fan' is not a choice (choices:",
    "model.init_config.init_nonlinearity=gelu": "model.init_config.init_nonlinearity: 'gelu' is no",
    "model.init_config.emb_init_uniform_lim=[1,0]": "model.init_config.emb_init_uniform_lim: [1.0",
    "model.init_config={emb_init_std: 1, emb_init_uniform_lim: 1}": "model.init_config.emb_init_un",
    "model.logit_scale=inv_sqrt": "model.logit_scale: 'inv_sqrt' is not a choice; did you mean",
    "model.logit_scale=0": "model.logit_scale: 0.0 must be greater than 0",
    "model.final_logit_softcapping=0": "model.final_logit_softcapping: 0.0 must be greater than 0",
    "model.emb_pdrop=-1": "model.emb_pdrop: -1.0 is not a fraction",
    "model.resid_pdrop=2": "model.resid_pdrop: 2.0 is not a fraction",
    "model.embedding_fraction=0": "model.embedding_fraction: 0.0; write a number in (0, 1]",
    "model.block_overrides={order: [{name: default, repeat: 3}]}": "model.block_overrides.order: is"
    " 3 layers long, but n_layers is 24",
    "model.block_overrides={order: [{name: nera, repeat: 24}], " + KINDS + "}": "model.block_overri"
    "des.order[0].name: 'nera' is not in overrides; did you mean 'near'?",
    "model.block_overrides={order: [{name: default, repeat: 24}], " + KINDS + "}": "model.block_ove"
    "rrides.overrides.near: is not in order and has no effect; remove it",
    "model.block_overrides={order: [{repeat: 24}]}": "model.block_overrides.order[0]: has both or",
    "precision=fp32 model.attn_config.attn_impl=flash": "model.attn_config.attn_impl: flash comput",
    "compile_mode=default": "compile_mode: has no effect with compile: auto, only with true; "
    "remove it",
    "compile=true compile_mode=reduce-overhead parallel.data_parallel_shard_degree=8": "compile_mod"
    "e: reduce-overhead replays CUDA graphs, whose weights may not move, and shards (parallel.data_"
    "parallel_shard_degree: 8) are gathered anew for every block; write default or max-autotune-no",
    "compile=true compile_mode=max-autotune parallel.data_parallel_shard_degree=2": "compile_mode:"
    " max-autotune replays CUDA graphs",
    "compile=true compile_mode=fast": "compile_mode: 'fast' is not a choice",
    "optimizer.momentum=0.9": "optimizer.momentum: has no effect with optimizer.name: decoupled_ada"
    "mw, only with muon; remove it",
    "optimizer={name: muon, momentum: 1}": "optimizer.momentum: 1.0; write a number in [0, 1)",
    "optimizer.disable_grad=['(']": "optimizer.disable_grad[0]: '(' is not a regular expression: m",
    "optimizer.param_groups=[{param_str_match: norm}]": "optimizer.param_groups[0].param_str_match:"
    " the group changes nothing",
    "optimizer.param_groups=[{param_str_match: norm, lr: 0}]": "optimizer.param_groups[0].lr: 0.0",
    "optimizer.param_groups=[{lr: 1}]": "optimizer.param_groups[0].param_str_match: is empty",
    "callbacks.early_stopper.patience=2": "callbacks.early_stopper.patience: has no effect without",
    "callbacks.early_stopper={metric: a, mode: less}": "callbacks.early_stopper.mode: 'less' is no",
    "callbacks.watch.loss_spike=ski": "callbacks.watch.loss_spike: 'ski' is not a choice; did",
    "callbacks.watch.not_finite=log": "callbacks.watch.not_finite: 'log' is not a choice",
    "callbacks.watch.roll_back_steps=9": "callbacks.watch.roll_back_steps: has no effect without",
    "callbacks.watch={slow_rank: off, slow_rank_above: 2}": "callbacks.watch.slow_rank_above: has "
    "no effect with callbacks.watch.slow_rank: off; remove it",
    "callbacks.watch={loss_spike: off, gradient_spike: off, spike_window: 64}": "callbacks.watch."
    "spike_window: has no effect with callbacks.watch.loss_spike: off and callbacks.watch.gradient_"
    "spike: off; remove it",
    "callbacks.watch={loss_spike: stop, gradient_spike: off, spikes_in_a_row: 3}": "callbacks."
    "watch.spikes_in_a_row: has no effect without callbacks.watch.loss_spike, callbacks.watch.gra"
    "dient_spike or callbacks.watch.not_finite: log or skip; remove it",
    "callbacks.watch.interval=0": "callbacks.watch.interval: 0 is too small; write 1 or more",
    "callbacks.watch.slow_rank_above=1": "callbacks.watch.slow_rank_above: 1.0 must be greater",
    "callbacks.watch.spike_window=4": "callbacks.watch.spike_window: 4 is too small; write 8",
    "callbacks.gc_interval=-1": "callbacks.gc_interval: -1 is too small; write 0 or more",
    "logger.wandb_project=x": "logger.wandb_project: has no effect with logger.wandb: false",
    "logger={wandb: true, wandb_mode: on}": "logger.wandb_mode: ",
}


def problems(*words: str) -> tuple[str, ...]:
    try:
        checked(TrainRecipe, None, ["run_name=x", *words])
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("words", LINES)
def test_a_mistake_is_one_line_that_names_its_key(words: str) -> None:
    found = problems(*([words] if "{" in words else words.split(" ")))
    assert len(found) == 1 and found[0].startswith(LINES[words])


def test_each_key_of_a_section_without_effect_has_a_line() -> None:
    key, why = (
        "model.attn_config.rope_hf_config",
        "has no effect with model.attn_config.rope: false",
    )
    found = problems(f"{key}={{type: linear, factor: 2}}")
    assert found == tuple(f"{key}.{name}: {why}; remove it" for name in ("type", "factor"))


def test_cuda_graphs_without_shards_and_shards_without_them_are_served() -> None:
    assert problems("compile=true", "compile_mode=reduce-overhead") == ()
    for mode in ("default", "max-autotune-no-cudagraphs"):
        words = (f"compile_mode={mode}", "parallel.data_parallel_shard_degree=8")
        assert problems("compile=true", *words) == ()


BIAS, CAP, DROP = "alibi: true", "attn_logit_softcapping: 30.0", "attn_pdrop: 0.1"
UNSERVED = [  # backend, options, what the line says
    ("sdpa", CAP, "attn_logit_softcapping: PyTorch's fused attention has no softcap; write auto,"
    " flex, flash, flash3 or torch"),
    ("sdpa", f"{CAP}, {DROP}", "attn_logit_softcapping: PyTorch's fused attention has no softcap;"
    " write auto or torch"),
    ("flex", DROP, "attn_pdrop: FlexAttention has no dropout; write auto, sdpa, flash or torch"),
    ("varlen", BIAS, "alibi: PyTorch's varlen attention adds no bias; write auto, sdpa, flex, flash"
    " or torch"),
    ("varlen", CAP, "attn_logit_softcapping: PyTorch's varlen attention has no softcap; write auto,"
    " flex, flash, flash3 or torch"),
    ("varlen", DROP, "attn_pdrop: PyTorch's varlen attention has no dropout; write auto, sdpa,"
    " flash or torch"),
    ("flash", f"{CAP}, {DROP}", "attn_logit_softcapping with attn_pdrop: flash-attn has no dropout"
    " under a softcap; write auto or torch"),
    ("flash", f"{BIAS}, {CAP}, {DROP}", "attn_logit_softcapping with attn_pdrop: flash-attn has no"
    " dropout under a softcap; write auto or torch"),
]  # fmt: skip


@pytest.mark.parametrize(("impl", "options", "line"), UNSERVED)
def test_a_backend_refuses_what_it_cannot_serve(impl: str, options: str, line: str) -> None:
    found = problems(f"model.attn_config={{attn_impl: {impl}, {options}}}")
    assert found == (f"model.attn_config.attn_impl: {impl} cannot serve {line}",)
    for other in line.partition("; write ")[2].replace(" or ", ", ").split(", "):
        assert problems(f"model.attn_config={{attn_impl: {other}, {options}}}") == ()


@pytest.mark.parametrize("options", [BIAS, CAP, DROP, f"{BIAS}, {CAP}", f"{BIAS}, {DROP}"])
def test_flash_serves_every_option_but_dropout_under_a_softcap(options: str) -> None:
    assert problems(f"model.attn_config={{attn_impl: flash, {options}}}") == ()


@pytest.mark.parametrize("impl", ["varlen", "flash"])
def test_a_head_that_is_wider_than_the_kernels_is_refused(impl: str) -> None:
    found = problems(f"model={{head_dim: 320, attn_config: {{attn_impl: {impl}}}}}")
    assert found == (
        f"model.attn_config.attn_impl: {impl} serves heads at most 256 wide, not 320;"
        " write auto, sdpa, flex or torch",
    )


def overridden(order: str, **more: object) -> TrainRecipe:
    kinds = (
        "{near: {attn_config: {sliding_window_size: 8}},"
        " same: {attn_config: {sliding_window_size: 8, reuse_kv_layer_idx: -1}},"
        " far: {attn_config: {nope: true}}}"
    )
    words = [f"model.block_overrides={{order: {order}, overrides: {kinds}}}", ROPE]
    return checked(
        TrainRecipe, None, ["run_name=x", *words, *(f"{k}={v}" for k, v in more.items())]
    )


def test_block_overrides_expand_in_order() -> None:
    order = "[{name: default}, {order: [{name: near}, {name: same, repeat: 2}], repeat: 2}, "
    recipe = overridden(order + "{name: far}]", **{"model.n_layers": 8})
    recipe.fill()
    assert list(recipe.check()) == []
    plain, near = LayerConfig(-1, True, 0), LayerConfig(8, True, 1)
    again = LayerConfig(8, True, 4)
    assert recipe.model.layers() == [
        *(plain, near, near, near, again, again, again),
        LayerConfig(-1, False, 7),
    ]


def test_keys_of_another_kind_of_layer_can_be_reused_but_not_of_none() -> None:
    order = "[{name: near}, {name: default}, {name: same}, {name: far}]"
    recipe = overridden(order, **{"model.n_layers": 4})
    assert recipe.model.layers()[2] == LayerConfig(8, True, 1)
    with pytest.raises(UserError, match="-1 from layer 0 is before the first"):
        overridden("[{name: same}, {name: near}, {name: far}]", **{"model.n_layers": 3})


def test_layers_that_reuse_keys_upwards_are_lines_and_no_traceback() -> None:
    kinds = "overrides: {up: {attn_config: {reuse_kv_layer_idx: 5}},"
    kinds += " back: {attn_config: {reuse_kv_layer_idx: -1}}}"
    order = "order: [{name: up}, {name: back}]"
    with pytest.raises(UserError) as error:
        checked(
            TrainRecipe,
            None,
            ["run_name=x", "model.n_layers=2", f"model.block_overrides={{{order}, {kinds}}}"],
        )
    assert any("5; write a negative number" in line for line in error.value.problems)

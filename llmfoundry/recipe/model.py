"""The `model` section: the shape of the decoder, with LLM Foundry's key names.

A field whose default is None is either derived from other keys, as its text says, or belongs to a
setting that is off. The keys of a mixture of experts have the names of LLM Foundry and megablocks
if their meaning is the same, and are in the same section as the other keys of the layer.
`HFModelConfig` describes a model of a transformers class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from llmfoundry.recipe.attention import (
    NORMS,
    AttentionConfig,
    BlockOverridesConfig,
    LayerConfig,
    ResolvedAttentionConfig,
    layer_configs,
)
from llmfoundry.recipe.checks import above, divides, inert, one_of, set_defaults
from llmfoundry.recipe.resolve import copy_as
from llmfoundry.recipe.schema import (
    FRACTION,
    MOST_LAYERS,
    POSITIVE,
    TOKENS,
    WIDTH,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)

FFN_TYPES = ("mptmlp", "mptglu", "dmoe")
OTHER_MOE_NAMES = {  # LLM Foundry's, of which each is something else
    "torch_dmoe": "is LLM Foundry's name of a mixture without a balancing loss; write dmoe",
    "mb_dmoe": "is LLM Foundry's name of megablocks' mixture; write dmoe",
    "mb_moe": "is LLM Foundry's name of a mixture that drops tokens, which dmoe never does; write"
    " dmoe",
}
MLP_TYPES = ("mlp", "glu")
BALANCING = ("loss", "bias", "none")
LBL_SCOPES = ("row", "microbatch", "global")
SCORING_FUNCS = ("softmax", "sigmoid")
MOE_IMPLS = ("grouped_mm", "torch", "megablocks")

ACTIVATIONS: dict[str, tuple[str, ...]] = {  # element by element, and the arguments each takes
    "gelu": ("approximate",),
    "gelu_tanh": (),
    "quick_gelu": (),
    "silu": (),
    "relu": (),
    "relu2": (),
    "relu6": (),
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "selu": (),
    "mish": (),
    "softplus": ("beta", "threshold"),
    "softsign": (),
    "sigmoid": (),
    "logsigmoid": (),
    "tanh": (),
    "tanhshrink": (),
    "softshrink": ("lambd",),
    "hardshrink": ("lambd",),
    "hardsigmoid": (),
    "hardswish": (),
    "hardtanh": ("min_val", "max_val"),
}


_MOE = Only("ffn_type", "dmoe")
_BY_LOSS = Only("moe_balancing", ("loss", None))  # the default of a mixture


@dataclass
class FFNConfig:
    """The feed-forward layer."""

    REMOVED: ClassVar[dict[str, str]] = {
        "moe_compress_activations": "experts are compressed with all else of their blocks; remove"
        " it, and write parallel.activation_compression: int8"
    }
    ffn_type: Annotated[str, choice(FFN_TYPES, reasons=OTHER_MOE_NAMES)] = "mptmlp"
    """mptmlp: down(act(up x)). mptglu: down(act(gate x) * up x) (Shazeer, 2020). dmoe: a dropless
    mixture of experts (Gale et al., 2022), of which a router selects a few for each token."""
    ffn_act_fn: Annotated[str | dict[str, Any], choice(ACTIVATIONS)] = "gelu"
    """An elementwise function of torch.nn.functional, or gelu_tanh, quick_gelu or relu2 (squared
    ReLU). With arguments: {name: leaky_relu, negative_slope: 0.1}."""
    ffn_hidden_size: Annotated[int | None, WIDTH] = None
    """Inner width, with dmoe of one expert; unset: d_model * expansion_ratio."""
    moe_num_experts: Annotated[int | None, Range(1, 2**16), _MOE] = None
    """Number of experts of a layer; required."""
    moe_top_k: Annotated[int | None, Range(1, 2**16), _MOE] = None
    """Number of experts that process a token; default 1."""
    mlp_type: Annotated[str | None, choice(MLP_TYPES), _MOE] = None
    """The kind of each expert: mlp (as mptmlp; the default) or glu (as mptglu)."""
    moe_normalize_expert_weights: Annotated[float | None, POSITIVE, _MOE] = None
    """Divide the expert weights of a token by their p-norm, for this p. 1 makes their sum 1, as in
    DBRX. Unset: the weights stay probabilities over all experts."""
    moe_scoring_func: Annotated[str | None, choice(SCORING_FUNCS), _MOE] = None
    """The scores of experts. softmax (the default): of the router logits over all experts. sigmoid:
    of each logit (DeepSeek-V3)."""
    moe_n_group: Annotated[int | None, Range(1, 2**16), _MOE] = None
    """Number of groups of adjacent experts. A token chooses among the experts of its best groups
    (DeepSeek-V2). The score of a group is the highest score of its experts; with sigmoid, the sum
    of the two highest. Unset: no groups."""
    moe_topk_group: Annotated[int | None, Range(1, 2**16), Only("moe_n_group")] = None
    """Number of groups that a token chooses experts from; required with moe_n_group."""
    moe_routed_scaling_factor: Annotated[float | None, POSITIVE, _MOE] = None
    """Factor on the expert weights of a token, after moe_normalize_expert_weights; unset: none."""
    moe_jitter_eps: Annotated[float | None, _MOE] = None
    """During training, multiply the input of the router by random numbers from 1 - moe_jitter_eps
    to 1 + moe_jitter_eps (Fedus et al., 2021); unset: no noise."""
    moe_balancing: Annotated[str | None, choice(BALANCING), _MOE] = None
    """How the expert load is balanced. loss: the load-balancing loss (Shazeer et al., 2017; the
    default). bias: a number for each expert that is added to its score when experts are selected,
    and adjusted after every step (Wang et al., 2024). none: no balancing."""
    moe_loss_weight: Annotated[float | None, POSITIVE, _BY_LOSS] = None
    """Weight of the load-balancing loss, which equals this number at perfect balance; default
    0.01."""
    moe_lbl_scope: Annotated[str | None, choice(LBL_SCOPES), _BY_LOSS] = None
    """Tokens over which the expert load is counted. row: each sequence (the default; independent of
    the microbatch). microbatch: as in megablocks. global: the microbatches of all processes (Qiu et
    al., 2025), which lets experts specialize by domain; this communicates a few hundred numbers per
    layer."""
    moe_bias_update_rate: Annotated[float | None, POSITIVE, Only("moe_balancing", "bias")] = None
    """How far a step moves the bias of an expert; default 0.001."""
    moe_zloss_weight: Annotated[float | None, POSITIVE, _MOE] = None
    """Weight of the router z-loss, the mean squared logsumexp of the router logits (0.001 in Zoph
    et al., 2022); unset: no z-loss."""
    first_k_dense_replace: Annotated[int | None, Range(1, MOST_LAYERS), _MOE] = None
    """Number of first layers that have a plain feed-forward layer in place of experts
    (DeepSeek-V2); unset: none."""
    dense_hidden_size: Annotated[int | None, WIDTH, Only("first_k_dense_replace")] = None
    """Inner width of these feed-forward layers; required with first_k_dense_replace."""
    shared_expert_hidden_size: Annotated[int | None, WIDTH, _MOE] = None
    """Inner width of a shared expert, which processes every token with weight 1; unset: no shared
    expert."""
    moe_router_bias: Annotated[bool | None, _MOE] = None
    """A trained bias of the router (gpt-oss), which adds to its logits; unset: none."""
    glu_limit: Annotated[float | None, POSITIVE] = None
    """Clamped GLU of gpt-oss: the gate is at most this number, the up projection is clamped between
    minus and plus this number, and 1 is added to it. Only with ffn_type=mptglu or mlp_type=glu;
    unset: no clamp."""
    uniform_expert_assignment: Annotated[bool | None, _MOE] = None
    """For speed measurements: assign experts in turn, with the weights of the experts that the
    router selects."""
    moe_force_balance: Annotated[bool | None, _MOE] = None
    """For speed measurements: assign experts in turn, each with its weight from the router."""
    moe_impl: Annotated[str | None, choice(MOE_IMPLS), _MOE] = None
    """The expert implementation. grouped_mm (the default): one operator for all experts. torch: one
    expert after another, the slow reference. megablocks: the megablocks package, on CUDA."""

    @property
    def activation(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the activation function, without glu_limit."""
        if isinstance(self.ffn_act_fn, str):
            return self.ffn_act_fn, {}
        arguments = dict(self.ffn_act_fn)
        return str(arguments.pop("name", "")), arguments

    @property
    def glu_activation(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the activation function, with glu_limit."""
        name, arguments = self.activation
        return name, arguments | ({} if self.glu_limit is None else {"glu_limit": self.glu_limit})

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid value."""
        if (yield from check_fields(key, self)):
            return
        yield from self._check_moe(key)
        yield from self._check_activation(f"{key}ffn_act_fn")
        if self.ffn_type != "mptglu" and self.mlp_type != "glu":
            why = "without ffn_type: mptglu or mlp_type: glu"
            yield from inert(key, self, ["glu_limit"], why)

    def _check_moe(self, key: str) -> Iterator[str]:
        """Check the keys of a mixture of experts."""
        if self.ffn_type == "dmoe":
            yield from self._check_router(key)

    def _check_router(self, key: str) -> Iterator[str]:
        if self.moe_num_experts is None:
            yield f"{key}moe_num_experts: ffn_type: dmoe needs it; write a number of experts"
        elif self.moe_top_k is not None and self.moe_top_k > self.moe_num_experts:
            yield (
                f"{key}moe_top_k: {self.moe_top_k} is more than moe_num_experts"
                f" ({self.moe_num_experts}); write at most that"
            )
        eps = self.moe_jitter_eps
        if eps is not None and not 0 < eps < 1:
            yield f"{key}moe_jitter_eps: {eps}; write a number between 0 and 1, or remove it"
        if self.first_k_dense_replace is not None and self.dense_hidden_size is None:
            yield f"{key}dense_hidden_size: first_k_dense_replace needs it; write a width"
        yield from self._check_groups(key)
        if self.uniform_expert_assignment and self.moe_force_balance:
            why = "and uniform_expert_assignment exclude each other; set one of them to false"
            yield f"{key}moe_force_balance: {why}"

    def _check_groups(self, key: str) -> Iterator[str]:
        experts, groups, best = self.moe_num_experts, self.moe_n_group, self.moe_topk_group
        if groups is None or experts is None:
            return
        if best is None or best > groups:
            yield f"{key}moe_topk_group: {best}; write a number from 1 to moe_n_group ({groups})"
            return
        problems = [*divides(f"{key}moe_n_group", groups, f"{key}moe_num_experts", experts)]
        yield from problems
        if problems:
            return
        if self.moe_scoring_func == "sigmoid" and experts // groups < 2:
            yield (
                f"{key}moe_n_group: {groups} groups have {experts // groups} expert each, and the"
                f" score of a group is the sum of two; write {experts // 2} or less"
            )
        if (self.moe_top_k or 1) > best * (experts // groups):
            yield (
                f"{key}moe_topk_group: {best} groups have {best * (experts // groups)} experts, and"
                f" moe_top_k is {self.moe_top_k}; write more groups"
            )

    def _check_activation(self, key: str) -> Iterator[str]:
        name, arguments = self.activation
        if not name:
            yield f"{key}: has no name; write {{name: gelu}}"
            return
        yield from one_of(key, name, ACTIVATIONS)
        for argument, value in arguments.items():
            if argument not in ACTIVATIONS.get(name, (argument,)):
                takes = ", ".join(ACTIVATIONS[name]) or "no arguments"
                yield f"{key}.{argument}: {name} takes {takes}; remove it"
            elif argument == "approximate":
                yield from one_of(f"{key}.{argument}", value, ("none", "tanh"))
            elif isinstance(value, bool) or not isinstance(value, int | float):
                yield f"{key}.{argument}: {value!r} is not a number"

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.ffn_type != "dmoe":
            return
        set_defaults(self, moe_top_k=1, mlp_type="mlp", moe_balancing="loss", moe_impl="grouped_mm")
        set_defaults(self, moe_scoring_func="softmax")
        set_defaults(self, uniform_expert_assignment=False, moe_force_balance=False)
        if self.moe_balancing == "loss":
            set_defaults(self, moe_loss_weight=0.01, moe_lbl_scope="row")
        if self.moe_balancing == "bias":
            set_defaults(self, moe_bias_update_rate=1e-3)


class ResolvedFFNConfig(FFNConfig):
    """`FFNConfig` with defaults resolved."""

    ffn_hidden_size: int
    moe_num_experts: int
    moe_top_k: int
    mlp_type: str
    moe_scoring_func: str
    moe_topk_group: int
    moe_balancing: str
    moe_loss_weight: float
    moe_lbl_scope: str
    moe_bias_update_rate: float
    moe_impl: str

    @property
    def active_share(self) -> float:
        """Share of the experts that a token visits; 1 where there are none to choose from."""
        return self.moe_top_k / self.moe_num_experts if self.ffn_type == "dmoe" else 1.0


INITS = (
    "default_",
    "baseline_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "neox_init_",
    "small_init_",
    "xavier_normal_",
    "xavier_uniform_",
)
FAN_MODES = ("fan_in", "fan_out")
_KAIMING = Only("name", ("kaiming_normal_", "kaiming_uniform_"))
NONLINEARITIES = ("linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu")


@dataclass
class InitConfig:
    """Weight initialization."""

    name: Annotated[str, choice(INITS)] = "kaiming_normal_"
    """kaiming_normal_, kaiming_uniform_ (He et al., 2015); xavier_normal_, xavier_uniform_ (Glorot
    and Bengio, 2010); baseline_: normal with init_std; small_init_: normal with standard deviation
    sqrt(2 / (5 d)) (Nguyen and Salazar, 2019); neox_init_: as small_init_, with residual
    projections divided by n_layers / sqrt(10) (GPT-NeoX-20B); default_: the initialization of
    PyTorch's layers."""
    fan_mode: Annotated[str | None, choice(FAN_MODES), _KAIMING] = None
    """fan_in (the default) preserves the variance of the forward pass, fan_out that of the backward
    pass."""
    init_nonlinearity: Annotated[str | None, choice(NONLINEARITIES), _KAIMING] = None
    """The activation function that determines the gain; default relu."""
    init_gain: float | None = None
    """With xavier: the gain, default 1. With kaiming and init_nonlinearity=leaky_relu: the negative
    slope, default 0."""
    init_std: Annotated[float | None, POSITIVE, Only("name", "baseline_")] = None
    """Standard deviation of the weights; default 0.02."""
    emb_init_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of the embeddings; unset: the embeddings use the same scheme as the other
    weights."""
    emb_init_uniform_lim: float | list[float] | None = None
    """Uniform distribution of the embeddings in [-l, l], or in [low, high]; unset: the embeddings
    use the same scheme as the other weights."""
    router_init_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of the router weights. Only with ffn_config.ffn_type=dmoe. A small value
    starts all experts with equal weights (Fedus et al., 2021, use a tenth of the standard deviation
    of the other weights); unset: the same scheme as the other weights."""
    init_div_is_residual: Annotated[
        bool | float | None, POSITIVE, Unless("name", ("neox_init_", "default_"))
    ] = None
    """Divide the weights of the projections that write to the residual stream by sqrt(2 * n_layers)
    (true, the default) or by a number."""

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        kaiming, xavier = self.name.startswith("kaiming"), self.name.startswith("xavier")
        if not (xavier or (kaiming and self.init_nonlinearity == "leaky_relu")):
            why = "without an xavier name, or kaiming with init_nonlinearity: leaky_relu"
            yield from inert(key, self, ["init_gain"], why)
        if xavier:
            yield from above(f"{key}init_gain", self.init_gain, 0)
        yield from self._check_embeddings(key)

    def _check_embeddings(self, key: str) -> Iterator[str]:
        limits = self.emb_init_uniform_lim
        if limits is None:
            return
        if self.emb_init_std is not None:
            yield f"{key}emb_init_uniform_lim: and emb_init_std exclude each other; remove one"
        if isinstance(limits, list):
            if len(limits) != 2 or not limits[0] < limits[1]:
                yield f"{key}emb_init_uniform_lim: {limits}; write [low, high] with low < high"
        else:
            yield from above(f"{key}emb_init_uniform_lim", limits, 0)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.name == "baseline_":
            set_defaults(self, init_std=0.02)
        if self.name.startswith("kaiming"):
            set_defaults(self, fan_mode="fan_in", init_nonlinearity="relu")
            if self.init_nonlinearity == "leaky_relu":
                set_defaults(self, init_gain=0.0)
        if self.name.startswith("xavier"):
            set_defaults(self, init_gain=1.0)
        if self.name not in ("neox_init_", "default_"):
            set_defaults(self, init_div_is_residual=True)


class ResolvedInitConfig(InitConfig):
    """`InitConfig` with defaults resolved."""

    fan_mode: str
    init_nonlinearity: str
    init_gain: float
    init_std: float


__all__ = ["AttentionConfig", "FFNConfig", "InitConfig", "ModelConfig"]


@dataclass
class ModelConfig:
    """A decoder-only transformer; MPT, GPT-2, Llama and Starcoder2 shapes are settings of it."""

    name: Annotated[str, choice(("mpt_causal_lm",))] = "mpt_causal_lm"
    """The model family; mpt_causal_lm is the project's own decoder."""
    d_model: Annotated[int, Range(1, 2**20, "no device holds a wider matrix")] = 2048
    """Width of the residual stream."""
    n_heads: Annotated[int, Range(1, 2**16)] = 16
    """Query heads."""
    n_layers: Annotated[int, Range(1, MOST_LAYERS)] = 24
    """Blocks."""
    head_dim: Annotated[int | None, Range(1, 2**16)] = None
    """Width of one head; unset: d_model / n_heads, or qk_nope_head_dim + qk_rope_head_dim of
    attn_config."""
    expansion_ratio: Annotated[float | None, Range(above=0, most=2**16)] = None
    """Inner width of the feed-forward layer divided by d_model; default 4, unless ffn_hidden_size
    is set."""
    vocab_size: Annotated[int | None, Range(1, 2**31 - 1, "ids have 32 bits")] = None
    """Number of embedding rows; unset: the tokenizer's size, rounded up to a multiple of 64."""
    max_seq_len: Annotated[int | None, TOKENS] = None
    """Longest sequence; unset: the recipe's max_seq_len. A larger value only adds learned position
    embeddings."""
    learned_pos_emb: bool | None = None
    """Learned position embeddings; unset: true unless alibi, rope or nope is on."""
    no_bias: bool = False
    """Drop the biases of linear layers and norms."""
    attention_bias: bool | None = None
    """Biases of the query, key and value projections; unset: the opposite of no_bias, false with
    multihead_latent_attention."""
    norm_type: Annotated[str, choice(NORMS)] = "layernorm"
    """layernorm or rmsnorm, computed in fp32 (FSDP gathers their weights in bfloat16 under
    amp_bf16); low_precision_layernorm, low_precision_rmsnorm: in the precision of the matrix
    multiplications."""
    norm_eps: Annotated[float, POSITIVE] = 1e-5
    """Added to the variance in the norm, for numerical stability."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head."""
    logit_scale: Annotated[
        float | str | None, POSITIVE, choice(("inv_sqrt_d_model",), "a number")
    ] = None
    """Factor on the logits: a number, or inv_sqrt_d_model for 1 / sqrt(d_model); unset: none."""
    final_logit_softcapping: Annotated[float | None, POSITIVE] = None
    """Logits become c * tanh(logits / c) (Gemma 2), after logit_scale; unset: no cap."""
    emb_pdrop: Annotated[float, FRACTION] = 0.0
    """Dropout probability of the embeddings during training."""
    resid_pdrop: Annotated[float, FRACTION] = 0.0
    """Dropout probability of each layer's output to the residual stream during training."""
    embedding_fraction: float = 1.0
    """Share of the gradient that reaches the embeddings (Ding et al., 2021); 1: all of it."""
    attn_config: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention."""
    ffn_config: FFNConfig = field(default_factory=FFNConfig)
    """Feed-forward layer."""
    init_config: InitConfig = field(default_factory=InitConfig)
    """Initialization."""
    block_overrides: BlockOverridesConfig | None = None
    """Layers that differ from the settings above; unset: all layers are alike."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Yield an error line for each invalid, conflicting or ineffective value."""
        if (yield from check_fields(key, self)):
            return
        if not 0 < self.embedding_fraction <= 1:
            yield f"{key}embedding_fraction: {self.embedding_fraction}; write a number in (0, 1]"
        if self.head_dim is None and not self.attn_config.is_latent:
            yield from divides(f"{key}n_heads", self.n_heads, f"{key}d_model", self.d_model)
        yield from self._check_latent(key)
        yield from self._check_positions(key)
        yield from self.attn_config.check(f"{key}attn_config.", self.n_heads)
        widest = max(self._head_dim, self.attn_config.v_head_dim or 0)
        yield from self.attn_config.check_impl(f"{key}attn_config.", widest)
        yield from self.ffn_config.check(f"{key}ffn_config.")
        yield from self.init_config.check(f"{key}init_config.")
        if self.ffn_config.ffn_type != "dmoe":
            why = f"without {key}ffn_config.ffn_type: dmoe"
            yield from inert(f"{key}init_config.", self.init_config, ["router_init_std"], why)
        if self.block_overrides is not None:
            where = f"{key}block_overrides."
            yield from self.block_overrides.check(where, self.attn_config, self.n_layers)
        first = self.ffn_config.first_k_dense_replace or 0
        if first >= self.n_layers:
            yield (
                f"{key}ffn_config.first_k_dense_replace: {first}, but n_layers is {self.n_layers},"
                " and one layer at least must have experts; write a smaller number"
            )
        if self.ffn_config.moe_impl == "megablocks" and not self.no_bias:
            yield (
                f"{key}ffn_config.moe_impl: megablocks' experts have no biases; write grouped_mm,"
                f" or {key}no_bias: true"
            )
        yield from self._check_hidden_size(key)

    @property
    def _head_dim(self) -> int:
        """Width of a query and key head, also before defaults are resolved."""
        if self.attn_config.is_latent:
            return self.attn_config.latent_head_dim
        return self.head_dim or self.d_model // self.n_heads

    def _check_latent(self, key: str) -> Iterator[str]:
        """Check keys whose meaning multi-head latent attention takes away."""
        if not self.attn_config.is_latent:
            return
        width = self.attn_config.latent_head_dim
        if self.head_dim not in (None, width):
            yield (
                f"{key}head_dim: {self.head_dim}, but qk_nope_head_dim + qk_rope_head_dim is"
                f" {width}; remove it"
            )
        if self.attention_bias:
            yield (
                f"{key}attention_bias: true, but the projections of attn_type:"
                f" {self.attn_config.attn_type} have no biases; write false"
            )

    def _check_positions(self, key: str) -> Iterator[str]:
        attn, head_dim = self.attn_config, self._head_dim
        if attn.rope and head_dim % 2 and not attn.is_latent:
            yield f"{key}attn_config.rope: needs an even head_dim, which is {head_dim}"
        if attn.rope_hf_config.type == "dynamic" and head_dim == 2:
            yield f"{key}attn_config.rope_hf_config.type: dynamic needs a head_dim above 2"
        others = [name for name in ("alibi", "rope", "nope") if getattr(attn, name)]
        if self.learned_pos_emb and others:
            other = others[0]
            yield f"{key}learned_pos_emb: true, with attn_config.{other}: true; set one to false"
        if self.learned_pos_emb is False and not others:
            yield (
                f"{key}learned_pos_emb: false leaves the model without positions; write"
                " attn_config.nope: true if that is meant, or set alibi or rope"
            )

    def _check_hidden_size(self, key: str) -> Iterator[str]:
        ratio, hidden = self.expansion_ratio, self.ffn_config.ffn_hidden_size
        if ratio is None:
            return
        if hidden is not None and hidden != self.d_model * ratio:
            yield from inert(key, self, ["expansion_ratio"], "beside ffn_config.ffn_hidden_size")
        elif self.d_model * ratio != int(self.d_model * ratio):
            yield f"{key}expansion_ratio: {ratio} * d_model ({self.d_model}) is not a whole number"

    def fill(self, *, max_seq_len: int | None = None, vocab_size: int | None = None) -> None:
        """Resolve defaults in place, so that a saved recipe specifies every value.

        Args:
            max_seq_len: the recipe's sequence length.
            vocab_size: the tokenizer's size, if it is known.
        """
        attn = self.attn_config
        if self.ffn_config.ffn_hidden_size is None:
            set_defaults(self, expansion_ratio=4.0)
            self.ffn_config.ffn_hidden_size = int(self.d_model * (self.expansion_ratio or 4))
        self.ffn_config.fill()
        set_defaults(self, head_dim=self._head_dim, max_seq_len=max_seq_len)
        set_defaults(self, learned_pos_emb=not (attn.alibi or attn.rope or attn.nope))
        set_defaults(self, attention_bias=not (self.no_bias or attn.is_latent))
        attn.fill(self.n_heads, self.norm_type, self.norm_eps)
        self.init_config.fill()
        if vocab_size is not None:
            set_defaults(self, vocab_size=-(-vocab_size // 64) * 64)

    def resolve(
        self, *, max_seq_len: int | None = None, vocab_size: int | None = None
    ) -> ResolvedModelConfig:
        """Return a copy with defaults resolved; arguments as of `fill`."""
        model = copy_as(ResolvedModelConfig, self)
        model.fill(max_seq_len=max_seq_len, vocab_size=vocab_size)
        return model

    def layers(self) -> list[LayerConfig]:
        """Return the settings that may differ between blocks; the model must be checked."""
        layers = layer_configs(self.attn_config, self.block_overrides, self.n_layers)
        first = self.ffn_config.first_k_dense_replace or 0
        return [replace(layer, is_dense=True) for layer in layers[:first]] + layers[first:]


class ResolvedModelConfig(ModelConfig):
    """`ModelConfig` with defaults resolved; the tokenizer decides an unset `vocab_size` later."""

    head_dim: int
    vocab_size: int
    max_seq_len: int
    learned_pos_emb: bool
    attention_bias: bool
    attn_config: ResolvedAttentionConfig
    ffn_config: ResolvedFFNConfig
    init_config: ResolvedInitConfig

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        ffn = self.ffn_config
        return self.n_layers - (ffn.first_k_dense_replace or 0) if ffn.ffn_type == "dmoe" else 0

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a query and key head."""
        attn = self.attn_config
        return attn.qk_rope_head_dim if attn.is_latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the products of queries and keys."""
        return self.attn_config.softmax_scale or self.default_softmax_scale

    @property
    def default_softmax_scale(self) -> float:
        """The softmax scale if attn_config.softmax_scale is unset."""
        scale: float = self.head_dim**-0.5
        attn = self.attn_config
        return scale * attn.rope_hf_config.latent_scale if attn.is_latent else scale

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.attn_config.v_head_dim if self.attn_config.is_latent else self.head_dim

    @property
    def cache_row(self) -> tuple[int, int, int]:
        """Shape of what generation caches of a token in a layer: heads, width of keys, of values.

        Multi-head latent attention caches the latent vector and the rotated key, in place of a key.
        """
        attn = self.attn_config
        if attn.is_latent:
            return 1, attn.kv_lora_rank + attn.qk_rope_head_dim, 0
        return attn.kv_n_heads, self.head_dim, self.head_dim


HF_CAUSAL_LM = "hf_causal_lm"


@dataclass
class HFModelConfig(ModelConfig):
    """A causal language model of transformers."""

    name: str = HF_CAUSAL_LM
    """Always hf_causal_lm."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The contents of config.json, with the changes of config_overrides."""
    hf_attn_impl: str | None = None
    """transformers' attn_implementation; unset: its default, which is sdpa if the class supports
    it."""
    code: str | None = None
    """The folder whose Python code defines the class, which trust_remote_code permits; else
    none."""
    hf_parameters: int = 0
    """Number of parameters; a tied head is counted once."""
    hf_matrices: int = 0
    """Number of elements in the matrices that process a token; of experts, only the selected ones
    count."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Yield nothing: transformers has checked it."""
        return iter(())

    def resolve(
        self, *, max_seq_len: int | None = None, vocab_size: int | None = None
    ) -> ResolvedHFModelConfig:
        """As of `ModelConfig`."""
        model = copy_as(ResolvedHFModelConfig, self)
        model.fill(max_seq_len=max_seq_len, vocab_size=vocab_size)
        return model


class ResolvedHFModelConfig(HFModelConfig, ResolvedModelConfig):
    """`HFModelConfig` with defaults resolved."""

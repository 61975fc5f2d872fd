"""The decoder written out plainly in float64, one document and one head at a time.

Shares no code with llmfoundry.models: it follows MPT's published definitions, and reads by itself
what `block_overrides` say of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfoundry.recipe.attention import AttentionOverride, BlockRun
from llmfoundry.recipe.model import AttentionConfig, ModelConfig
from tests.models.plain_moe import mixture

Weights = dict[str, Tensor]
Kept = dict[int, tuple[list[Tensor], list[Tensor]]]  # keys and values of each head, by layer


def slope(head: int, n_heads: int, bias_max: int) -> float:
    """ALiBi's slope of one head, counted from 0, as the paper and MPT give it."""
    power = 2 ** math.ceil(math.log2(n_heads))
    every = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return (every[1::2] + every[::2])[head] if power != n_heads else every[head]


def norm(x: Tensor, w: Weights, name: str, config: ModelConfig | AttentionConfig) -> Tensor:
    """The model's norm, or that of queries and keys."""
    if config.norm_type.endswith("rmsnorm"):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_eps) * w[f"{name}.weight"]
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    out = (x - mean) / torch.sqrt(var + config.norm_eps) * w[f"{name}.weight"]
    return out + w.get(f"{name}.bias", torch.zeros(()))


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def bent(x: Tensor, negative: Tensor) -> Tensor:
    return torch.where(x > 0, x, negative)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return bent(x, alpha * (torch.exp(x) - 1))


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return torch.where(beta * x > threshold, x, torch.log(1 + torch.exp(beta * x)) / beta)


def selu(x: Tensor) -> Tensor:
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


def hardsigmoid(x: Tensor) -> Tensor:
    return (x / 6 + 0.5).clamp(0, 1)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "relu6": lambda x: x.clamp(0, 6),
    "leaky_relu": lambda x, negative_slope=0.01: bent(x, negative_slope * x),
    "elu": elu,
    "celu": lambda x, alpha=1.0: bent(x, alpha * (torch.exp(x / alpha) - 1)),
    "selu": selu,
    "mish": lambda x: x * torch.tanh(softplus(x)),
    "softplus": softplus,
    "softsign": lambda x: x / (1 + x.abs()),
    "sigmoid": sigmoid,
    "logsigmoid": lambda x: -torch.log(1 + torch.exp(-x)),
    "tanh": lambda x: 2 * sigmoid(2 * x) - 1,
    "tanhshrink": lambda x: x - torch.tanh(x),
    "softshrink": lambda x, lambd=0.5: x.sign() * (x.abs() - lambd).clamp(min=0),
    "hardshrink": lambda x, lambd=0.5: torch.where(x.abs() > lambd, x, 0.0),
    "hardsigmoid": hardsigmoid,
    "hardswish": lambda x: x * hardsigmoid(x),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: x.clamp(min_val, max_val),
}


def activation(x: Tensor, written: str | dict[str, Any]) -> Tensor:
    arguments = dict(written) if isinstance(written, dict) else {"name": written}
    return ACTIVATIONS[arguments.pop("name")](x, **arguments)


def frequency(pair: int, length: int, config: ModelConfig) -> float:
    """Radians per position of a feature pair, in a document of `length` tokens."""
    rope, theta, hd = (
        config.attn_config.rope_hf_config,
        config.attn_config.rope_theta,
        config.attn_config.qk_rope_head_dim or config.head_dim,
    )
    if rope.type == "dynamic" and length > config.max_seq_len:
        stretch = rope.factor * length / config.max_seq_len - (rope.factor - 1)
        theta = theta * stretch ** (hd / (hd - 2))
    plain = theta ** (-2 * pair / hd)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "yarn":
        return yarn_frequency(pair, hd, plain, config)
    if rope.type != "llama3":
        return plain
    wavelength = 2 * math.pi / plain
    if wavelength < rope.original_max_position_embeddings / rope.high_freq_factor:
        return plain
    if wavelength > rope.original_max_position_embeddings / rope.low_freq_factor:
        return plain / rope.factor
    smooth = rope.original_max_position_embeddings / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return (1 - smooth) * plain / rope.factor + smooth * plain


def yarn_frequency(pair: int, hd: int, plain: float, config: ModelConfig) -> float:
    """YaRN's by its authors' code: a ramp over the numbers of the pairs."""
    rope, theta = config.attn_config.rope_hf_config, config.attn_config.rope_theta
    bounds = []
    for rotations in (rope.beta_fast, rope.beta_slow):  # the pair that turns so often
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        bounds.append(hd * math.log(turns) / (2 * math.log(theta)))
    low, high = bounds
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, hd - 1)
    interpolated = min(max((pair - low) / (high - low), 0), 1)
    return plain * (1 - interpolated) + plain / rope.factor * interpolated


def yarn_magnitude(config: ModelConfig, of: float) -> float:
    return 0.1 * of * math.log(config.attn_config.rope_hf_config.factor) + 1


def turned_length(config: ModelConfig) -> float:
    """What the rotation multiplies queries and keys by."""
    rope = config.attn_config.rope_hf_config
    if rope.type != "yarn":
        return 1.0
    if rope.mscale:
        return yarn_magnitude(config, rope.mscale) / yarn_magnitude(config, rope.mscale_all_dim)
    return rope.attention_factor or yarn_magnitude(config, 1)


def turn(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotate feature pairs (i, i + half) of x (T, hd) as complex numbers."""
    half = x.shape[1] // 2
    number = torch.complex(x[:, :half], x[:, half:])
    positions = torch.arange(len(x), dtype=torch.float64)[:, None]
    frequencies = [frequency(pair, len(x), config) for pair in range(half)]
    turned = number * torch.exp(1j * positions * torch.tensor(frequencies, dtype=torch.float64))
    return torch.cat([turned.real, turned.imag], dim=1) * turned_length(config)


def kinds(runs: list[BlockRun]) -> Iterator[str]:
    for run in runs:
        yield from (list(kinds(run.order)) if run.order else [run.name]) * run.repeat


def overrides(config: ModelConfig) -> list[AttentionOverride]:
    """What each layer does otherwise than the model."""
    if config.block_overrides is None:
        return [AttentionOverride()] * config.n_layers
    found = config.block_overrides.overrides
    named = {name: override.attn_config for name, override in found.items()}
    named["default"] = AttentionOverride()
    return [named[name] for name in kinds(config.block_overrides.order)]


def attention(
    x: Tensor, w: Weights, name: str, config: ModelConfig, layer: AttentionOverride, kept: Kept
) -> Tensor:
    """Attention of x (T, D), whose keys and values go to `kept` under the next layer's number."""
    attn, hd, index = config.attn_config, config.head_dim, len(kept)
    back = layer.reuse_kv_layer_idx
    rotates = attn.rope and not layer.nope
    window = attn.sliding_window_size
    window = layer.sliding_window_size if layer.sliding_window_size is not None else window
    position = torch.arange(len(x), dtype=torch.float64)

    def heads(part: Tensor, ln: str, *, turns: bool) -> list[Tensor]:
        if attn.clip_qkv:
            part = part.clamp(-attn.clip_qkv, attn.clip_qkv)
        if ln and attn.qk_ln:
            part = norm(part, w, f"{name}.{ln}", attn)
        parts = part.split(hd, dim=1)
        if ln and attn.qk_gn:
            parts = [norm(p, w, f"{name}.{ln}", attn) for p in parts]
        return [turn(p, config) for p in parts] if turns else list(parts)

    if attn.attn_type == "multihead_latent_attention":
        return latent_attention(x, w, name, config, layer, kept)
    q_width, kv_width = config.n_heads * hd, attn.kv_n_heads * hd
    if back is None:
        qkv = linear(x, w, f"{name}.Wqkv")
        q, k, v = qkv.split([q_width, kv_width, kv_width], dim=1)
        kept[index] = heads(k, "k_ln", turns=rotates), heads(v, "", turns=False)
    else:
        q = linear(x, w, f"{name}.Wq")
        kept[index] = kept[index + back]
    keys, values = kept[index]
    scale = attn.softmax_scale or 1 / math.sqrt(hd)
    tuning = layer.attn_temperature_tuning or attn.attn_temperature_tuning
    steps = torch.log(1 + torch.floor((position + 1) / (tuning.floor_scale or 8192)))
    distance = position[:, None] - position[None, :]  # how far key j lies before query i
    hidden = (distance < 0) | ((distance > window) if window >= 0 else False)
    mixed = []
    for head, qh in enumerate(heads(q, "q_ln", turns=rotates)):
        shared = head // (config.n_heads // attn.kv_n_heads)
        logits = (qh * (1 + tuning.attn_scale * steps)[:, None]) @ keys[shared].T * scale
        if attn.attn_logit_softcapping:
            logits = capped(logits, attn.attn_logit_softcapping)
        if attn.alibi:
            logits = logits - slope(head, config.n_heads, attn.alibi_bias_max) * distance
        logits = torch.where(hidden, -torch.inf, logits)
        most = logits.detach().amax(1, keepdim=True)
        weights = torch.exp(logits - most)
        total = weights.sum(1, keepdim=True)
        if attn.sinks:
            total = total + torch.exp(w[f"{name}.sinks.weight"][head] - most)
        mixed.append((weights / total) @ values[shared])
    return linear(torch.cat(mixed, dim=1), w, f"{name}.out_proj")


def latent_attention(
    x: Tensor, w: Weights, name: str, config: ModelConfig, layer: AttentionOverride, kept: Kept
) -> Tensor:
    """Multi-head latent attention, by equations 37 to 47 of the DeepSeek-V2 report."""
    attn = config.attn_config
    kept[len(kept)] = [], []
    window = attn.sliding_window_size
    window = layer.sliding_window_size if layer.sliding_window_size is not None else window
    position = torch.arange(len(x), dtype=torch.float64)
    distance = position[:, None] - position[None, :]
    hidden = (distance < 0) | ((distance > window) if window >= 0 else False)
    tuning = layer.attn_temperature_tuning or attn.attn_temperature_tuning
    steps = torch.log(1 + torch.floor((position + 1) / (tuning.floor_scale or 8192)))

    def turned(part: Tensor) -> Tensor:
        return part if layer.nope else turn(part, config)

    down = linear(x, w, f"{name}.Wkv_a")
    latent = norm(down[:, : attn.kv_lora_rank], w, f"{name}.kv_a_ln", attn)
    shared_key = turned(down[:, attn.kv_lora_rank :])
    if attn.q_lora_rank is None:
        queries = linear(x, w, f"{name}.Wq")
    else:
        queries = norm(linear(x, w, f"{name}.Wq_a"), w, f"{name}.q_a_ln", attn)
        queries = linear(queries, w, f"{name}.Wq_b")
    plain, rotated = attn.qk_nope_head_dim, attn.qk_rope_head_dim
    of_heads = linear(latent, w, f"{name}.Wkv_b").split(plain + attn.v_head_dim, dim=1)
    scale = attn.softmax_scale or 1 / math.sqrt(plain + rotated)
    if attn.rope_hf_config.mscale_all_dim and not attn.softmax_scale:  # DeepSeek's modeling code
        scale *= yarn_magnitude(config, attn.rope_hf_config.mscale_all_dim) ** 2
    mixed = []
    for q, key_value in zip(queries.split(plain + rotated, dim=1), of_heads, strict=True):
        key, value = key_value[:, :plain], key_value[:, plain:]
        logits = q[:, :plain] @ key.T + turned(q[:, plain:]) @ shared_key.T
        logits = logits * (1 + tuning.attn_scale * steps)[:, None] * scale
        if attn.attn_logit_softcapping:
            logits = capped(logits, attn.attn_logit_softcapping)
        mixed.append(torch.where(hidden, -torch.inf, logits).softmax(1) @ value)
    return linear(torch.cat(mixed, dim=1), w, f"{name}.out_proj")


def capped(logits: Tensor, c: float) -> Tensor:
    return c * torch.tanh(logits / c)


def document_logits(tokens: Tensor, w: Weights, config: ModelConfig) -> Tensor:
    """Logits (T, V) of one document (T,)."""
    x = w["wte.weight"][tokens]
    if config.learned_pos_emb:
        x = x + w["wpe.weight"][: len(tokens)]
    passed = config.embedding_fraction
    x = passed * x + (1 - passed) * x.detach()
    kept: Kept = {}
    for i, layer in enumerate(overrides(config)):
        b = f"blocks.{i}"
        x = x + attention(norm(x, w, f"{b}.norm_1", config), w, f"{b}.attn", config, layer, kept)
        h = norm(x, w, f"{b}.norm_2", config)
        act = config.ffn_config.ffn_act_fn
        ffn, gated = config.ffn_config, config.ffn_config.ffn_type == "mptglu"
        if i < (ffn.first_k_dense_replace or 0):
            gated = ffn.mlp_type == "glu"
        elif ffn.ffn_type == "dmoe":
            act = partial(activation, written=act)
            x = x + mixture(h, w, f"{b}.ffn.", config.ffn_config, act)
            continue
        up = linear(h, w, f"{b}.ffn.up_proj")
        if gated:
            gate, limit = linear(h, w, f"{b}.ffn.gate_proj"), config.ffn_config.glu_limit
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            inner = activation(gate, act) * up
        else:
            inner = activation(up, act)
        x = x + linear(inner, w, f"{b}.ffn.down_proj")
    head = w["wte.weight"] if config.tie_word_embeddings else w["lm_head.weight"]
    logits = norm(x, w, "norm_f", config) @ head.T
    if config.logit_scale is not None:
        inverse_root = config.logit_scale == "inv_sqrt_d_model"
        logits = logits * (1 / math.sqrt(config.d_model) if inverse_root else config.logit_scale)
    c = config.final_logit_softcapping
    return logits if c is None else capped(logits, c)

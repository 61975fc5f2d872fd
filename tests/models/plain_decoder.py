"""The decoder written out plainly in float64, one document and one head at a time.

Shares no code with llmfoundry.models: it follows MPT's published definitions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmfoundry.recipe.model import ModelConfig


def slope(head: int, n_heads: int, bias_max: int) -> float:
    """ALiBi's slope of one head, counted from 0, as the paper and MPT give it."""
    power = 2 ** math.ceil(math.log2(n_heads))
    every = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return (every[1::2] + every[::2])[head] if power != n_heads else every[head]


def norm(x: Tensor, w: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    if config.norm_type == "rmsnorm":
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_eps) * w[f"{name}.weight"]
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    out = (x - mean) / torch.sqrt(var + config.norm_eps) * w[f"{name}.weight"]
    return out + w.get(f"{name}.bias", torch.zeros(()))


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def activation(x: Tensor, name: str) -> Tensor:
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + torch.exp(-x)) if name == "silu" else x.clamp(min=0)


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotate feature pairs (i, i + half) of x (T, hd) as complex numbers."""
    half = x.shape[1] // 2
    number = torch.complex(x[:, :half], x[:, half:])
    positions = torch.arange(len(x), dtype=torch.float64)[:, None]
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = number * torch.exp(1j * positions * frequency)
    return torch.cat([turned.real, turned.imag], dim=1)


def attention(x: Tensor, w: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    attn, hd = config.attn_config, config.head_dim
    q_width, kv_width = config.n_heads * hd, attn.kv_n_heads * hd
    qkv = linear(x, w, f"{name}.Wqkv")
    if attn.clip_qkv:
        qkv = qkv.clamp(-attn.clip_qkv, attn.clip_qkv)
    q, k, v = qkv[:, :q_width], qkv[:, q_width : q_width + kv_width], qkv[:, q_width + kv_width :]
    if attn.qk_ln:
        q, k = norm(q, w, f"{name}.q_ln", config), norm(k, w, f"{name}.k_ln", config)
    scale = attn.softmax_scale or 1 / math.sqrt(hd)
    heads = []
    for head in range(config.n_heads):
        shared = head // (config.n_heads // attn.kv_n_heads)
        qh = q[:, head * hd : (head + 1) * hd]
        kh, vh = (m[:, shared * hd : (shared + 1) * hd] for m in (k, v))
        if attn.rope:
            qh, kh = turn(qh, attn.rope_theta), turn(kh, attn.rope_theta)
        rows = []
        for i in range(len(x)):  # token i sees tokens 0..i
            logits = (kh[: i + 1] @ qh[i]) * scale
            if attn.alibi:
                distance = torch.arange(i + 1, dtype=torch.float64) - i
                logits = logits + slope(head, config.n_heads, attn.alibi_bias_max) * distance
            weights = torch.exp(logits - logits.max())
            rows.append((weights / weights.sum()) @ vh[: i + 1])
        heads.append(torch.stack(rows))
    return linear(torch.cat(heads, dim=1), w, f"{name}.out_proj")


def document_logits(tokens: Tensor, w: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Logits (T, V) of one document (T,)."""
    x = w["wte.weight"][tokens]
    if config.learned_pos_emb:
        x = x + w["wpe.weight"][: len(tokens)]
    for i in range(config.n_layers):
        b = f"blocks.{i}"
        x = x + attention(norm(x, w, f"{b}.norm_1", config), w, f"{b}.attn", config)
        h = norm(x, w, f"{b}.norm_2", config)
        act = config.ffn_config.ffn_act_fn
        up = linear(h, w, f"{b}.ffn.up_proj")
        if config.ffn_config.ffn_type == "mptglu":
            inner = activation(linear(h, w, f"{b}.ffn.gate_proj"), act) * up
        else:
            inner = activation(up, act)
        x = x + linear(inner, w, f"{b}.ffn.down_proj")
    head = w["wte.weight"] if config.tie_word_embeddings else w["lm_head.weight"]
    return norm(x, w, "norm_f", config) @ head.T

"""A mixture of experts written out, one token and one expert at a time; no import from models/."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmfoundry.recipe.model import FFNConfig

Weights = dict[str, Tensor]
Act = Callable[[Tensor], Tensor]


def choice(scores: Tensor, top_k: int) -> list[int]:
    """The experts of the highest scores (E,)."""
    return sorted(range(len(scores)), key=lambda e: -scores[e].item())[:top_k]


def in_groups(scores: Tensor, ffn: FFNConfig, n_best: int) -> Tensor:
    """Scores (E,) of the experts of the best groups; all others' are minus infinity."""
    groups = [[*part] for part in torch.arange(len(scores)).chunk(ffn.moe_n_group)]
    of_groups = [sum(sorted(scores[e].item() for e in part)[-n_best:]) for part in groups]
    best = choice(torch.tensor(of_groups), ffn.moe_topk_group)
    kept = {int(e) for group in best for e in groups[group]}
    return torch.stack([s if e in kept else s - torch.inf for e, s in enumerate(scores)])


def mixture(x: Tensor, w: Weights, name: str, ffn: FFNConfig, act: Act) -> Tensor:
    """What a layer `name` makes of tokens x (T, D)."""
    return torch.stack([_of_token(token, w, name, ffn, act) for token in x])


def _of_token(x: Tensor, w: Weights, name: str, ffn: FFNConfig, act: Act) -> Tensor:
    logits = w[f"{name}router.weight"] @ x + w.get(f"{name}router.bias", 0.0)
    is_sigmoid = ffn.moe_scoring_func == "sigmoid"
    scores = 1 / (1 + (-logits).exp()) if is_sigmoid else logits.exp() / logits.exp().sum()
    allowed = in_groups(scores, ffn, 2 if is_sigmoid else 1) if ffn.moe_n_group else scores
    chosen, p = choice(allowed, ffn.moe_top_k), ffn.moe_normalize_expert_weights
    norm = 1.0 if p is None else sum(scores[e] ** p for e in chosen) ** (1 / p)
    norm = norm / (ffn.moe_routed_scaling_factor or 1.0)
    y = sum(scores[e] / norm * _expert(x, w, f"{name}experts.", e, ffn, act) for e in chosen)
    if ffn.shared_expert_hidden_size is not None:
        y = y + _shared(x, w, f"{name}shared.", act)
    return y


def _expert(x: Tensor, w: Weights, name: str, e: int, ffn: FFNConfig, act: Act) -> Tensor:
    """One expert of one token x (D,), by slices of the stacked weights."""
    f = ffn.ffn_hidden_size
    rows = slice(e * f, (e + 1) * f)

    def bias(layer: str, width: int) -> Tensor | float:
        stacked = w.get(f"{name}{layer}_bias")
        return 0.0 if stacked is None else stacked[e * width : (e + 1) * width]

    gate = w[f"{name}w1"][rows] @ x + bias("w1", f)
    h = act(gate if ffn.glu_limit is None else gate.clamp(max=ffn.glu_limit))
    if ffn.mlp_type == "glu":
        up = w[f"{name}v1"][rows] @ x + bias("v1", f)
        h = h * (up if ffn.glu_limit is None else up.clamp(-ffn.glu_limit, ffn.glu_limit) + 1)
    return w[f"{name}w2"][rows].T @ h + bias("w2", len(x))


def _shared(x: Tensor, w: Weights, name: str, act: Act) -> Tensor:
    def linear(layer: str, x: Tensor) -> Tensor:
        return w[f"{name}{layer}.weight"] @ x + w.get(f"{name}{layer}.bias", 0.0)

    if f"{name}gate_proj.weight" in w:
        return linear("down_proj", act(linear("gate_proj", x)) * linear("up_proj", x))
    return linear("down_proj", act(linear("up_proj", x)))


def balancing_loss(x: Tensor, router: Tensor, top_k: int) -> Tensor:
    """Of megablocks: E / (T k) sum over e of tokens_e * mean score_e, over tokens x (T, D)."""
    scores = (x @ router.T).softmax(-1)
    n_experts = router.shape[0]
    load = torch.zeros(n_experts, dtype=x.dtype)
    for row in scores:
        for e in choice(row, top_k):
            load[e] += 1
    return n_experts / (len(x) * top_k) * (load * scores.mean(0)).sum()

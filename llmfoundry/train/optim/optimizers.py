"""From the recipe's optimizer section to an optimizer; a new one is an entry of `OPTIMIZERS`.

`freeze` comes before the model is sharded or wrapped, `build_optimizer` after.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.models.adapter import adapted_layers, is_added
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.choice_table import Code, load_code
from llmfoundry.recipe.optimizer import OPTIMIZERS, ParamGroupConfig, ResolvedOptimizerConfig

Named: TypeAlias = dict[str, nn.Parameter]
Groups: TypeAlias = Iterable[nn.Parameter] | Iterable[dict[str, Any]]  # as torch.optim takes them


def freeze(model: Decoder, config: ResolvedOptimizerConfig) -> None:
    """Switch off the gradients that disable_grad names.

    Raises:
        UserError: an expression matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for index, pattern in enumerate(config.disable_grad):
        for name in _matches(pattern, parameters, f"optimizer.disable_grad[{index}]"):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("optimizer.disable_grad: matches every parameter; leave one to train")


def build_optimizer(
    model: Decoder,
    config: ResolvedOptimizerConfig,
    *,
    lora_plus_ratio: float = 1.0,
    matmul_dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters that train.

    Its first group holds those that no group of the recipe takes, if there are any.

    Args:
        model: with parameters in the form (full or sharded) in which they will be updated.
        config: filled.
        lora_plus_ratio: learning rate of adapters' B over that of all else (LoRA+).
        matmul_dtype: of matrix products under the recipe's precision.

    Raises:
        UserError: a group matches nothing that is left to it, or a value of it has no effect.
    """
    kind, groups = OPTIMIZERS[config.name], []
    split = load_code(kind.split, _SPLITS.get(config.name)) if kind.split else _whole
    sections = (
        part
        for settings, parameters in _sections(model, config)
        for part in _lora_plus(settings, parameters, lora_plus_ratio)
    )
    for settings, parameters in sections:
        values = kind.values(settings)
        groups += [
            {"params": list(part.values())} | values | extra
            for extra, part in split(parameters, model)
            if part
        ]
    return new_optimizer(groups, config, matmul_dtype)


def new_optimizer(
    parameters: Groups, config: ResolvedOptimizerConfig, matmul_dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """The optimizer that a filled section names, over parameters or groups of them."""
    kind = OPTIMIZERS[config.name]
    values = kind.values(config) | ({"dtype": matmul_dtype} if kind.multiplies else {})
    make = load_code(kind.make, _MAKERS.get(config.name))
    if config.moments is not None and kind.narrow:
        make = load_code(kind.narrow, _NARROW.get(config.name))
        values = {"moments": config.moments} | values
    optimizer: torch.optim.Optimizer = make(parameters, **values)
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)  # as PyTorch's fused ones do
    if not skips and not hasattr(type(optimizer), "found_inf"):
        optimizer.register_step_pre_hook(_skip_if_found_inf)
    return optimizer


def _skip_if_found_inf(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A step that is not finite changes nothing: parameters without gradient are passed over."""
    if vars(optimizer).pop("found_inf", 0):  # PyTorch's own refuse the attribute where not fused
        optimizer.zero_grad(set_to_none=True)


def _whole(parameters: Named, model: Decoder) -> list[tuple[dict[str, Any], Named]]:
    return [({}, parameters)]


def _lora_plus(
    config: ResolvedOptimizerConfig, parameters: Named, ratio: float
) -> list[tuple[ResolvedOptimizerConfig, Named]]:
    """Adapters' B apart from all else, with its own learning rate (Hayou et al., 2024)."""
    fast = {name: p for name, p in parameters.items() if re.search(r"lora_(embedding_)?B", name)}
    if ratio == 1.0 or not fast:
        return [(config, parameters)]
    slow = {name: p for name, p in parameters.items() if name not in fast}
    return [(config, slow), (dataclasses.replace(config, lr=config.lr * ratio), fast)]


def _sections(
    model: Decoder, config: ResolvedOptimizerConfig
) -> list[tuple[ResolvedOptimizerConfig, Named]]:
    """Settings, and the parameters that they are for: the rest's, then the recipe's groups'."""
    every = dict(model.named_parameters())
    left = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
    sections = []
    for index, group in enumerate(config.param_groups):
        key = f"optimizer.param_groups[{index}]."
        where = f"{key}param_str_match"
        matches = _matches(group.param_str_match, every, where)
        taken = {name: left.pop(name) for name in matches if name in left}
        if not taken:
            raise UserError(
                f"{where}: all that {group.param_str_match!r} matches is frozen or in an earlier"
                " group; remove the group, or write it first"
            )
        if config.name == "muon":
            _refuse_inert(key, group, taken)
        given = {k: v for k, v in vars(group).items() if v is not None and k != "param_str_match"}
        sections.append((dataclasses.replace(config, **given), taken))
    return [(config, left), *sections]


def _matches(pattern: str, parameters: Named, key: str) -> list[str]:
    """Names in which a regular expression is found."""
    found = [name for name in parameters if re.search(pattern, name)]
    if found:
        return found

    def likeness(name: str) -> float:
        parts = [name, *name.split(".")]
        return max(difflib.SequenceMatcher(None, pattern, part).ratio() for part in parts)

    kinds = {re.sub(r"\.\d+\.", ".0.", name): None for name in parameters}  # one layer's are enough
    nearest = sorted(kinds, key=likeness, reverse=True)[:3]
    raise UserError(
        f"{key}: {pattern!r} is found in no parameter's name; the nearest are {', '.join(nearest)}"
    )


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon takes it: matrices of the blocks, no embedding and no head."""
    return name.startswith("blocks.") and parameter.ndim == 2


def muon_parts(parameters: Named, model: Decoder) -> list[tuple[dict[str, Any], Named]]:
    """AdamW's parameters, and Muon's by the heights of the matrices that each of them stacks."""
    others: Named = {}
    stacked: dict[tuple[int, ...], Named] = {(): {}}
    heights = _stacked_heights(model)
    for name, parameter in parameters.items():
        if _is_matrix(name, parameter):
            stacked.setdefault(heights.get(name, ()), {})[name] = parameter
        else:
            others[name] = parameter
    muon = [({"orthogonal": True, "rows": rows}, part) for rows, part in stacked.items()]
    return [({}, others), *muon]


def _stacked_heights(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Of parameters that stack matrices: fused queries, keys and values, experts, adapters."""
    config, heights = model.config, dict[str, tuple[int, ...]]()
    kv_width = config.attn_config.kv_n_heads * config.head_dim
    inner, experts = config.ffn_config.ffn_hidden_size, config.ffn_config.moe_num_experts or 0
    for name, _ in model.named_parameters():
        if name.endswith("attn.Wqkv.weight"):
            heights[name] = (config.n_heads * config.head_dim, kv_width, kv_width)
        elif ".ffn.experts." in name and not is_added(name):
            heights[name] = (inner or 0,) * experts
    for name, module, prefix, lora in adapted_layers(model):
        layer = name.rpartition(".")[0] if prefix else name
        parts = tuple(end - begin for begin, end in lora.parts)
        pairs = len(getattr(module, f"{prefix}lora_A")) // (lora.r * len(parts))
        if pairs * len(parts) > 1:
            heights[f"{layer}.{prefix}lora_A"] = (lora.r,) * len(parts) * pairs
            heights[f"{layer}.{prefix}lora_B"] = parts * pairs
    return heights


def _refuse_inert(key: str, group: ParamGroupConfig, parameters: Named) -> None:
    if not all(_is_matrix(name, parameter) for name, parameter in parameters.items()):
        return
    for name in ("betas", "eps"):
        if getattr(group, name) is not None:
            raise UserError(f"{key}{name}: has no effect, as all of the group is Muon's; remove it")


class DecoupledLionW(torch.optim.Optimizer):
    """Lion (Chen et al., 2023) with a weight decay that the peak learning rate does not scale.

    u = sign(lerp(m, g, 1 - beta_1)); p <- p (1 - weight_decay lr / first lr) - lr u;
    m <- lerp(m, g, 1 - beta_2). While `found_inf` is 1 a step changes nothing, as PyTorch's fused
    optimizers have it, and the host is not asked.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Groups,
        *,
        lr: float,
        initial_lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(parameters, defaults | {"initial_lr": initial_lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean, (beta_1, beta_2) = state["exp_avg"], group["betas"]
        taken: float | Tensor = 1.0
        if self.found_inf is not None:
            taken, grad = 1 - self.found_inf, torch.nan_to_num(grad, 0.0, 0.0, 0.0)
        lr, peak = group["lr"], group["initial_lr"]
        update = torch.lerp(mean, grad, 1 - beta_1).sign_()
        parameter.mul_(1 - taken * group["weight_decay"] * lr / peak)
        parameter.sub_(update * (taken * lr))
        mean.add_((grad - mean) * (taken * (1 - beta_2)))


def fused_adamw(parameters: Groups, **values: Any) -> torch.optim.Optimizer:
    """AdamW, or decoupled AdamW, by PyTorch's fused kernel."""
    return torch.optim.AdamW(parameters, **values, fused=True)


_MAKERS: dict[str, Code] = {
    "decoupled_adamw": fused_adamw,
    "adamw": fused_adamw,
    "decoupled_lionw": DecoupledLionW,
    "muon": "llmfoundry.train.optim.muon:Muon",
}
"""The code of the entries of OPTIMIZERS that come with the project."""
_SPLITS: dict[str, Code] = {"muon": muon_parts}
_LOW_PRECISION = "llmfoundry.train.optim.low_precision:LowPrecisionAdamW"
_NARROW: dict[str, Code] = dict.fromkeys(("decoupled_adamw", "adamw"), _LOW_PRECISION)

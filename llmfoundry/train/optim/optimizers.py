"""Build the optimizer of a recipe. A new optimizer is an entry of `OPTIMIZERS`.

Call `freeze` before the model is sharded or wrapped, and `build_optimizer` after.
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
Groups: TypeAlias = Iterable[nn.Parameter] | Iterable[dict[str, Any]]  # argument of torch.optim


def freeze(model: Decoder, config: ResolvedOptimizerConfig) -> None:
    """Disable the gradients of the parameters that match disable_grad.

    Raises:
        UserError: an expression matches no parameter, or no parameter is left to train.
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
    """Return the recipe's optimizer of the trainable parameters.

    The first group contains the parameters that match no group of the recipe, if there are any.

    Args:
        model: with parameters in the form (full or sharded) in which they will be updated.
        config: resolved.
        lora_plus_ratio: learning rate of the adapters' B, divided by that of others (LoRA+).
        matmul_dtype: dtype of matmuls with the recipe's precision.

    Raises:
        UserError: a group matches no remaining parameter, or one of its values has no effect.
    """
    kind, groups = OPTIMIZERS[config.name], []
    split = load_code(kind.split, _SPLITS.get(config.name)) if kind.split else _whole
    sections = (
        part
        for settings, parameters in _sections(model, config)
        for part in _lora_plus(model, settings, parameters, lora_plus_ratio)
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
    model: Decoder, config: ResolvedOptimizerConfig, parameters: Named, ratio: float
) -> list[tuple[ResolvedOptimizerConfig, Named]]:
    """Adapters' B apart from all else, with its own learning rate (Hayou et al., 2024).

    Rows of tokens (`LowRank.tokens`) have the optimizer's learning rate: their other factor does
    not train, so that there is no pair whose rates could differ.
    """
    rows = {f"{name}.lora_B" for name, _, _, lora in adapted_layers(model) if lora.tokens}
    fast = {
        name: p
        for name, p in parameters.items()
        if re.search(r"lora_(embedding_)?B", name) and name not in rows
    }
    if ratio == 1.0 or not fast:
        return [(config, parameters)]
    slow = {name: p for name, p in parameters.items() if name not in fast}
    return [(config, slow), (dataclasses.replace(config, lr=config.lr * ratio), fast)]


def _sections(
    model: Decoder, config: ResolvedOptimizerConfig
) -> list[tuple[ResolvedOptimizerConfig, Named]]:
    """Return (settings, parameters) of the remaining parameters, then of the recipe's groups."""
    parameters = dict(model.named_parameters())
    left = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    sections = []
    for index, group in enumerate(config.param_groups):
        key = f"optimizer.param_groups[{index}]."
        where = f"{key}param_str_match"
        # move the matching parameters to this group
        matches = _matches(group.param_str_match, parameters, where)
        matched = {name: left.pop(name) for name in matches if name in left}
        if not matched:
            raise UserError(
                f"{where}: all that {group.param_str_match!r} matches is frozen or in an earlier"
                " group; remove the group, or write it first"
            )
        if config.name == "muon":
            _refuse_inert(key, group, matched)
        # its settings replace those of the optimizer
        overrides = {
            name: value
            for name, value in vars(group).items()
            if value is not None and name != "param_str_match"
        }
        sections.append((dataclasses.replace(config, **overrides), matched))
    return [(config, left), *sections]


def _matches(pattern: str, parameters: Named, key: str) -> list[str]:
    """Return the parameter names that a regular expression matches.

    Raises:
        UserError: it matches none; suggests similar names.
    """
    matches = [name for name in parameters if re.search(pattern, name)]
    if matches:
        return matches

    def likeness(name: str) -> float:
        parts = [name, *name.split(".")]
        return max(difflib.SequenceMatcher(None, pattern, part).ratio() for part in parts)

    # suggest names of the first layer only
    kinds = {re.sub(r"\.\d+\.", ".0.", name): None for name in parameters}
    nearest = sorted(kinds, key=likeness, reverse=True)[:3]
    raise UserError(
        f"{key}: {pattern!r} is found in no parameter's name; the nearest are {', '.join(nearest)}"
    )


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon updates a parameter: matrices of the blocks, not embeddings or head."""
    return name.startswith("blocks.") and parameter.ndim == 2


def muon_parts(parameters: Named, model: Decoder) -> list[tuple[dict[str, Any], Named]]:
    """Split parameters into AdamW's, and Muon's by the heights of the matrices that they stack."""
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
    """Return the heights of the stacked matrices by parameter name.

    Parameters that stack matrices are fused queries, keys and values, experts, and their adapters.
    """
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
    """Lion (Chen et al., 2023) with a weight decay that does not depend on the peak learning rate.

    u = sign(lerp(m, g, 1 - beta_1)); p <- p (1 - weight_decay lr / first lr) - lr u;
    m <- lerp(m, g, 1 - beta_2). If `found_inf` is 1, a step changes nothing, as in PyTorch's fused
    optimizers, without a synchronization with the host.
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
        enabled: float | Tensor = 1.0  # 0 on the device if the step is skipped
        if self.found_inf is not None:
            enabled, grad = 1 - self.found_inf, torch.nan_to_num(grad, 0.0, 0.0, 0.0)
        lr, peak = group["lr"], group["initial_lr"]
        update = torch.lerp(mean, grad, 1 - beta_1).sign_()
        parameter.mul_(1 - enabled * group["weight_decay"] * lr / peak)
        parameter.sub_(update * (enabled * lr))
        mean.add_((grad - mean) * (enabled * (1 - beta_2)))


def fused_adamw(parameters: Groups, **values: Any) -> torch.optim.Optimizer:
    """Return AdamW, or decoupled AdamW, with PyTorch's fused kernel."""
    return torch.optim.AdamW(parameters, **values, fused=True)


_MAKERS: dict[str, Code] = {
    "decoupled_adamw": fused_adamw,
    "adamw": fused_adamw,
    "decoupled_lionw": DecoupledLionW,
    "muon": "llmfoundry.train.optim.muon:Muon",
}
"""Code of the entries of OPTIMIZERS that come with the project."""
_SPLITS: dict[str, Code] = {"muon": muon_parts}
_LOW_PRECISION = "llmfoundry.train.optim.low_precision:LowPrecisionAdamW"
_NARROW: dict[str, Code] = dict.fromkeys(("decoupled_adamw", "adamw"), _LOW_PRECISION)

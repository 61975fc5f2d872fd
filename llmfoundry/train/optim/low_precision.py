"""AdamW whose moments take 2 bytes or 1 in place of 4: `optimizer.moments`.

`optimizers.new_optimizer` makes it. A step is AdamW's in fp32; only what is kept between two steps
is narrower. bf16: rounded up or down by chance, as nearest rounding would lose what a step adds to
a long mean. int8: blocks of at most 256 values of a row with a scale each, in torchao's dynamic
8-bit numbers (Dettmers et al., 2022). The idea: codes and scales are plain tensors, divided over
processes as their parameter is, so that checkpoints hold and reshard them as any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmfoundry.errors import import_optional
from llmfoundry.ops.shard_layout import local_shard
from llmfoundry.recipe.optimizer import LEAST_BLOCKED, MOST_BLOCK

_LEAST_BLOCK = 32  # values: a scale of 4 bytes for fewer would be no gain
MEAN, SQUARE = "exp_avg", "exp_avg_sq"  # as PyTorch's optimizers call them
CODES, SCALE = "_codes", "_scale"
"""What is added to these names where a moment is int8."""
_GOLDEN = -1_640_531_535  # 2^32 over the golden ratio, as an int32


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) that keeps its moments as `moments`.

    p <- p (1 - lr weight_decay) - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps). While
    `found_inf` is 1 a step changes nothing, as PyTorch's fused optimizers have it, and the host is
    not asked.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        moments: str,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """`moments`: bf16 or int8; all else as of torch.optim.AdamW.

        Raises:
            UserError: int8 needs torchao, which is not installed.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self._is_int8 = moments == "int8"
        if self._is_int8:
            _quantization()  # not in the first step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        salt = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                salt += 1
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, salt)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state as it is; PyTorch's own turns moments to their parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, parameter in zip(saved, own, strict=True):
            self.state[parameter].update(state_dict["state"].get(name, {}))

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], salt: int) -> None:
        state, own = self.state[parameter], local_shard(parameter)
        if not state:
            state["step"] = torch.zeros((), device=own.device)
            state |= _zeros(parameter, MEAN, self._is_int8) | _zeros(
                parameter, SQUARE, self._is_int8
            )
        stop, step = self.found_inf, state["step"]
        taken: float | Tensor = 1.0 if stop is None else 1 - stop
        step += taken
        g = local_shard(grad).float()
        g = g if stop is None else torch.nan_to_num(g, 0.0, 0.0, 0.0)
        (beta_1, beta_2), lr = group["betas"], group["lr"]
        mean = _read(state, MEAN).lerp_(g, 1 - beta_1)
        square = _read(state, SQUARE).lerp_(g.square(), 1 - beta_2)
        for name, value, turn in ((MEAN, mean, 0), (SQUARE, square, 1)):
            _write(state, name, value, stop, seed=2 * salt + turn)
        root = square.div_(1 - beta_2**step).sqrt_().add_(group["eps"])
        shrunk = own.float() * (1 - lr * group["weight_decay"])
        new = shrunk - (mean / root) * (lr / (1 - beta_1**step))
        _keep(own, new.to(own.dtype), stop)


def _zeros(parameter: Tensor, name: str, is_int8: bool) -> dict[str, Tensor]:
    """A moment before the first step: a parameter that is small, or no matrix, keeps it in fp32."""
    own = local_shard(parameter)
    if not is_int8:
        return {name: _beside(parameter, torch.zeros_like(own, dtype=torch.bfloat16))}
    block = _block(own.shape[-1]) if own.ndim > 1 and parameter.numel() >= LEAST_BLOCKED else 0
    if not block:
        return {name: _beside(parameter, torch.zeros_like(own, dtype=torch.float32))}
    scales = own.new_zeros((*own.shape[:-1], own.shape[-1] // block), dtype=torch.float32)
    return {  # whatever the codes are, a scale of 0 makes zeros of them
        f"{name}{CODES}": _beside(parameter, torch.zeros_like(own, dtype=torch.uint8)),
        f"{name}{SCALE}": _beside(parameter, scales, last=parameter.shape[-1] // block),
    }


def _beside(parameter: Tensor, local: Tensor, *, last: int | None = None) -> Tensor:
    """A local shard as a tensor that is divided as its parameter; `last`: its last dimension."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((*parameter.shape[:-1], last or parameter.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _block(width: int) -> int:
    """Values that share a scale: the most that divide a row; 0: too few."""
    found = next((n for n in range(min(MOST_BLOCK, width), 0, -1) if width % n == 0), 0)
    return found if found >= _LEAST_BLOCK else 0


def _read(state: dict[str, Any], name: str) -> Tensor:
    """A moment in fp32, a copy."""
    if name in state:
        return local_shard(state[name]).to(torch.float32, copy=True)
    codes, scale = local_shard(state[f"{name}{CODES}"]), local_shard(state[f"{name}{SCALE}"])
    if not codes.numel():  # a process that has no rows of it
        return codes.float()
    values: Tensor = _quantization().dequant_with_qmap(
        codes, _codes_of(name, codes.device), scale.flatten()
    )
    return values


def _write(
    state: dict[str, Any], name: str, value: Tensor, stop: Tensor | None, *, seed: int
) -> None:
    """Keep a moment, unless `stop` is 1."""
    if name in state:
        kept = local_shard(state[name])
        is_narrow = kept.dtype == torch.bfloat16
        _keep(kept, _to_bfloat16(value, state["step"], seed) if is_narrow else value, stop)
        return
    codes, scale = local_shard(state[f"{name}{CODES}"]), local_shard(state[f"{name}{SCALE}"])
    if not codes.numel():
        return
    library = _quantization()
    scaled, scales = library.scale_tensor(value, codes.numel() // scale.numel())
    new = library.quantize_8bit_with_qmap(scaled, _codes_of(name, codes.device))
    _keep(codes, new, stop)
    _keep(scale, scales.view_as(scale), stop)


def _keep(kept: Tensor, new: Tensor, stop: Tensor | None) -> None:
    kept.copy_(new if stop is None else torch.where(stop.bool(), kept, new))


def _to_bfloat16(value: Tensor, step: Tensor, seed: int) -> Tensor:
    """Rounded up or down, each as likely as the value is near, by a hash of place and step.

    The draws of a generator would differ between replicas, and after a resume.
    """
    places = torch.arange(value.numel(), dtype=torch.int32, device=value.device)
    bits = (
        places.view(value.shape) * _GOLDEN + step.int() * 668_265_263 + seed * 374_761_393 % 2**31
    )
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # of lowbias32 (Wellons, 2018)
        bits = (bits ^ (bits >> shift)) * factor
    noise = (bits ^ (bits >> 15)) & 0xFFFF
    return ((value.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


@cache
def _codes_of(name: str, device: torch.device) -> Tensor:
    """What the 256 codes of a moment stand for, in order."""
    values = _quantization().create_dynamic_map(signed=name == MEAN)
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _quantization() -> Any:
    return import_optional(
        "torchao.optim.quant_utils", "optimizer.moments: int8", extra="lowp", package="torchao"
    )

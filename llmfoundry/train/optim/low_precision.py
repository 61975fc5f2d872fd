"""AdamW with optimizer state in bf16 or int8 instead of fp32 (`optimizer.moments`).

Entry point: `LowPrecisionAdamW`, created by `optimizers.new_optimizer`. A step is computed in fp32,
and only the state between two steps has a smaller dtype.

bf16: rounded stochastically, because rounding to nearest would lose the small contribution of a
step to a long running mean. int8: blocks of at most 256 values of a row with one scale each, in
torchao's dynamic 8-bit format (Dettmers et al., 2022). Codes and scales are plain tensors that are
sharded like their parameter, so checkpoints store and reshard them like other tensors.
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

_LEAST_BLOCK = 32  # minimum values per block, because each block has a scale of 4 bytes
MEAN, SQUARE = "exp_avg", "exp_avg_sq"  # names as in PyTorch's optimizers
CODES, SCALE = "_codes", "_scale"
"""Suffixes of these names for int8 state."""
_GOLDEN = -1_640_531_535  # 2^32 over the golden ratio, as an int32


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with optimizer state of the dtype `moments`.

    p <- p (1 - lr weight_decay) - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps). If
    `found_inf` is 1, a step changes nothing, as in PyTorch's fused optimizers, without a
    synchronization with the host.
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
        """Create the optimizer; arguments as in torch.optim.AdamW.

        Args:
            parameters: or parameter groups.
            moments: dtype of the optimizer state: bf16 or int8.
            lr: learning rate.
            betas: decay of the running means of gradients and of their squares.
            eps: added to the root of the mean of squares.
            weight_decay: multiplied by the learning rate.

        Raises:
            UserError: int8 needs torchao, which is not installed.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self._is_int8 = moments == "int8"
        if self._is_int8:
            _quantization()  # imported here instead of in the first step

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
        """Load a state without a conversion; PyTorch would convert it to the parameters' dtype."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, parameter in zip(saved, parameters, strict=True):
            self.state[parameter].update(state_dict["state"].get(name, {}))

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], salt: int) -> None:
        """Apply AdamW to this rank's shard of a parameter.

        Args:
            parameter: to update.
            grad: gradient of the parameter.
            group: settings.
            salt: a number of the parameter, for the stochastic rounding.
        """
        state, weight = self.state[parameter], local_shard(parameter)
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state |= _zeros(parameter, MEAN, self._is_int8)
            state |= _zeros(parameter, SQUARE, self._is_int8)

        # if `stop` is 1, all updates below are cancelled on the device
        stop, step = self.found_inf, state["step"]
        step += 1.0 if stop is None else 1 - stop
        g = local_shard(grad).float()
        g = g if stop is None else torch.nan_to_num(g, 0.0, 0.0, 0.0)

        # update the running means in fp32, and store them in the small dtype
        (beta_1, beta_2), lr = group["betas"], group["lr"]
        mean = _read(state, MEAN).lerp_(g, 1 - beta_1)
        square = _read(state, SQUARE).lerp_(g.square(), 1 - beta_2)
        _write(state, MEAN, mean, stop, seed=2 * salt)
        _write(state, SQUARE, square, stop, seed=2 * salt + 1)

        # update the weight
        root = square.div_(1 - beta_2**step).sqrt_().add_(group["eps"])
        decayed = weight.float() * (1 - lr * group["weight_decay"])
        new = decayed - (mean / root) * (lr / (1 - beta_1**step))
        _assign(weight, new.to(weight.dtype), stop)


def _zeros(parameter: Tensor, name: str, is_int8: bool) -> dict[str, Tensor]:
    """Return the initial optimizer state of a parameter, under `name`.

    With int8, small parameters and vectors have fp32 state.
    """
    weight = local_shard(parameter)
    if not is_int8:
        return {name: _sharded_like(parameter, torch.zeros_like(weight, dtype=torch.bfloat16))}
    is_blocked = weight.ndim > 1 and parameter.numel() >= LEAST_BLOCKED
    block = _block(weight.shape[-1]) if is_blocked else 0
    if not block:
        return {name: _sharded_like(parameter, torch.zeros_like(weight, dtype=torch.float32))}
    # with a scale of 0, any code means 0
    codes = torch.zeros_like(weight, dtype=torch.uint8)
    scales = weight.new_zeros((*weight.shape[:-1], weight.shape[-1] // block), dtype=torch.float32)
    return {
        f"{name}{CODES}": _sharded_like(parameter, codes),
        f"{name}{SCALE}": _sharded_like(parameter, scales, last=parameter.shape[-1] // block),
    }


def _sharded_like(parameter: Tensor, local: Tensor, *, last: int | None = None) -> Tensor:
    """Return a local shard as a DTensor with the sharding of a parameter.

    Args:
        parameter: if it is not sharded, `local` is returned.
        local: this rank's shard.
        last: size of the last dimension of the full tensor; None: as the parameter.
    """
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
    """Return the block size: the largest that divides a row of `width` values; 0: too small."""
    size = next((n for n in range(min(MOST_BLOCK, width), 0, -1) if width % n == 0), 0)
    return size if size >= _LEAST_BLOCK else 0


def _read(state: dict[str, Any], name: str) -> Tensor:
    """Return a copy of the state `name` in fp32."""
    if name in state:
        return local_shard(state[name]).to(torch.float32, copy=True)
    codes, scale = local_shard(state[f"{name}{CODES}"]), local_shard(state[f"{name}{SCALE}"])
    if not codes.numel():  # this rank has no rows of the parameter
        return codes.float()
    values: Tensor = _quantization().dequant_with_qmap(
        codes, _codes_of(name, codes.device), scale.flatten()
    )
    return values


def _write(
    state: dict[str, Any], name: str, value: Tensor, stop: Tensor | None, *, seed: int
) -> None:
    """Store the state `name` in its dtype, unless `stop` is 1."""
    if name in state:
        target = local_shard(state[name])
        if target.dtype == torch.bfloat16:
            value = _to_bfloat16(value, state["step"], seed)
        _assign(target, value, stop)
        return
    codes, scale = local_shard(state[f"{name}{CODES}"]), local_shard(state[f"{name}{SCALE}"])
    if not codes.numel():
        return
    library = _quantization()
    scaled, scales = library.scale_tensor(value, codes.numel() // scale.numel())
    new = library.quantize_8bit_with_qmap(scaled, _codes_of(name, codes.device))
    _assign(codes, new, stop)
    _assign(scale, scales.view_as(scale), stop)


def _assign(target: Tensor, new: Tensor, stop: Tensor | None) -> None:
    """Copy `new` to `target`, unless `stop` is 1."""
    target.copy_(new if stop is None else torch.where(stop.bool(), target, new))


def _to_bfloat16(value: Tensor, step: Tensor, seed: int) -> Tensor:
    """Round fp32 values to bf16 stochastically, with noise from a hash of position, step and seed.

    The numbers of a random generator would differ between replicas, and after a resume.
    """
    positions = torch.arange(value.numel(), dtype=torch.int32, device=value.device)
    bits = positions.view(value.shape) * _GOLDEN
    bits = bits + step.int() * 668_265_263 + seed * 374_761_393 % 2**31
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # of lowbias32 (Wellons, 2018)
        bits = (bits ^ (bits >> shift)) * factor
    noise = (bits ^ (bits >> 15)) & 0xFFFF  # added to the 16 bits that bf16 drops
    return ((value.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


@cache
def _codes_of(name: str, device: torch.device) -> Tensor:
    """Return the values of the 256 codes of a state, in order."""
    values = _quantization().create_dynamic_map(signed=name == MEAN)
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _quantization() -> Any:
    return import_optional(
        "torchao.optim.quant_utils", "optimizer.moments: int8", extra="lowp", package="torchao"
    )

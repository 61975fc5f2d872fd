"""Autocast, asked and switched off, also where a tensor is on the meta device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def has_autocast(x: Tensor) -> bool:
    """Whether autocast is on; the meta device has none that could be asked for."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """X in the dtype that autocast computes products in; as it is where autocast is off."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if has_autocast(x) else x


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context in which products of x are computed in the dtypes that they are given."""
    return torch.autocast(x.device.type, enabled=False) if has_autocast(x) else nullcontext()

"""Who goes where in a mixture of experts: tokens sorted by expert, and back.

`moe_grouped.py` sorts once a layer. A (token, choice) pair is a row; rows of one expert stand
together, in the order of their tokens, so that each expert reads one segment. Nothing here waits
for the device: counts stay on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SortedRows(NamedTuple):
    """The rows of a layer, N = T * k of them. Integers are 32-bit: they are saved for backward.

    Attributes:
        order: (N,) the pair t * k + choice that stands in each sorted row.
        inverse: (N,) the sorted row of each pair.
        ends: (E,) where each expert's segment ends: what grouped_mm takes as `offs`.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor


def route(experts: Tensor, n_experts: int) -> SortedRows:
    """Sort the pairs of experts (T, k), integers below `n_experts`, by expert."""
    flat = experts.flatten().to(torch.int32)
    by_expert, order = flat.sort(stable=True)
    inverse = torch.empty_like(flat)
    rows = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    inverse[order] = rows  # each place once: deterministic
    # ends from the sorted experts: bincount would wait for the device
    number = torch.arange(n_experts, dtype=torch.int32, device=flat.device)
    ends = torch.searchsorted(by_expert, number, right=True, out_int32=True)
    return SortedRows(order.to(torch.int32), inverse, ends)

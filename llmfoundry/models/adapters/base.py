"""A base model known again: a few numbers of each of its tensors.

Kept beside an adapter, so that an adapter is never put on other weights of the same shape. Sampled
from what is loaded, not from files: the same model may come from our checkpoint, from a Hugging
Face folder, in fp32 or bf16, whole or in shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from llmfoundry.models.adapters.adapt import is_added
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.tensor_ranks import all_stacked_rows
from llmfoundry.ops.shard_layout import local_blocks

NUMBERS = 8  # of each tensor
ROUNDING = 2.0**-7  # relative: what bfloat16 may change


@torch.no_grad()
def base_sample(model: Decoder, *, frozen: bool, rows: int | None = None) -> dict[str, list[float]]:
    """Numbers at even distances in each tensor of the base, by its name.

    Every process calls it. Tensors that are not kept as numbers (quantised ones) are left out.

    Args:
        model: with its weights.
        frozen: leave out what trains.
        rows: of embedding and head to look at; None: all.
    """
    tables = model.vocabulary() if rows is not None else ()
    stacked = all_stacked_rows(model)
    names, found, cut = list[str](), list[Tensor](), dict[Any, list[int]]()
    for name, parameter in model.named_parameters():
        if is_added(name) or (frozen and parameter.requires_grad):
            continue
        if not parameter.is_floating_point():
            continue
        if isinstance(parameter, DTensor):
            kinds = [Replicate() if p.is_replicate() else Partial() for p in parameter.placements]
            cut.setdefault((parameter.device_mesh, tuple(kinds)), []).append(len(names))
        names.append(name)
        wanted = rows if name in tables else None
        found.append(_numbers(parameter, wanted, stacked.get(name, ())))
    if not found:
        return {}
    samples = torch.stack(found)
    for (mesh, kinds), places in cut.items():  # replicas hold the same
        samples[places] = DTensor.from_local(samples[places], mesh, kinds).full_tensor()
    return dict(zip(names, samples.tolist(), strict=True))


def _numbers(parameter: Tensor, rows: int | None, stacked: Sequence[int]) -> Tensor:
    """(NUMBERS,) fp64; of a shard those that it holds, zeros elsewhere."""
    size = parameter.numel() if rows is None else parameter[:rows].numel()
    places = torch.linspace(0, size - 1, NUMBERS, device=parameter.device).long()
    if not isinstance(parameter, DTensor):
        return parameter.detach().flatten()[places].double()
    local = parameter.to_local().detach()
    found = torch.zeros(NUMBERS, dtype=torch.float64, device=local.device)
    where = torch.unravel_index(places, parameter.shape)  # in each dimension
    for block in local_blocks(parameter, stacked):
        mine, here = torch.ones_like(places, dtype=torch.bool), list[Tensor]()
        for place, (first, last), (begin, _) in zip(where, block.local, block.whole, strict=True):
            own = place - begin + first
            mine &= (own >= first) & (own < last)
            here.append(own.clamp(first, last - 1))
        found = torch.where(mine, local[tuple(here)].double(), found)
    return found


def base_difference(then: Mapping[str, list[float]], now: Mapping[str, list[float]]) -> str | None:
    """Which tensor is not the same; None: all that both have are."""
    if not isinstance(then, dict) or (then and not then.keys() & now.keys()):
        return "it has no tensor of this one's"
    for name in sorted(then.keys() & now.keys()):
        pairs = zip(then[name], now[name], strict=False)
        if any(abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in pairs):
            return f"{name} differs"
    return None

"""A base model known again: a few numbers of each of its tensors.

Kept beside an adapter, so that an adapter is never put on other weights of the same shape. Sampled
from what is loaded, not from files: the same model may come from our checkpoint, from a Hugging
Face folder, in fp32 or bf16, whole or in shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmfoundry.models.adapters.adapt import is_added
from llmfoundry.models.decoder import Decoder

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
    names, found = [], []
    for name, parameter in model.named_parameters():
        if is_added(name) or (frozen and parameter.requires_grad):
            continue
        if not parameter.is_floating_point():
            continue
        names.append(name)
        found.append(_numbers(parameter, rows if name in tables else None))
    if not found:
        return {}
    stacked = torch.stack(found)
    if any(isinstance(p, DTensor) for p in model.parameters()):
        _add_up(stacked, model)
    return dict(zip(names, stacked.tolist(), strict=True))


def _numbers(parameter: Tensor, rows: int | None) -> Tensor:
    """(NUMBERS,) fp64; of a shard those that it holds, zeros elsewhere."""
    size = parameter.numel() if rows is None else parameter[:rows].numel()
    places = torch.linspace(0, size - 1, NUMBERS, device=parameter.device).long()
    if not isinstance(parameter, DTensor):
        return parameter.detach().flatten()[places].double()
    local = parameter.to_local().detach().flatten()
    width = parameter.numel() // max(1, parameter.shape[0])
    places = places - _first_row(parameter) * width
    mine = (places >= 0) & (places < local.numel())
    if not local.numel():
        return torch.zeros(NUMBERS, dtype=torch.float64, device=local.device)
    return torch.where(mine, local[places.clamp(0, local.numel() - 1)].double(), 0.0)


def _first_row(parameter: DTensor) -> int:
    """The row of the whole parameter that this process's rows begin with."""
    axes = [axis for axis, place in enumerate(parameter.placements) if not place.is_replicate()]
    if not axes:
        return 0
    (axis,), mesh, height = axes, parameter.device_mesh, parameter.shape[0]
    assert parameter.placements[axis].is_shard(0), "only rows are sharded"
    # as torch.chunk cuts: the last shards may be short or empty
    return min(mesh.get_local_rank(axis) * -(-height // mesh.size(axis)), height)


def _add_up(stacked: Tensor, model: nn.Module) -> None:
    """Sum over the processes that share one copy of the model."""
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    names = mesh.mesh_dim_names
    group = mesh.get_group(names[-1] if names else 0)  # the shards; replicas hold the same
    dist.all_reduce(stacked, group=group)


def base_difference(then: Mapping[str, list[float]], now: Mapping[str, list[float]]) -> str | None:
    """Which tensor is not the same; None: all that both have are."""
    if not isinstance(then, dict) or (then and not then.keys() & now.keys()):
        return "it has no tensor of this one's"
    for name in sorted(then.keys() & now.keys()):
        pairs = zip(then[name], now[name], strict=False)
        if any(abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in pairs):
            return f"{name} differs"
    return None

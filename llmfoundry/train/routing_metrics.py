"""What a mixture of experts did with a step's tokens, as metrics and for the report's heat map.

The trainer calls it for steps that it logs, whose values are on the host by then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfoundry.models.load_balance import Routing


def routing_metrics(routing: Routing, *, choices: int) -> dict[str, float]:
    """moe/* of the global batch, over all layers and of each.

    Loads are over their layer's mean: 1 everywhere at perfect balance, and at most E / k. The
    entropy is that of the router's mean probabilities, in nats: ln E at perfect balance.

    Args:
        routing: of a whole step.
        choices: tokens of the step times k; what no expert has got of them in any layer are
            `moe/dropped_tokens`, which a dropless mixture has none of.
    """
    load = routing.load.double()
    mean = load.mean(1, keepdim=True)
    relative = load / mean
    p = routing.probability.double()
    p = p / p.sum(1, keepdim=True)
    entropy = -torch.special.xlogy(p, p).sum(1)
    layers = torch.stack([relative.amax(1), relative.amin(1), _spread(relative), entropy])
    over_all = torch.stack(
        [relative.max(), relative.min(), relative.sub(1).square().mean().sqrt(), entropy.mean()]
    )
    names = ("load_max", "load_min", "load_std", "router_entropy")
    columns = torch.cat([over_all[:, None], layers], dim=1).T.tolist()
    found = {"moe/dropped_tokens": choices * len(load) - load.sum().item()}
    for index, column in enumerate(columns):
        layer = f"layer_{index - 1:02d}/" if index else ""
        found |= {f"moe/{layer}{name}": v for name, v in zip(names, column, strict=True)}
    return found


def _spread(relative: Tensor) -> Tensor:
    """Standard deviation of each layer's loads, whose mean is 1."""
    return relative.sub(1).square().mean(1).sqrt()

"""Prefix tuning on a class of transformers: keys and values that all documents of a row see.

They go in as `past_key_values`, as in peft. A prefix is the same for every document, and every
document counts its positions from behind it: so packed documents share one in front of the row, and
a mask (`layouts.by_mask`) keeps the documents themselves apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.transformers_models.layouts import FULL, SLIDING

_DIFFER = ("global_head_dim", "per_layer_config", "num_kv_shared_layers", "kv_lora_rank")


def check_prefix(model: Any) -> None:
    """Raise a UserError for a class whose layers do not all take such keys and values."""
    config = model.hf.config.to_dict()
    kinds, differ = set(config.get("layer_types") or ()), [n for n in _DIFFER if config.get(n)]
    if model.takes("past_key_values") and kinds <= {FULL, SLIDING} and not differ:
        return
    raise UserError(
        "adapter.name: prefix_tuning needs layers that all take keys and values of one shape, which"
        f" {type(model.hf).__name__} does not have; write prompt_tuning, or lora"
    )


def prefix_cache(prefix: Tensor, config: Any, batch: int) -> Any:
    """`past_key_values` of a prefix (P, 2 L H d), in peft's order, for `batch` rows."""
    from transformers.cache_utils import Cache, DynamicLayer

    class PrefixLayer(DynamicLayer):
        """Stores nothing, so that a block that is computed again sees the same."""

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            assert self.keys is not None and self.values is not None
            k, v = (x.to(key_states.dtype) for x in (self.keys, self.values))
            return torch.cat([k, key_states], -2), torch.cat([v, value_states], -2)

    heads, head_dim = config.attn_config.kv_n_heads, config.head_dim
    each = prefix.view(len(prefix), config.n_layers, 2, heads, head_dim).permute(1, 2, 3, 0, 4)
    layers: list[Any] = []
    for keys, values in each:  # (H, P, d)
        layer = PrefixLayer()
        layer.keys, layer.values = (x.expand(batch, -1, -1, -1) for x in (keys, values))
        layer.dtype, layer.device, layer.is_initialized = prefix.dtype, prefix.device, True
        layers.append(layer)
    return Cache(layers=layers)

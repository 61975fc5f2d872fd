"""A decoder's adapter added into its weights: tensor by tensor, never all of them at once.

`hf/write.py` writes a `MergedState`; `builders/pretrained.py` begins a run with a merged
adapter by `merge_into`. Sums are made in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from llmfoundry.models.decoder import Decoder
from llmfoundry.models.init import grown
from llmfoundry.models.linear import Linear, whole
from llmfoundry.models.low_rank import LowRank, merged
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.ops.shard_layout import assign


class MergedState(Mapping[str, Tensor]):
    """The state of the plain decoder that does what an adapted one does, made when it is read.

    Weights without an adapter come as they are; a quantised one dequantised.
    """

    def __init__(self, model: Decoder) -> None:
        with torch.device("meta"):
            self._names = list(Decoder(model.config).state_dict())
        self._model = model
        self._state = model.state_dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        layer, _, kind = name.rpartition(".")
        module = self._model.get_submodule(layer)
        if isinstance(module, ExpertWeights) and kind in ("w1", "v1", "w2"):
            return _merged_stack(module, kind)
        if isinstance(module, Linear) and kind == "weight":
            return module.dense() if module.lora is None else merged(module, module.lora)
        if isinstance(module, nn.Embedding) and getattr(module, "lora", None) is not None:
            return _merged_embedding(module)
        return self._state[name]


def _merged_stack(stacks: ExpertWeights, name: str) -> Tensor:
    """(E * f, D); of one expert after another."""
    weight = stacks.dense(name)
    assert weight is not None
    a, b = stacks.factors(name)
    if a is None or b is None:
        return weight.flatten(0, 1)
    out = torch.empty(weight.shape, device=weight.device)
    for e in range(stacks.n):
        product = b[e].float() @ a[e].float()
        out[e] = weight[e].float() + (product.T if name == "w2" else product)
    return out.flatten(0, 1)


def _merged_embedding(layer: nn.Module) -> Tensor:
    lora, a, b = layer.lora, layer.lora_A, layer.lora_B
    assert isinstance(lora, LowRank)
    weight = layer.weight
    assert isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(weight, Tensor)
    return weight.float() + lora.scaling * (b.float() @ a.float()).T


@torch.no_grad()
def merge_into(
    model: Decoder,
    plan: Mapping[str, LowRank],
    tensors: Mapping[str, Tensor],
    *,
    rows: int | None = None,
) -> None:
    """Add an adapter into a model's weights, whole or in shards; every process calls it.

    Args:
        model: the base, with its weights.
        plan: the adapter of each matrix.
        tensors: the adapter's parameters and those that trained whole, by name, whole.
        rows: that embedding and head had in its run, where they have more here; those beyond are
            the mean of what they are merged.
    """
    tables = model.vocabulary() if rows is not None else ()
    parameters = dict(model.named_parameters())
    for name, lora in plan.items():
        if ".experts." in name:
            assign(parameters[name], _stack_of(name, lora, tensors, whole(parameters[name]), model))
            continue
        weight = whole(parameters[f"{name}.weight"])
        own = weight[:rows] if f"{name}.weight" in tables else weight
        layer = _layer_of(name, lora, tensors, own)
        value = _merged_embedding(layer) if name in ("wte", "wpe") else merged(layer, lora)
        assign(parameters[f"{name}.weight"], grown(value, len(weight)))
    for name, tensor in tensors.items():
        if name in parameters:
            assign(parameters[name], grown(tensor, len(parameters[name])))


def _layer_of(name: str, lora: LowRank, tensors: Mapping[str, Tensor], weight: Tensor) -> nn.Module:
    """What `low_rank` asks of a layer, without one."""
    values = {
        key.removeprefix(f"{name}."): tensor.to(weight.device)
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.lora_")
    }
    out, into = weight.shape
    layer = SimpleNamespace(
        weight=weight, dense=lambda: weight, lora=lora, out_features=out, in_features=into, **values
    )
    return layer  # type: ignore[return-value]


def _stack_of(
    name: str, lora: LowRank, tensors: Mapping[str, Tensor], weight: Tensor, model: Decoder
) -> Tensor:
    """A merged stack (E * f, D)."""
    stacks = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(stacks, ExpertWeights)
    stack = weight.view(stacks.n, stacks.f, stacks.d)
    a, b = (tensors[f"{name}_lora_{side}"].to(weight.device) for side in "AB")
    count = len(a) // lora.r
    merged_stack = torch.empty(stack.shape, device=stack.device)
    for e in range(stacks.n):
        index = e if count > 1 else 0
        product = (
            b.view(count, -1, lora.r)[index].float() @ a.view(count, lora.r, -1)[index].float()
        )
        product = product.T if name.endswith("w2") else product
        merged_stack[e] = stack[e].float() + lora.scaling * product
    return merged_stack.flatten(0, 1)

"""Adapters on a decoder: added, filled, switched off, merged, and their base recognized.

`builders/trainer.py` calls `add_adapter` before blocks are wrapped and sharded, and `init_adapter`
after the base was loaded; all but the adapter is frozen. Which parameters are an adapter's is
decided here, by name and by `requires_grad`. `hf/write_folder.py` exports a `MergedState`,
`builders/pretrained.py` merges into a base by `merge_into`, tensor by tensor and in fp32.
`base_sample` is kept beside an adapter, so that it is never put on other weights of the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from llmfoundry.errors import UserError
from llmfoundry.models.adapter_targets import AdapterTarget, find_targets, select
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.init import Distribution, draw, grown
from llmfoundry.models.layers import Linear
from llmfoundry.models.low_rank import (
    A_INIT,
    B_INIT,
    MAGNITUDE,
    A,
    B,
    LowRank,
    merged_weight,
    row_norms,
)
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops.shard_layout import assign, full_tensor, local_blocks
from llmfoundry.terminal import columns

BASE = "base.json"
"""In an adapter's folder that we wrote: numbers of the base model, to know it again."""

_ADDED = re.compile(
    r"(^|[._])lora_(A|B|A_init|B_init|magnitude)$"  # ours
    r"|\.lora_(A|B|magnitude_vector)\.default\b"  # peft's, on transformers' classes
)


def add_adapter(
    model: Decoder,
    plan: Mapping[str, LowRank],
    *,
    modules_to_save: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Put adapters on a model, and freeze all else.

    Args:
        model: on the meta device, or anywhere; the new parameters are empty.
        plan: `plan.plan_adapter`'s, or a peft folder's.
        modules_to_save: modules that train whole beside it.
        dtype: of the new parameters.

    Raises:
        UserError: a module to save is not there, or has an adapter as well.
    """
    model.requires_grad_(False)
    names = [name for name, _ in model.named_modules() if name]
    whole = select(modules_to_save, names, "adapter.modules_to_save")
    targets = find_targets(model, split_qkv=False)
    for name, lora in plan.items():
        if any(name == saved or name.startswith(f"{saved}.") for saved in whole):
            raise UserError(
                f"adapter.modules_to_save: {name} has an adapter already; leave it out of one"
            )
        _add(name, targets[name], lora, dtype)
    for name in whole:
        model.get_submodule(name).requires_grad_(True)


def _add(name: str, target: AdapterTarget, lora: LowRank, dtype: torch.dtype) -> None:
    """Register a layer's parameters, stacked where its weight is."""
    module = target.module
    device = next(module.parameters()).device
    stacked = 1 if lora.shared else target.experts
    prefix = ""
    if isinstance(module, ExpertWeights):
        prefix = name.rpartition(".")[2] + "_"
        module.lora[prefix[:-1]] = lora
    else:
        module.lora = lora  # type: ignore[assignment]
    shapes = {
        A: (stacked * len(lora.parts) * lora.r, target.shape[1]),
        B: (stacked * lora.rows, lora.r),
    }
    if lora.dora:
        shapes[MAGNITUDE] = (lora.rows,)  # type: ignore[assignment]
    for key, shape in shapes.items():
        empty = torch.empty(shape, dtype=dtype, device=device)
        module.register_parameter(prefix + key, nn.Parameter(empty))
    if lora.init == "pissa":
        for key, like in ((A_INIT, A), (B_INIT, B)):
            start = torch.empty(shapes[like], dtype=dtype, device=device)
            module.register_parameter(key, nn.Parameter(start, requires_grad=False))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, LowRank]]:
    """Name of each adapted matrix, its module, the prefix of its parameters, and its adapter."""
    for name, module in model.named_modules():
        lora = getattr(module, "lora", None)
        if isinstance(lora, LowRank):
            yield name, module, "", lora
        elif isinstance(lora, dict):
            for weight, one in lora.items():
                yield f"{name}.{weight}", module, f"{weight}_", one


@torch.no_grad()
def init_adapter(model: nn.Module, seed: int) -> None:
    """Fill the adapters' parameters, of a base that has its weights.

    A is uniform in ± 1 / sqrt(in) as in peft, or normal with deviation 1 / r; B is 0, so that the
    model starts as the base. Every value is a function of the seed, its name and the base.
    """
    for name, module, prefix, lora in adapted_layers(model):
        a, b = getattr(module, prefix + A), getattr(module, prefix + B)
        if lora.init == "pissa":
            _start_from_singular_values(module, lora)
        elif isinstance(module, nn.Embedding):  # peft's: the product is 0 all the same
            assign(a, torch.zeros(a.shape, device=a.device))
            draw(b, Distribution(1.0), seed, f"{name}.{prefix}{B}")
        else:
            std = 1 / lora.r if lora.init == "gaussian" else (3 * a.shape[1]) ** -0.5
            distribution = Distribution(std, uniform=lora.init != "gaussian")
            draw(a, distribution, seed, f"{name}.{prefix}{A}" if not prefix else f"{name}_{A}")
            assign(b, torch.zeros(b.shape, device=b.device))
        if lora.dora:
            assign(getattr(module, MAGNITUDE), row_norms(_Whole(module), lora))


@torch.no_grad()
def fill_adapter_from(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors, by their names, into parameters that may be sharded."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        assign(parameters[name], tensor.to(parameters[name].device))


class _Whole:
    """A layer whose parameters are whole on this process, for what is computed once."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Tensor:
        return full_tensor(getattr(self._layer, name))

    def dense(self) -> Tensor:
        """The frozen weight (out, in)."""
        return full_tensor(self._layer.dense())  # type: ignore[operator]


def _start_from_singular_values(layer: nn.Module, lora: LowRank) -> None:
    """PiSSA: the r largest singular values of each part, their square roots on either side."""
    weight = full_tensor(layer.dense())  # type: ignore[operator]
    a_rows, b_rows = [], []
    for begin, end in lora.parts:
        u, s, v = torch.linalg.svd(weight[begin:end].float(), full_matrices=False)
        root = (s[: lora.r] / lora.scaling).sqrt()
        a_rows.append(root[:, None] * v[: lora.r])
        b_rows.append(u[:, : lora.r] * root)
    for key, start, rows in ((A, A_INIT, a_rows), (B, B_INIT, b_rows)):
        value = torch.cat(rows)
        assign(getattr(layer, key), value)
        assign(getattr(layer, start), value)


def is_added(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return _ADDED.search(name) is not None


def plain_name(name: str) -> str:
    """The name that a parameter of the base has without peft's layers around its own."""
    return name if is_added(name) else re.sub(r"(\.base_layer)+\.", ".", name)


def saved_names(model: nn.Module) -> list[str]:
    """Parameters that an adapter's checkpoint holds: what trains, and what that stands on."""
    parameters = model.named_parameters()
    return [name for name, p in parameters if p.requires_grad or is_added(name)]


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The base model, in a context: what a preference's reference is.

    Raises:
        UserError: modules train whole beside the adapter, so that the base is not there any more.
    """
    trained = [n for n, p in model.named_parameters() if p.requires_grad and not is_added(n)]
    if trained:
        raise UserError(
            f"adapter.modules_to_save: {trained[0]} trains whole, so that the base is not kept;"
            " remove it, or write preference.reference: precompute"
        )
    loras = [lora for _, _, _, lora in adapted_layers(model)]
    peft = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    _switch(loras, peft, on=False)
    try:
        yield
    finally:
        _switch(loras, peft, on=True)


def _switch(loras: list[LowRank], peft: list[nn.Module], *, on: bool) -> None:
    for lora in loras:
        lora.on = on
    for layer in peft:  # its own method changes requires_grad as well
        layer._disable_adapters = not on  # type: ignore[assignment]


def freeze_parts(model: nn.Module, patterns: Sequence[str], key: str = "freeze") -> list[str]:
    """Switch off the gradients of the parameters that the patterns name; their names.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    frozen = select(patterns, list(parameters), key)
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise UserError(f"{key}: matches every parameter; leave one to train")
    return frozen


def adapter_table(model: nn.Module) -> list[str]:
    """Lines for the user: each kind of adapted matrix, how many, rank and parameters."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for name, module, prefix, lora in adapted_layers(model):
        kind = re.sub(r"^blocks\.\d+\.", "", name)
        size = sum(
            getattr(module, prefix + key).numel()
            for key in (A, B, MAGNITUDE)
            if hasattr(module, prefix + key)
        )
        experts = module.n if isinstance(module, ExpertWeights) else 1
        row = kinds.setdefault((kind, lora.r), [0, 0, 0])
        row[0], row[1], row[2] = row[0] + 1, row[1] + experts, row[2] + size
    rows = [
        (kind, f"{layers:,}", f"{matrices:,}", str(rank), f"{size:,}")
        for (kind, rank), (layers, matrices, size) in kinds.items()
    ]
    lines = columns(("adapter on", "layers", "matrices", "rank", "parameters"), rows)
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    others = {n: size for n, size in trained.items() if not is_added(n)}
    lines += [f"{n}  trains whole: {size:,} parameters" for n, size in others.items()]
    total = sum(p.numel() for p in model.parameters())
    mine = sum(trained.values())
    lines.append(f"trained: {mine:,} of {total:,} parameters ({100 * mine / total:.2g} %)")
    return lines


class MergedState(Mapping[str, Tensor]):
    """The state of the plain decoder that does what an adapted one does, made when it is read.

    Weights without an adapter come as they are; a quantized one dequantized.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._state = {n: t for n, t in model.state_dict().items() if not is_added(n)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def shapes(self) -> dict[str, Tensor]:
        """Its tensors on the meta device, none of them made; numbers that are computed are fp32."""
        return {name: self._sketch(name) for name in self}

    def _sketch(self, name: str) -> Tensor:
        dtype = self._state[name].dtype if self._make(name) is None else torch.float32
        return torch.empty(self._shape(name), dtype=dtype, device="meta")

    def _shape(self, name: str) -> Sequence[int]:
        layer, _, kind = name.rpartition(".")
        module = self._model.get_submodule(layer)
        if isinstance(module, ExpertWeights) and kind in ExpertWeights.MATRICES:
            return module.n * module.f, module.d
        if isinstance(module, Linear) and kind == "weight":
            return module.out_features, module.in_features
        return self._state[name].shape

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        make = self._make(name)
        return self._state[name] if make is None else make()

    def _make(self, name: str) -> Callable[[], Tensor] | None:
        """What computes a tensor, in fp32; None: it is what the model holds."""
        layer, _, kind = name.rpartition(".")
        module = self._model.get_submodule(layer)
        if isinstance(module, ExpertWeights) and kind in ExpertWeights.MATRICES:
            is_held = module.packing is None and kind not in module.lora
            return None if is_held else partial(_merged_stack, module, kind)
        if isinstance(module, Linear) and kind == "weight" and module.lora is not None:
            return partial(merged_weight, module, module.lora)
        if isinstance(module, Linear) and kind == "weight" and module.packing is not None:
            return module.dense
        if isinstance(module, nn.Embedding) and getattr(module, "lora", None) is not None:
            return partial(_merged_embedding, module)
        return None


def _merged_stack(stacks: ExpertWeights, name: str) -> Tensor:
    """(E * f, D); of one expert after another."""
    weight = stacks.dense(name)
    assert weight is not None
    a, b = stacks.factors(name)
    if a is None or b is None:
        return weight.flatten(0, 1)
    return _with_products(weight, a, b, transposed=name == "w2")


def _with_products(
    stack: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, *, transposed: bool
) -> Tensor:
    """(E * f, D): a stack (E, f, D) and the products of a (E, r, in) and b (E, out, r)."""
    out = torch.empty(stack.shape, device=stack.device)
    for e, weight in enumerate(stack):
        product = b[e].float() @ a[e].float()
        out[e] = weight.float() + scaling * (product.T if transposed else product)
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
    for name, parameter in model.named_parameters():
        if adapted_matrix(name) in plan or name in tensors:
            weight = full_tensor(parameter)
            assign(parameter, merged_tensor(model, name, weight, plan, tensors, rows=rows))


def adapted_matrix(name: str) -> str:
    """What a plan calls the matrix whose parameter has this name."""
    return name if ".experts." in name else name.removesuffix(".weight")


@torch.no_grad()
def merged_tensor(
    model: Decoder,
    name: str,
    weight: Tensor,
    plan: Mapping[str, LowRank],
    tensors: Mapping[str, Tensor],
    *,
    rows: int | None = None,
) -> Tensor:
    """What `merge_into` makes of one parameter, whole, in fp32 where it has an adapter.

    Args:
        model: on any device; says what the parameter is.
        name: of the parameter.
        weight: its value in the base.
        plan: as in `merge_into`.
        tensors: as in `merge_into`.
        rows: as in `merge_into`.
    """
    matrix = adapted_matrix(name)
    if name in tensors:
        return grown(tensors[name], len(weight))
    if matrix not in plan:
        return weight
    if ".experts." in name:
        return _stack_of(matrix, plan[matrix], tensors, weight, model)
    is_table = rows is not None and name in model.vocabulary()
    layer = _layer_of(matrix, plan[matrix], tensors, weight[:rows] if is_table else weight)
    is_embedding = matrix in ("wte", "wpe")
    value = _merged_embedding(layer) if is_embedding else merged_weight(layer, plan[matrix])
    return grown(value, len(weight))


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
    count = len(a) // lora.r  # 1 where all share a pair
    a, b = a.view(count, lora.r, -1), b.view(count, -1, lora.r)
    a, b = (factor.expand(stacks.n, -1, -1) for factor in (a, b))
    return _with_products(stack, a, b, lora.scaling, transposed=name.endswith("w2"))


def tensor_sample(tensor: Tensor, rows: int | None = None) -> list[float]:
    """What `base_sample` has of one tensor, whole, of its first `rows`."""
    return _numbers(tensor, rows, ()).tolist()


NUMBERS = 8  # of each tensor
ROUNDING = 2.0**-7  # relative: what bfloat16 may change


@torch.no_grad()
def base_sample(model: Decoder, *, frozen: bool, rows: int | None = None) -> dict[str, list[float]]:
    """Numbers at even distances in each tensor of the base, by its name.

    Every process calls it. Tensors that are not kept as numbers (quantized ones) are left out.

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
        for place, (first, last), (begin, _) in zip(where, block.local, block.full, strict=True):
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

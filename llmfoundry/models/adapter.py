"""Adapters on a decoder: add, initialize, disable, merge, and recognize their base model.

`builders/trainer.py` calls `add_adapter` before blocks are wrapped and sharded, and `init_adapter`
after the base is loaded. Everything except the adapter is frozen. This module decides, by name and
`requires_grad`, which parameters belong to an adapter. `hf/write_folder.py` exports a
`MergedState`; `builders/pretrained.py` merges an adapter into its base with `merge_into`, in fp32.
`base_sample` is saved with an adapter, so that it is never loaded onto other weights of the same
shape.
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
from llmfoundry.models.init import Distribution, grown, sample
from llmfoundry.models.layers import Linear
from llmfoundry.models.low_rank import (
    A_INIT,
    B_INIT,
    MAGNITUDE,
    TOKEN_ROWS,
    A,
    B,
    LowRank,
    merged_weight,
    row_norms,
)
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops.shard_layout import assign, full_rows, full_tensor, local_blocks
from llmfoundry.terminal import columns

BASE = "base.json"
"""In an adapter's folder that we wrote: numbers of the base model, to know it again."""
BASE_ROWS = "base_rows.safetensors"
"""In a checkpoint's adapter folder: the result of `base_token_rows`, if there are any rows."""

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
    """Add adapters to a model, and freeze everything else.

    Args:
        model: on any device, also meta. The new parameters are uninitialized.
        plan: adapter of each matrix, from `plan_adapter` or a peft folder.
        modules_to_save: modules that are fully trained next to the adapter.
        dtype: of the new parameters.

    Raises:
        UserError: a module to save does not exist, or has an adapter as well.
    """
    model.requires_grad_(False)
    names = [name for name, _ in model.named_modules() if name]
    fully_trained = select(modules_to_save, names, "adapter.modules_to_save")
    targets = find_targets(model, split_qkv=False)
    for name, lora in plan.items():
        if any(name == saved or name.startswith(f"{saved}.") for saved in fully_trained):
            raise UserError(
                f"adapter.modules_to_save: {name} has an adapter already; leave it out of one"
            )
        _add(name, targets[name], lora, dtype)
    for name in fully_trained:
        model.get_submodule(name).requires_grad_(True)


def _add(name: str, target: AdapterTarget, lora: LowRank, dtype: torch.dtype) -> None:
    """Register the adapter's parameters, stacked if the weight is stacked."""
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
    if lora.tokens:
        selection = A if target.kind == "embedding" else B
        getattr(module, selection).requires_grad_(False)
    if lora.init == "pissa":
        for key, like in ((A_INIT, A), (B_INIT, B)):
            initial = torch.empty(shapes[like], dtype=dtype, device=device)
            module.register_parameter(key, nn.Parameter(initial, requires_grad=False))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, LowRank]]:
    """Yield the name of each adapted matrix, its module, parameter prefix and adapter."""
    for name, module in model.named_modules():
        lora = getattr(module, "lora", None)
        if isinstance(lora, LowRank):
            yield name, module, "", lora
        elif isinstance(lora, dict):  # of ExpertWeights, by weight name
            for weight, weight_lora in lora.items():
                yield f"{name}.{weight}", module, f"{weight}_", weight_lora


@torch.no_grad()
def init_adapter(model: nn.Module, seed: int) -> None:
    """Initialize the adapters of a model whose base weights are loaded.

    A is uniform in ± 1 / sqrt(in) as in peft, or normal with std 1 / r. B is 0, so that training
    starts from the base model. The values are a function of the seed, the name and the base.
    """
    for name, module, prefix, lora in adapted_layers(model):
        a, b = getattr(module, prefix + A), getattr(module, prefix + B)
        if lora.init == "pissa":
            _init_from_singular_values(module, lora)
        elif lora.tokens:
            _init_token_rows(a, b, lora, is_embedding=isinstance(module, nn.Embedding))
        elif isinstance(module, nn.Embedding):  # as in peft: A is 0 and B is sampled
            assign(a, torch.zeros(a.shape, device=a.device))
            sample(b, Distribution(1.0), seed, f"{name}.{prefix}{B}")
        else:
            std = 1 / lora.r if lora.init == "gaussian" else (3 * a.shape[1]) ** -0.5
            distribution = Distribution(std, uniform=lora.init != "gaussian")
            sample(a, distribution, seed, f"{name}.{prefix}{A}" if not prefix else f"{name}_{A}")
            assign(b, torch.zeros(b.shape, device=b.device))
        if lora.dora:
            assign(getattr(module, MAGNITUDE), row_norms(_FullParameters(module), lora))


def _init_token_rows(a: Tensor, b: Tensor, lora: LowRank, *, is_embedding: bool) -> None:
    """Select the tokens by one factor; the other, their rows' change, is 0."""
    selection, change = (a, b) if is_embedding else (b, a)
    chosen = torch.zeros(selection.shape, device=selection.device)
    numbers = torch.arange(lora.r, device=selection.device)
    ids = torch.tensor(lora.tokens, device=selection.device)
    chosen[(numbers, ids) if is_embedding else (ids, numbers)] = 1
    assign(selection, chosen)
    assign(change, torch.zeros(change.shape, device=change.device))


@torch.no_grad()
def fill_adapter_from(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy full tensors, by name, into parameters that may be sharded. A collective call.

    Rows of tokens (`TOKEN_ROWS`) become the change from the rows of the base.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == TOKEN_ROWS:
            set_token_rows(model.get_submodule(layer), tensor)
        else:
            assign(parameters[name], tensor.to(parameters[name].device))


@torch.no_grad()
def set_token_rows(layer: nn.Module, rows: Tensor) -> None:
    """Set the rows of an adapter's tokens in an embedding or head. A collective call.

    Args:
        layer: adapted layer with `LowRank.tokens`.
        rows: (len(tokens), D), in the order of the tokens.
    """
    lora, weight = layer.lora, layer.weight
    assert isinstance(lora, LowRank) and isinstance(weight, Tensor)
    a, b, is_embedding = layer.lora_A, layer.lora_B, isinstance(layer, nn.Embedding)
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    _init_token_rows(a, b, lora, is_embedding=is_embedding)
    change = rows.to(weight.device).float() - full_rows(weight, lora.tokens).float()
    if is_embedding:
        assign(b, change.T)
    else:
        assign(a, change)


def base_token_rows(model: nn.Module) -> dict[str, Tensor]:
    """Return the base's rows (len(tokens), D) of each adapter of tokens, by name; collective."""
    return {
        name: full_rows(module.weight, lora.tokens).float().cpu()  # type: ignore[arg-type]
        for name, module, _, lora in adapted_layers(model)
        if lora.tokens
    }


class _FullParameters:
    """View of a layer whose sharded parameters are gathered when they are read."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Tensor:
        return full_tensor(getattr(self._layer, name))

    def dense(self) -> Tensor:
        """Return the frozen weight (out, in)."""
        return full_tensor(self._layer.dense())  # type: ignore[operator]


def _init_from_singular_values(layer: nn.Module, lora: LowRank) -> None:
    """PiSSA: split the r largest singular values of each part between A and B."""
    weight = full_tensor(layer.dense())  # type: ignore[operator]
    a_rows, b_rows = [], []
    for begin, end in lora.parts:
        u, s, v = torch.linalg.svd(weight[begin:end].float(), full_matrices=False)
        root = (s[: lora.r] / lora.scaling).sqrt()
        a_rows.append(root[:, None] * v[: lora.r])
        b_rows.append(u[:, : lora.r] * root)
    for key, initial_key, rows in ((A, A_INIT, a_rows), (B, B_INIT, b_rows)):
        value = torch.cat(rows)
        assign(getattr(layer, key), value)
        assign(getattr(layer, initial_key), value)


def is_added(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return _ADDED.search(name) is not None


def plain_name(name: str) -> str:
    """Return the name of a base parameter without peft's wrappers (`base_layer`)."""
    return name if is_added(name) else re.sub(r"(\.base_layer)+\.", ".", name)


def saved_names(model: nn.Module) -> list[str]:
    """Return the parameters in an adapter's checkpoint: trained ones, and PiSSA's initial pair."""
    parameters = model.named_parameters()
    return [name for name, p in parameters if p.requires_grad or is_added(name)]


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Disable all adapters within a context: the reference model of preference tuning.

    Raises:
        UserError: base parameters are trained too, so that the base model no longer exists.
    """
    trained = [n for n, p in model.named_parameters() if p.requires_grad and not is_added(n)]
    if trained:
        raise UserError(
            f"adapter.modules_to_save: {trained[0]} is trained, so that the base model is not"
            " available; remove it, or write preference.reference: precompute"
        )
    loras = [lora for _, _, _, lora in adapted_layers(model)]
    peft_layers = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    _switch(loras, peft_layers, on=False)
    try:
        yield
    finally:
        _switch(loras, peft_layers, on=True)


def _switch(loras: list[LowRank], peft_layers: list[nn.Module], *, on: bool) -> None:
    for lora in loras:
        lora.on = on
    for layer in peft_layers:  # peft's own method would also change requires_grad
        layer._disable_adapters = not on  # type: ignore[assignment]


def freeze_parts(model: nn.Module, patterns: Sequence[str], key: str = "freeze") -> list[str]:
    """Freeze the parameters that the patterns match; return their names.

    Raises:
        UserError: a pattern matches nothing, or every parameter is frozen.
    """
    parameters = dict(model.named_parameters())
    frozen = select(patterns, list(parameters), key)
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise UserError(f"{key}: matches every parameter; leave one to train")
    return frozen


def adapter_table(model: nn.Module) -> list[str]:
    """Return lines for the user: number, rank and parameters of each kind of adapted matrix."""
    totals: dict[tuple[str, int], list[int]] = {}  # layers, matrices, parameters
    for name, module, prefix, lora in adapted_layers(model):
        matrix = re.sub(r"^blocks\.\d+\.", "", name)
        keys = [prefix + key for key in (A, B, MAGNITUDE) if hasattr(module, prefix + key)]
        size = sum(getattr(module, key).numel() for key in keys)
        experts = module.n if isinstance(module, ExpertWeights) else 1
        total = totals.setdefault((matrix, lora.r), [0, 0, 0])
        for i, count in enumerate((1, experts, size)):
            total[i] += count
    rows = [
        (matrix, f"{layers:,}", f"{matrices:,}", str(rank), f"{size:,}")
        for (matrix, rank), (layers, matrices, size) in totals.items()
    ]
    lines = columns(("adapter on", "layers", "matrices", "rank", "parameters"), rows)
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    for name, size in trained.items():
        if not is_added(name):
            lines.append(f"{name}  fully trained: {size:,} parameters")
    n_all = sum(p.numel() for p in model.parameters())
    n_trained = sum(trained.values())
    percent = 100 * n_trained / n_all
    lines.append(f"trained: {n_trained:,} of {n_all:,} parameters ({percent:.2g} %)")
    return lines


class MergedState(Mapping[str, Tensor]):
    """State dict of the plain decoder that equals an adapted one, computed when it is read.

    Weights without an adapter are returned unchanged, quantized weights dequantized.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._state = {n: t for n, t in model.state_dict().items() if not is_added(n)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def shapes(self) -> dict[str, Tensor]:
        """Return empty tensors of the same shapes on the meta device, without computing any."""
        return {name: self._empty_like(name) for name in self}

    def _empty_like(self, name: str) -> Tensor:
        """Return an empty tensor like the result of reading `name`; merged weights are fp32."""
        dtype = self._state[name].dtype if self._compute(name) is None else torch.float32
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
        compute = self._compute(name)
        return self._state[name] if compute is None else compute()

    def _compute(self, name: str) -> Callable[[], Tensor] | None:
        """Return the function that computes a tensor in fp32; None: the model's own tensor."""
        layer, _, kind = name.rpartition(".")
        module = self._model.get_submodule(layer)
        if isinstance(module, ExpertWeights) and kind in ExpertWeights.MATRICES:
            is_plain = module.packing is None and kind not in module.lora
            return None if is_plain else partial(_merged_stack, module, kind)
        if isinstance(module, Linear) and kind == "weight" and module.lora is not None:
            return partial(merged_weight, module, module.lora)
        if isinstance(module, Linear) and kind == "weight" and module.packing is not None:
            return module.dense
        if isinstance(module, nn.Embedding) and getattr(module, "lora", None) is not None:
            return partial(_merged_embedding, module)
        return None


def _merged_stack(stacks: ExpertWeights, name: str) -> Tensor:
    """Return the merged weight `name` of all experts, (E * f, D)."""
    weight = stacks.dense(name)
    assert weight is not None
    a, b = stacks.factors(name)
    if a is None or b is None:
        return weight.flatten(0, 1)
    return _with_products(weight, a, b, transposed=name == "w2")


def _with_products(
    stack: Tensor, a: Tensor, b: Tensor, scaling: float = 1.0, *, transposed: bool
) -> Tensor:
    """Add b a to each expert of a stack.

    Args:
        stack: (E, f, D).
        a: (E, r, in).
        b: (E, out, r).
        scaling: factor of b a.
        transposed: the stack holds transposed matrices (w2).

    Returns:
        (E * f, D) in fp32.
    """
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
    """Merge an adapter into a model's weights, which may be sharded. A collective call.

    Args:
        model: the base model with its weights.
        plan: the adapter of each matrix.
        tensors: full tensors of the adapter and of fully trained modules, by name.
        rows: rows of embedding and head in the adapter's run, if the model has more now. Additional
            rows become the mean of the merged ones.
    """
    all_stacked = all_stacked_rows(model)
    for name, parameter in model.named_parameters():
        if adapted_matrix(name) in plan or name in tensors:
            stacked = all_stacked.get(name, ())
            weight = full_tensor(parameter, stacked)
            merged = merged_tensor(model, name, weight, plan, tensors, rows=rows)
            assign(parameter, merged, stacked)


def adapted_matrix(name: str) -> str:
    """Return the name of a parameter's matrix in an adapter plan."""
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
    """Return the merged value of one parameter, in fp32 if it has an adapter.

    Args:
        model: on any device; gives the type and shape of the parameter.
        name: name of the parameter.
        weight: its full value in the base model.
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
    base_weight = weight
    if rows is not None and name in model.vocabulary():
        base_weight = weight[:rows]
    token_rows = tensors.get(f"{matrix}.{TOKEN_ROWS}")
    if token_rows is not None:
        value = base_weight.float().clone()
        value[list(plan[matrix].tokens)] = token_rows.to(value)
        return grown(value, len(weight))
    layer = _stand_in_layer(matrix, plan[matrix], tensors, base_weight)
    is_embedding = matrix in ("wte", "wpe")
    value = _merged_embedding(layer) if is_embedding else merged_weight(layer, plan[matrix])
    return grown(value, len(weight))


def _stand_in_layer(
    name: str, lora: LowRank, tensors: Mapping[str, Tensor], weight: Tensor
) -> nn.Module:
    """Return an object with the attributes of an adapted layer, for `merged_weight`."""
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
    """Return the merged stack of a weight of all experts, (E * f, D)."""
    module = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(module, ExpertWeights)
    stack = weight.view(module.n, module.f, module.d)
    a = tensors[f"{name}_lora_A"].to(weight.device)
    b = tensors[f"{name}_lora_B"].to(weight.device)
    count = len(a) // lora.r  # 1 if all experts share a pair
    a = a.view(count, lora.r, -1).expand(module.n, -1, -1)
    b = b.view(count, -1, lora.r).expand(module.n, -1, -1)
    return _with_products(stack, a, b, lora.scaling, transposed=name.endswith("w2"))


def tensor_sample(tensor: Tensor, rows: int | None = None) -> list[float]:
    """Return what `base_sample` contains for one full tensor, of its first `rows` rows."""
    return _sample_values(tensor, rows, ()).tolist()


SAMPLES = 8  # per tensor
ROUNDING = 2.0**-7  # relative tolerance: bfloat16 rounding


@torch.no_grad()
def base_sample(model: Decoder, *, frozen: bool, rows: int | None = None) -> dict[str, list[float]]:
    """Return evenly spaced elements of each tensor of the base, by name. A collective call.

    Quantized tensors are left out.

    Args:
        model: with its weights.
        frozen: only frozen tensors.
        rows: number of rows of embedding and head to sample from; None: all.
    """
    tables = model.vocabulary() if rows is not None else ()
    stacked = all_stacked_rows(model)
    names, values = list[str](), list[Tensor]()
    sharded: dict[Any, list[int]] = {}  # indices of tensors, by how their samples are summed
    for name, parameter in model.named_parameters():
        if is_added(name) or (frozen and parameter.requires_grad):
            continue
        if not parameter.is_floating_point():
            continue
        if isinstance(parameter, DTensor):
            # each rank has the samples in its shard, and replicas have the same ones
            sums = [Replicate() if p.is_replicate() else Partial() for p in parameter.placements]
            sharded.setdefault((parameter.device_mesh, tuple(sums)), []).append(len(names))
        names.append(name)
        table_rows = rows if name in tables else None
        values.append(_sample_values(parameter, table_rows, stacked.get(name, ())))
    if not values:
        return {}
    samples = torch.stack(values)
    for (mesh, sums), indices in sharded.items():
        samples[indices] = DTensor.from_local(samples[indices], mesh, sums).full_tensor()
    return dict(zip(names, samples.tolist(), strict=True))


def _sample_values(parameter: Tensor, rows: int | None, stacked: Sequence[int]) -> Tensor:
    """Return (SAMPLES,) elements in fp64. Elements of other ranks' shards are 0."""
    size = parameter.numel() if rows is None else parameter[:rows].numel()
    flat_indices = torch.linspace(0, size - 1, SAMPLES, device=parameter.device).long()
    if not isinstance(parameter, DTensor):
        return parameter.detach().flatten()[flat_indices].double()
    local = parameter.to_local().detach()
    values = torch.zeros(SAMPLES, dtype=torch.float64, device=local.device)
    full_indices = torch.unravel_index(flat_indices, parameter.shape)  # one tensor per dimension
    for block in local_blocks(parameter, stacked):
        # translate full indices to indices of the local shard, and mask those outside the block
        is_local, local_indices = torch.ones_like(flat_indices, dtype=torch.bool), list[Tensor]()
        ranges = zip(full_indices, block.local, block.full, strict=True)
        for full_index, (first, last), (begin, _) in ranges:
            local_index = full_index - begin + first
            is_local &= (local_index >= first) & (local_index < last)
            local_indices.append(local_index.clamp(first, last - 1))
        values = torch.where(is_local, local[tuple(local_indices)].double(), values)
    return values


def base_difference(then: Mapping[str, list[float]], now: Mapping[str, list[float]]) -> str | None:
    """Return which tensor differs between two samples of a base; None: all common ones agree.

    A class of transformers and the decoder have no names in common, and nothing is compared.
    """
    if isinstance(then, dict) and then and now and _is_class(then) != _is_class(now):
        return None
    if not isinstance(then, dict) or (then and not then.keys() & now.keys()):
        return "it has no tensor of this one's"
    for name in sorted(then.keys() & now.keys()):
        pairs = zip(then[name], now[name], strict=False)
        if any(abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in pairs):
            return f"{name} differs"
    return None


def _is_class(sample: Mapping[str, list[float]]) -> bool:
    """Return whether a sample is of a class of transformers."""
    return all(name.startswith("hf.") for name in sample)

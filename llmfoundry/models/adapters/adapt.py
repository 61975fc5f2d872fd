"""Adapters on a decoder: added on the meta device, filled once the base has its weights.

`builders/trainer.py` calls `add_adapter` before blocks are wrapped and sharded, and `init_adapter`
after the base was loaded. All but the adapter is frozen. What is trained, saved and switched off is
told apart here, by name and by `requires_grad`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.models.adapters.names import select
from llmfoundry.models.adapters.plan import AdapterTarget, find_targets
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.init import Distribution, draw
from llmfoundry.models.linear import whole
from llmfoundry.models.low_rank import (
    A_INIT,
    B_INIT,
    MAGNITUDE,
    A,
    B,
    LowRank,
    row_norms,
)
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.ops.shard_layout import assign
from llmfoundry.terminal import columns

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
            module.register_parameter(prefix + key, nn.Parameter(start, requires_grad=False))


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
            _start_from_singular_values(module, prefix, lora)
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
        return whole(getattr(self._layer, name))

    def dense(self) -> Tensor:
        """The frozen weight (out, in)."""
        return whole(self._layer.dense())  # type: ignore[operator]


def _start_from_singular_values(module: nn.Module, prefix: str, lora: LowRank) -> None:
    """PiSSA: the r largest singular values of each matrix, their square roots on either side."""
    a_rows, b_rows = [], []
    for weight in _matrices(module, prefix, lora):
        u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
        root = (s[: lora.r] / lora.scaling).sqrt()
        a_rows.append(root[:, None] * v[: lora.r])
        b_rows.append(u[:, : lora.r] * root)
    for key, start, rows in ((A, A_INIT, a_rows), (B, B_INIT, b_rows)):
        value = torch.cat(rows)
        assign(getattr(module, prefix + key), value)
        assign(getattr(module, prefix + start), value)


def _matrices(module: nn.Module, prefix: str, lora: LowRank) -> Iterator[Tensor]:
    """The frozen matrices (out, in) that have a pair each: parts, or experts."""
    if isinstance(module, ExpertWeights):
        stack = module.dense(prefix[:-1])
        assert stack is not None
        stack = whole(stack)
        yield from stack.transpose(1, 2) if prefix == "w2_" else stack
    else:
        weight = whole(module.dense())  # type: ignore[operator]
        yield from (weight[begin:end] for begin, end in lora.parts)


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

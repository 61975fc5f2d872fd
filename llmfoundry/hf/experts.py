"""Names and shapes of routers and experts in transformers' architectures, both ways.

Ours are DBRX's and megablocks': expert after expert in one matrix
(`models.moe.ExpertWeights`). Others have a tensor for each expert, or gates and up projections in
one. A dense gated layer goes out as a mixture of one expert with a router of zeros, since any gives
that expert all of the weight; and a mixture of one comes back as that layer. Rows are put in order,
never computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import is_mixture
from llmfoundry.recipe.architecture.model import ModelConfig

Named = Iterator[tuple[str, Tensor]]
Stacked = tuple[Tensor, Tensor | None, Tensor]  # w1, v1 and w2, each (E, f, D)
Get = Callable[[str], Tensor]
Read = Callable[[], Tensor]
Reads = tuple[Read, Read | None, Read]  # the same, read when called
DENSE = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class ExpertNames:
    """Where an architecture keeps a layer's experts; `{i}` is the block's number.

    Attributes:
        router: (E, D).
        gate: with `{e}`, the expert's number: (f, D). The same as `up`: (E, 2 f, D), the gates'
            rows before the up projections'. Else as ours: (E * f, D). Of MLPs: the up projection.
        up: as `gate`; MLPs have none.
        down: with `{e}` (D, f); beside a joint `gate` (E, D, f); else as ours, (E * f, D).
        shared: the expert that all tokens visit: gate above up projection (2 h, D), and (D, h).
    """

    router: str
    gate: str
    up: str
    down: str
    shared: tuple[str, str] | None = None

    def of(self, block: int) -> ExpertNames:
        """The same with the block's number put in."""
        put = {name: getattr(self, name) for name in ("router", "gate", "up", "down")}
        put = {name: value.replace("{i}", str(block)) for name, value in put.items()}
        shared = self.shared and (
            self.shared[0].format(i=block),
            self.shared[1].format(i=block),
        )
        return replace(self, **put, shared=shared)

    @property
    def form(self) -> str:
        """A key of `FORMS`."""
        if "{e}" in self.gate:
            return "each"
        return "joint" if self.gate == self.up else "stacked"


def present(choices: tuple[ExpertNames, ...], names: Collection[str]) -> ExpertNames:
    """The choice that a file with these names follows; the first if it is none."""
    files = (c for c in choices if c.of(0).gate.format(e=0) in names)
    return next(files, choices[0])


def experts_to_theirs(names: ExpertNames, config: ModelConfig, ours: Mapping[str, Tensor]) -> Named:
    """Their names and tensors, block by block."""
    like, count = ours["wte.weight"], _count(config)
    for block in range(config.n_layers):
        here, at = names.of(block), f"blocks.{block}.ffn."
        if is_mixture(config):
            yield here.router, ours[f"{at}router.weight"]
            w1, v1, w2 = (ours.get(f"{at}experts.{name}") for name in DENSE)
        else:
            yield here.router, like.new_zeros(1, config.d_model)
            w1, v1, w2 = (ours[f"{at}{name}.weight"] for name in DENSE.values())
            w2 = w2.T
        assert w1 is not None and w2 is not None
        gated = None if v1 is None else v1.unflatten(0, (count, -1))
        stacks = w1.unflatten(0, (count, -1)), gated, w2.unflatten(0, (count, -1))
        yield from FORMS[names.form][0](here, stacks)
        if here.shared and _has_shared(config):
            gate, up, down = (ours[f"{at}shared.{name}.weight"] for name in DENSE.values())
            yield here.shared[0], torch.cat([gate, up])
            yield here.shared[1], down


def experts_to_ours(names: ExpertNames, config: ModelConfig, get: Get) -> Named:
    """Our state of the feed-forward layers, one at a time; `get` reads one of their tensors.

    Raises:
        UserError: a tensor is missing or has another shape than config.json makes it.
    """
    for block in range(config.n_layers):
        here, at = names.of(block), f"blocks.{block}.ffn."
        stacks = zip(DENSE, FORMS[names.form][1](here, config, get), strict=True)
        for name, read in ((name, read) for name, read in stacks if read is not None):
            yield from _feed_forward(name, read(), at, config)
        router = get(here.router)
        if is_mixture(config):  # of one expert any router gives it all of the weight
            yield f"{at}router.weight", router
        if here.shared and _has_shared(config):
            hidden = config.ffn_config.shared_expert_hidden_size
            both = _shaped(here.shared[0], (2 * (hidden or 0), config.d_model), get)
            parts = (*both.chunk(2), get(here.shared[1]))
            for name, part in zip(DENSE.values(), parts, strict=True):
                yield f"{at}shared.{name}.weight", part.contiguous()


def _feed_forward(name: str, stack: Tensor, at: str, config: ModelConfig) -> Named:
    """Ours of one of `DENSE` (E, f, D): of a mixture's experts, or of the one that is the layer."""
    whole = stack.flatten(0, 1)
    if not is_mixture(config):
        yield f"{at}{DENSE[name]}.weight", whole.T.contiguous() if name == "w2" else whole
        return
    yield f"{at}experts.{name}", whole
    if not config.no_bias:  # which their experts do not have
        wide = stack.shape[0] * stack.shape[2 if name == "w2" else 1]
        yield f"{at}experts.{name}_bias", whole.new_zeros(wide)


def _count(config: ModelConfig) -> int:
    return config.ffn_config.moe_num_experts or 1


def _has_shared(config: ModelConfig) -> bool:
    return config.ffn_config.shared_expert_hidden_size is not None


def _write_stacked(here: ExpertNames, stacks: Stacked) -> Named:
    for name, stack in zip((here.gate, here.up, here.down), stacks, strict=True):
        if stack is not None:
            yield name, stack.flatten(0, 1)


def _write_each(here: ExpertNames, stacks: Stacked) -> Named:
    w1, v1, w2 = stacks
    assert v1 is not None
    for e, (gate, up, down) in enumerate(zip(w1, v1, w2, strict=True)):
        yield here.gate.format(e=e), gate
        yield here.up.format(e=e), up
        yield here.down.format(e=e), down.T


def _write_joint(here: ExpertNames, stacks: Stacked) -> Named:
    w1, v1, w2 = stacks
    assert v1 is not None
    yield here.gate, torch.cat([w1, v1], dim=1)
    yield here.down, w2.transpose(1, 2)


def _read_stacked(here: ExpertNames, config: ModelConfig, get: Get) -> Reads:
    count, hidden, width = _shape(config)

    def read(name: str) -> Tensor:
        return _shaped(name, (count * hidden, width), get).unflatten(0, (count, hidden))

    gated = not is_mixture(config) or config.ffn_config.mlp_type == "glu"
    up = (lambda: read(here.up)) if gated else None
    return lambda: read(here.gate), up, lambda: read(here.down)


def _read_each(here: ExpertNames, config: ModelConfig, get: Get) -> Reads:
    count, hidden, width = _shape(config)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        first = _shaped(name.format(e=0), shape, get)
        stack = first.new_empty(count, *shape)  # filled one by one: all mapped together are twice
        for e in range(count):
            stack[e] = _shaped(name.format(e=e), shape, get)
        return stack

    return (
        lambda: read(here.gate, (hidden, width)),
        lambda: read(here.up, (hidden, width)),
        lambda: read(here.down, (width, hidden)).transpose(1, 2),
    )


def _read_joint(here: ExpertNames, config: ModelConfig, get: Get) -> Reads:
    count, hidden, width = _shape(config)

    def half(index: int) -> Tensor:
        return _shaped(here.gate, (count, 2 * hidden, width), get).chunk(2, dim=1)[index]

    return (
        lambda: half(0),
        lambda: half(1),
        lambda: _shaped(here.down, (count, width, hidden), get).transpose(1, 2),
    )


def _shape(config: ModelConfig) -> tuple[int, int, int]:
    assert config.ffn_config.ffn_hidden_size is not None, "the recipe was not filled"
    return _count(config), config.ffn_config.ffn_hidden_size, config.d_model


def _shaped(name: str, shape: tuple[int, ...], get: Get) -> Tensor:
    tensor = get(name)
    if tensor.shape != shape:
        raise UserError(
            f"config.json: makes {name} {shape}, but the file's tensor is {tuple(tensor.shape)};"
            " the two belong to different models"
        )
    return tensor


FORMS: dict[
    str,
    tuple[
        Callable[[ExpertNames, Stacked], Named],
        Callable[[ExpertNames, ModelConfig, Get], Reads],
    ],
] = {
    "stacked": (_write_stacked, _read_stacked),
    "each": (_write_each, _read_each),
    "joint": (_write_joint, _read_joint),
}

_STACKS = "transformer.blocks.{i}.ffn.experts.mlp."
DBRX = ExpertNames(
    "transformer.blocks.{i}.ffn.router.layer.weight",
    gate=f"{_STACKS}w1",
    up=f"{_STACKS}v1",
    down=f"{_STACKS}w2",
)
_JOINT = "model.layers.{i}.mlp.experts.gate_up_proj"
_JOINT_EXPERTS = ExpertNames(  # as transformers 5 holds them, and saves them if told to
    "model.layers.{i}.mlp.gate.weight",
    gate=_JOINT,
    up=_JOINT,
    down="model.layers.{i}.mlp.experts.down_proj",
)


def _each_named(module: str, gate: str, up: str, down: str) -> tuple[ExpertNames, ...]:
    """Experts with a tensor each, or joined as transformers 5 holds them."""
    expert = f"model.layers.{{i}}.{module}.experts.{{e}}."
    named = ExpertNames(
        f"model.layers.{{i}}.{module}.gate.weight",
        gate=f"{expert}{gate}.weight",
        up=f"{expert}{up}.weight",
        down=f"{expert}{down}.weight",
    )
    return named, _JOINT_EXPERTS


def _granite_experts() -> tuple[ExpertNames, ...]:
    moe, shared = "model.layers.{i}.block_sparse_moe.", "model.layers.{i}.shared_mlp."
    both = (f"{shared}input_linear.weight", f"{shared}output_linear.weight")
    old, new = f"{moe}input_linear.weight", f"{moe}experts.gate_up_proj"
    return (
        ExpertNames(
            f"{moe}router.layer.weight", old, old, f"{moe}output_linear.weight", shared=both
        ),
        ExpertNames(f"{moe}router.weight", new, new, f"{moe}experts.down_proj", shared=both),
    )


QWEN = _each_named("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = _each_named("block_sparse_moe", "w1", "w3", "w2")
GRANITE = _granite_experts()

"""Names and shapes of routers and experts in transformers' architectures, for both directions.

The decoder stores all experts of a layer in one matrix, as DBRX and megablocks do
(`models.moe.ExpertWeights`). Other architectures have one tensor for each expert, or join gate and
up projections. A dense gated layer is exported as a mixture of one expert with a zero router, since
any router gives the only expert the full weight. A mixture of one expert is imported as a dense
layer. Rows are reordered; values never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import is_mixture
from llmfoundry.models.lazy_tensors import Make, Read
from llmfoundry.recipe.model import ResolvedModelConfig

Made = Iterator[tuple[str, Make]]
Stack = Make  # of w1, v1 or w2, (E, f, D)
Stacks = tuple[Stack, Stack | None, Stack]
BALANCE = "e_score_correction_bias"  # of a router, in fp32 whatever the dtype of a file
DENSE = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of a layer's experts; `{i}` is the index of the block.

    Attributes:
        router: (E, D).
        gate: with `{e}`, the index of the expert: (f, D). If equal to `up`: (E, 2 f, D), with the
            rows of the gate first. Otherwise as ours: (E * f, D). For MLPs: the up projection.
        up: as `gate`; MLPs have none.
        down: with `{e}`: (D, f). With a joint `gate`: (E, D, f). Otherwise as ours: (E * f, D).
        shared: names of the shared expert: gate and up projection (2 h, D), and down (D, h); or
            gate, up and down.
        balance: name of the balancing bias (E,), in fp32; "": there is none.
        is_interleaved: gpt-oss: the joint gate is (E, D, 2 f), of which every second column is the
            gate's, down is (E, f, D), and router and experts have biases.
    """

    router: str
    gate: str
    up: str
    down: str
    shared: tuple[str, ...] = ()
    balance: str = ""
    is_interleaved: bool = False

    def of(self, block: int) -> ExpertNames:
        """Return the names for one block."""
        put = {name: getattr(self, name) for name in ("router", "gate", "up", "down", "balance")}
        put = {name: value.replace("{i}", str(block)) for name, value in put.items()}
        shared = tuple(name.format(i=block) for name in self.shared)
        return replace(self, **put, shared=shared)

    def biases(self, config: ResolvedModelConfig) -> list[str]:
        """Return the names of the biases of the experts of all blocks."""
        if not self.is_interleaved:
            return []
        blocks = map(self.of, range(config.n_layers))
        return [_bias(name) for here in blocks for name in (here.gate, here.down)]

    @property
    def form(self) -> str:
        """Return the layout of the experts, a key of `FORMS`."""
        if self.is_interleaved:
            return "interleaved"
        if "{e}" in self.gate:
            return "each"
        return "joint" if self.gate == self.up else "stacked"


def present(
    choices: tuple[ExpertNames, ...], names: Collection[str], config: ResolvedModelConfig
) -> ExpertNames:
    """Return the naming that a file with these names uses; the first one if none matches."""
    first = blocks_with_experts(config)[0]
    files = (c for c in choices if c.of(first).gate.format(e=0) in names)
    return next(files, choices[0])


def blocks_with_experts(config: ResolvedModelConfig) -> range:
    """Return the indices of the blocks that a naming describes."""
    return range(config.ffn_config.first_k_dense_replace or 0, config.n_layers)


def experts_to_theirs(
    names: ExpertNames, config: ResolvedModelConfig, ours: Collection[str]
) -> Made:
    """Yield each HF name and the function that makes its tensor of ours, block by block.

    `ours` are the names of our tensors.
    """
    for block in blocks_with_experts(config):
        here, at = names.of(block), f"blocks.{block}.ffn."
        if is_mixture(config):
            yield here.router, _one(f"{at}router.weight")
            if here.balance:
                yield here.balance, _balance(f"{at}router.", config)
            if here.is_interleaved:
                yield from _biases_to_theirs(here, at, config, ours)
        else:
            yield here.router, lambda read: torch.zeros(1, config.d_model)
        w1, v1, w2 = (_our_stack(name, at, config) for name in DENSE)
        gated = v1 if not is_mixture(config) or f"{at}experts.v1" in ours else None
        yield from FORMS[names.form][0](here, (w1, gated, w2), _count(config))
        if here.shared and _has_shared(config):
            parts = [_one(f"{at}shared.{name}.weight") for name in DENSE.values()]
            if len(here.shared) < len(parts):
                parts = [_joined(parts[:2], 0), parts[2]]
            yield from zip(here.shared, parts, strict=True)


def experts_to_ours(names: ExpertNames, config: ResolvedModelConfig, sketch: Read) -> Made:
    """Yield each of our names and the function that makes its tensor of HF tensors.

    The function raises a UserError if an HF tensor has the wrong shape. `sketch` raises one if the
    file has no such tensor.
    """
    for block in blocks_with_experts(config):
        here, at = names.of(block), f"blocks.{block}.ffn."
        stacks = zip(DENSE, FORMS[names.form][1](here, config), strict=True)
        for name, stack in ((name, stack) for name, stack in stacks if stack is not None):
            yield from _feed_forward(name, stack, at, config, has_biases=here.is_interleaved)
        if is_mixture(config):
            yield f"{at}router.weight", _one(here.router)
            if here.balance:
                yield from _balance_to_ours(here.balance, f"{at}router.", config)
            if here.is_interleaved:
                yield from _biases_to_ours(here, at, config, sketch)
        else:
            sketch(here.router)  # of one expert any router gives it all of the weight
        if here.shared and _has_shared(config):
            parts = [_one(name) for name in here.shared]
            if len(parts) < len(DENSE):
                hidden = config.ffn_config.shared_expert_hidden_size
                both = _theirs(here.shared[0], (2 * (hidden or 0), config.d_model))
                parts = [_half(both, 0, 0), _half(both, 1, 0), parts[1]]
            for name, part in zip(DENSE.values(), parts, strict=True):
                yield f"{at}shared.{name}.weight", _then(Tensor.contiguous, part)


def _balance(router: str, config: ResolvedModelConfig) -> Make:
    """Return the function that makes the balancing bias (E,) of our two buffers."""
    rate = config.ffn_config.moe_bias_update_rate
    return lambda read: (
        rate * read(f"{router}bias_steps") + read(f"{router}bias_start").view(torch.float32)
    )


def _balance_to_ours(name: str, router: str, config: ResolvedModelConfig) -> Made:
    """Yield our buffers of a balancing bias: whole steps, and the exact rest."""
    rate = config.ffn_config.moe_bias_update_rate
    bias = _theirs(name, (_count(config),))

    def steps(read: Read) -> Tensor:
        return (bias(read).float() / rate).round().to(torch.int32)

    yield f"{router}bias_steps", steps
    yield (
        f"{router}bias_start",
        lambda read: (bias(read).float() - rate * steps(read)).view(torch.int32),
    )


def _feed_forward(
    name: str, stack: Stack, at: str, config: ResolvedModelConfig, *, has_biases: bool
) -> Made:
    """Yield our tensors of one projection (E, f, D): of the experts, or of the dense layer."""
    rows = _then(_flat, stack)
    if not is_mixture(config):
        turned = _then(lambda w2: w2.T.contiguous(), rows)
        yield f"{at}{DENSE[name]}.weight", turned if name == "w2" else rows
        return
    yield f"{at}experts.{name}", rows
    if not (config.no_bias or has_biases):  # which their experts do not have
        hidden, width = _shape(config)[1:]
        wide = _count(config) * (width if name == "w2" else hidden)
        yield f"{at}experts.{name}_bias", lambda read: torch.zeros(wide)


def _our_stack(name: str, at: str, config: ResolvedModelConfig) -> Stack:
    """Return one projection (E, f, D) of our experts, or of our dense layer as a single expert."""
    count = _count(config)
    if is_mixture(config):
        return _then(lambda w: w.unflatten(0, (count, -1)), _one(f"{at}experts.{name}"))
    weight = _one(f"{at}{DENSE[name]}.weight")
    return _then(lambda w: (w.T if name == "w2" else w).unflatten(0, (count, -1)), weight)


def _one(source: str) -> Make:
    return lambda read: read(source)


def _then(change: Callable[[Tensor], Tensor], make: Make) -> Make:
    return lambda read: change(make(read))


def _joined(parts: Sequence[Make], dim: int) -> Make:
    return lambda read: torch.cat([part(read) for part in parts], dim)


def _half(make: Make, index: int, dim: int) -> Make:
    return _then(lambda both: both.chunk(2, dim)[index], make)


def _flat(stack: Tensor) -> Tensor:
    return stack.flatten(0, 1)


def _count(config: ResolvedModelConfig) -> int:
    return config.ffn_config.moe_num_experts or 1


def _has_shared(config: ResolvedModelConfig) -> bool:
    return config.ffn_config.shared_expert_hidden_size is not None


def _write_stacked(here: ExpertNames, stacks: Stacks, count: int) -> Made:
    for name, stack in zip((here.gate, here.up, here.down), stacks, strict=True):
        if stack is not None:
            yield name, _then(_flat, stack)


def _write_each(here: ExpertNames, stacks: Stacks, count: int) -> Made:
    w1, v1, w2 = stacks
    assert v1 is not None
    for e in range(count):
        yield here.gate.format(e=e), _then(itemgetter(e), w1)
        yield here.up.format(e=e), _then(itemgetter(e), v1)
        yield here.down.format(e=e), _then(lambda one: one.T, _then(itemgetter(e), w2))


def _write_joint(here: ExpertNames, stacks: Stacks, count: int) -> Made:
    w1, v1, w2 = stacks
    assert v1 is not None
    yield here.gate, _joined([w1, v1], 1)
    yield here.down, _then(lambda down: down.transpose(1, 2), w2)


def _write_interleaved(here: ExpertNames, stacks: Stacks, count: int) -> Made:
    w1, v1, w2 = stacks
    assert v1 is not None

    def joint(read: Read) -> Tensor:
        both = torch.stack([w1(read), v1(read)], 2)  # (E, f, 2, D)
        return both.flatten(1, 2).transpose(1, 2)

    yield here.gate, joint
    yield here.down, w2


def _biases_to_theirs(
    here: ExpertNames, at: str, config: ResolvedModelConfig, ours: Collection[str]
) -> Made:
    """Yield the biases of router and experts; a missing one of ours is zero."""
    count, hidden, width = _shape(config)

    def bias(name: str, columns: int) -> Make:
        source = f"{at}{name}"
        stacked = _one(source) if source in ours else lambda read: torch.zeros(count * columns)
        return _then(lambda values: values.view(count, columns), stacked)

    gate, up = bias("experts.w1_bias", hidden), bias("experts.v1_bias", hidden)
    yield _bias(here.router), _then(Tensor.flatten, bias("router.bias", 1))
    yield _bias(here.gate), lambda read: torch.stack([gate(read), up(read)], 2).flatten(1, 2)
    yield _bias(here.down), bias("experts.w2_bias", width)


def _biases_to_ours(here: ExpertNames, at: str, config: ResolvedModelConfig, sketch: Read) -> Made:
    """Yield our biases of router and experts; with no_bias, those of the experts are all zero."""
    count, hidden, width = _shape(config)
    yield f"{at}router.bias", _theirs(_bias(here.router), (count,))
    both = _theirs(_bias(here.gate), (count, 2 * hidden))
    down = _theirs(_bias(here.down), (count, width))
    if config.no_bias:
        both(sketch)
        down(sketch)
        return
    yield f"{at}experts.w1_bias", _then(lambda values: values[:, ::2].flatten(), both)
    yield f"{at}experts.v1_bias", _then(lambda values: values[:, 1::2].flatten(), both)
    yield f"{at}experts.w2_bias", _then(Tensor.flatten, down)


def _bias(weight: str) -> str:
    """Return the name of the bias of a router or of stacked experts."""
    layer = weight.removesuffix("weight")
    return f"{layer}bias" if layer.endswith(".") else f"{layer}_bias"


def _read_stacked(here: ExpertNames, config: ResolvedModelConfig) -> Stacks:
    count, hidden, width = _shape(config)

    def stack(name: str) -> Stack:
        rows_in_file = _theirs(name, (count * hidden, width))
        return _then(lambda rows: rows.unflatten(0, (count, hidden)), rows_in_file)

    gated = not is_mixture(config) or config.ffn_config.mlp_type == "glu"
    return stack(here.gate), stack(here.up) if gated else None, stack(here.down)


def _read_each(here: ExpertNames, config: ResolvedModelConfig) -> Stacks:
    count, hidden, width = _shape(config)

    def stack(name: str, *shape: int) -> Stack:
        parts = [_theirs(name.format(e=e), shape) for e in range(count)]

        def fill(read: Read) -> Tensor:
            first = parts[0](read)
            stacked = first.new_empty(count, *shape)  # filled one by one: all together are twice
            for e, part in enumerate(parts):
                stacked[e] = part(read)
            return stacked

        return fill

    down = _then(lambda stack: stack.transpose(1, 2), stack(here.down, width, hidden))
    return stack(here.gate, hidden, width), stack(here.up, hidden, width), down


def _read_joint(here: ExpertNames, config: ResolvedModelConfig) -> Stacks:
    count, hidden, width = _shape(config)
    both = _theirs(here.gate, (count, 2 * hidden, width))
    down = _theirs(here.down, (count, width, hidden))
    return _half(both, 0, 1), _half(both, 1, 1), _then(lambda down: down.transpose(1, 2), down)


def _read_interleaved(here: ExpertNames, config: ResolvedModelConfig) -> Stacks:
    count, hidden, width = _shape(config)
    both = _theirs(here.gate, (count, width, 2 * hidden))

    def every_second(start: int) -> Stack:
        return _then(lambda joint: joint[:, :, start::2].transpose(1, 2), both)

    return every_second(0), every_second(1), _theirs(here.down, (count, hidden, width))


def _shape(config: ResolvedModelConfig) -> tuple[int, int, int]:
    return _count(config), config.ffn_config.ffn_hidden_size, config.d_model


def _theirs(name: str, shape: tuple[int, ...]) -> Make:
    """Return the function that reads an HF tensor and checks its shape."""

    def shaped(read: Read) -> Tensor:
        tensor = read(name)
        if tensor.shape != shape:
            raise UserError(
                f"config.json: makes {name} {shape}, but the file's tensor is"
                f" {tuple(tensor.shape)}; the two belong to different models"
            )
        return tensor

    return shaped


FORMS: dict[
    str,
    tuple[
        Callable[[ExpertNames, Stacks, int], Made],
        Callable[[ExpertNames, ResolvedModelConfig], Stacks],
    ],
] = {
    "stacked": (_write_stacked, _read_stacked),
    "each": (_write_each, _read_each),
    "joint": (_write_joint, _read_joint),
    "interleaved": (_write_interleaved, _read_interleaved),
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
    """Return two namings: one tensor per expert, or joint tensors as in transformers 5."""
    expert = f"model.layers.{{i}}.{module}.experts.{{e}}."
    named = ExpertNames(
        f"model.layers.{{i}}.{module}.gate.weight",
        gate=f"{expert}{gate}.weight",
        up=f"{expert}{up}.weight",
        down=f"{expert}{down}.weight",
    )
    return named, _JOINT_EXPERTS


def _granite_experts() -> tuple[ExpertNames, ...]:
    """Return the two namings of Granite's experts."""
    moe, shared = "model.layers.{i}.block_sparse_moe.", "model.layers.{i}.shared_mlp."
    both = (f"{shared}input_linear.weight", f"{shared}output_linear.weight")
    old, new = f"{moe}input_linear.weight", f"{moe}experts.gate_up_proj"
    return (
        ExpertNames(
            f"{moe}router.layer.weight", old, old, f"{moe}output_linear.weight", shared=both
        ),
        ExpertNames(f"{moe}router.weight", new, new, f"{moe}experts.down_proj", shared=both),
    )


GPT_OSS = (
    replace(_JOINT_EXPERTS, router="model.layers.{i}.mlp.router.weight", is_interleaved=True),
)


def _deepseek_experts(balance: str) -> tuple[ExpertNames, ...]:
    """Return the two namings of DeepSeek's experts, with the shared one."""
    module = "model.layers.{i}.mlp.shared_experts."
    shared = tuple(f"{module}{name}.weight" for name in DENSE.values())
    return tuple(replace(names, shared=shared, balance=balance) for names in QWEN)


QWEN = _each_named("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = _each_named("block_sparse_moe", "w1", "w3", "w2")
GRANITE = _granite_experts()
DEEPSEEK_V2 = _deepseek_experts("")
DEEPSEEK_V3 = _deepseek_experts(f"model.layers.{{i}}.mlp.gate.{BALANCE}")

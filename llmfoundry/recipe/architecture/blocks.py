"""The `model.block_overrides` section: layers that differ from the model's own settings.

`layer_configs` expands it, one `LayerConfig` a block, which is all that the decoder asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.architecture.attention import (
    FLOOR_SCALE,
    WINDOW,
    AttentionConfig,
    TemperatureConfig,
    check_window,
)
from llmfoundry.recipe.values.bounds import Range, out_of_bounds
from llmfoundry.recipe.values.checks import nearest

DEFAULT = "default"


@dataclass
class AttentionOverride:
    """What one kind of layer does otherwise; unset: as model.attn_config says."""

    sliding_window_size: Annotated[int | None, WINDOW] = None
    """A token sees itself and this many tokens before it; -1: all."""
    nope: bool | None = None
    """With rope: true this layer does not rotate."""
    reuse_kv_layer_idx: Annotated[int | None, Range(-(2**20))] = None
    """Take keys and values of the layer this many places up, a negative number: rotated if that
    layer rotates. The window is this layer's own."""
    attn_temperature_tuning: TemperatureConfig | None = None
    """Queries sharpened with their position."""

    def check(self, key: str, attn: AttentionConfig) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        yield from check_window(f"{key}sliding_window_size", self.sliding_window_size)
        if self.attn_temperature_tuning is not None:
            where = f"{key}attn_temperature_tuning."
            yield from self.attn_temperature_tuning.check(where)
        if self.nope and not attn.rope:
            yield f"{key}nope: has no effect without attn_config.rope: true; remove it"
        if self.reuse_kv_layer_idx is not None and self.reuse_kv_layer_idx >= 0:
            yield (
                f"{key}reuse_kv_layer_idx: {self.reuse_kv_layer_idx}; write a negative number,"
                " -1 for the layer before"
            )


@dataclass
class BlockOverride:
    """A named kind of layer."""

    attn_config: AttentionOverride = field(default_factory=AttentionOverride)
    """Attention."""


@dataclass
class BlockRun:
    """One kind of layer, or a sequence of runs, repeated."""

    name: str | None = None
    """default, or a key of block_overrides.overrides."""
    order: list[BlockRun] | None = None
    """In place of a name: runs that are repeated together."""
    repeat: Annotated[int, Range(1, 2**20)] = 1
    """How often."""


@dataclass
class BlockOverridesConfig:
    """Layers that differ: kinds by name, and the order in which they are stacked."""

    order: list[BlockRun] = field(default_factory=list)
    """From the first block to the last: {name: local, repeat: 3}, or {order: [...], repeat: 2}."""
    overrides: dict[str, BlockOverride] = field(default_factory=dict)
    """What each name means."""

    def check(self, key: str, attn: AttentionConfig, n_layers: int) -> Iterator[str]:
        """Lines for kinds that do not exist or fit, and for an order of another length."""
        if DEFAULT in self.overrides:
            yield f"{key}overrides.{DEFAULT}: the name of the model's own settings; write another"
        for name, override in self.overrides.items():
            yield from override.attn_config.check(f"{key}overrides.{name}.attn_config.", attn)
        problems = list(self._check_runs(f"{key}order", self.order))
        yield from problems
        if problems:
            return
        length = _length(self.order)
        if length != n_layers:
            yield f"{key}order: is {length} layers long, but n_layers is {n_layers}"
            return
        names = self.names()
        for unused in sorted(set(self.overrides) - set(names) - {DEFAULT}):
            yield f"{key}overrides.{unused}: is not in order and has no effect; remove it"
        sources = self.sources(names)
        wrong: dict[str, str] = {}
        for index, name in enumerate(names):
            if name not in wrong:  # a line a kind is enough
                wrong.update((name, line) for line in self._check_reuse(key, names, index, sources))
        yield from wrong.values()

    def _check_runs(self, key: str, runs: list[BlockRun]) -> Iterator[str]:
        options = [DEFAULT, *self.overrides]
        for index, run in enumerate(runs):
            where = f"{key}[{index}]"
            yield from out_of_bounds(f"{where}.", run)
            if (run.name is None) == (run.order is None):
                yield f"{where}: has both or neither; write a name or an order"
            elif run.order is not None:
                yield from self._check_runs(f"{where}.order", run.order)
            elif run.name not in options:
                hint = nearest(str(run.name), options)
                yield f"{where}.name: {run.name!r} is not in overrides{hint}"

    def _check_reuse(
        self, key: str, names: list[str], index: int, sources: list[int]
    ) -> Iterator[str]:
        key, source = f"{key}overrides.{names[index]}.", sources[index]
        back = self._kind(names[index]).reuse_kv_layer_idx
        if back is None or back >= 0:
            return
        if source < 0:
            where = f"{key}attn_config.reuse_kv_layer_idx"
            yield f"{where}: {back} from layer {index} is before the first"

    def names(self) -> list[str]:
        """The kind of every layer, in order."""
        return list(_expand(self.order))

    def sources(self, names: list[str]) -> list[int]:
        """The layer whose keys and values each layer uses in the end; its own number without reuse.

        Negative where that would lie before the first.
        """
        found: list[int] = []
        for index, name in enumerate(names):
            above = index + min(0, self._kind(name).reuse_kv_layer_idx or 0)
            found.append(found[above] if 0 <= above < index else above)
        return found

    def _kind(self, name: str) -> AttentionOverride:
        found = self.overrides.get(name)
        return found.attn_config if found is not None else AttentionOverride()


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between layers.

    Attributes:
        window: a token sees itself and this many tokens before it; -1: all.
        rotary: whether queries and keys are rotated.
        kv_from: the layer whose keys and values are used; its own number where they are its own.
        temperature: floor_scale and attn_scale of the queries' sharpening; None: none.
    """

    window: int
    rotary: bool
    kv_from: int
    temperature: tuple[int, float] | None = None


def layer_configs(
    attn: AttentionConfig, overrides: BlockOverridesConfig | None, n_layers: int
) -> list[LayerConfig]:
    """The settings of every layer of a checked model."""
    if overrides is None or not overrides.order:
        overrides = BlockOverridesConfig(order=[BlockRun(DEFAULT, repeat=n_layers)])
    names, found = overrides.names(), []
    for name, source in zip(names, overrides.sources(names), strict=True):
        kind = overrides._kind(name)
        window, tuning = kind.sliding_window_size, kind.attn_temperature_tuning
        tuning = attn.attn_temperature_tuning if tuning is None else tuning
        floor = tuning.floor_scale or FLOOR_SCALE
        found.append(
            LayerConfig(
                window=attn.sliding_window_size if window is None else window,
                rotary=attn.rope and not kind.nope,
                kv_from=source,
                temperature=(floor, tuning.attn_scale) if tuning.attn_scale else None,
            )
        )
    return found


def _length(runs: list[BlockRun]) -> int:
    """Layers of some runs, without making them."""
    return sum(run.repeat * (1 if run.order is None else _length(run.order)) for run in runs)


def _expand(runs: list[BlockRun]) -> Iterator[str]:
    for run in runs:
        for _ in range(run.repeat):
            if run.order is not None:
                yield from _expand(run.order)
            else:
                assert run.name is not None, "check the recipe first"
                yield run.name

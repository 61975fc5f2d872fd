"""The `model.init_config` section: how weights start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import POSITIVE, choice, out_of_bounds
from llmfoundry.recipe.values.checks import above, inert, set_defaults

INITS = (
    "default_",
    "baseline_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "neox_init_",
    "small_init_",
    "xavier_normal_",
    "xavier_uniform_",
)
FAN_MODES = ("fan_in", "fan_out")
NONLINEARITIES = ("linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu")


@dataclass
class InitConfig:
    """How weights start."""

    name: Annotated[str, choice(INITS)] = "kaiming_normal_"
    """kaiming_normal_, kaiming_uniform_ (He et al., 2015); xavier_normal_, xavier_uniform_ (Glorot
    and Bengio, 2010); baseline_: normal with init_std; small_init_: normal with sqrt(2 / (5 d))
    (Nguyen and Salazar, 2019); neox_init_: the same, residual projections divided by
    n_layers / sqrt(10) (GPT-NeoX-20B); default_: what PyTorch's layers do by themselves."""
    fan_mode: Annotated[str | None, choice(FAN_MODES)] = None
    """Only for kaiming: fan_in (the default) keeps the forward pass's variance, fan_out the
    backward pass's."""
    init_nonlinearity: Annotated[str | None, choice(NONLINEARITIES)] = None
    """Only for kaiming: whose gain; default relu."""
    init_gain: float | None = None
    """For xavier the gain, default 1; for kaiming with leaky_relu the negative slope, default 0."""
    init_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of baseline_; default 0.02."""
    emb_init_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of the embeddings; unset: the same scheme as the other weights."""
    emb_init_uniform_lim: float | list[float] | None = None
    """Embeddings uniform in [-l, l], or in [low, high]; unset: the same scheme as the others."""
    router_init_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of routers' weights. Small, experts start with equal weights (Fedus et
    al., 2021, take a tenth of the others'); unset: the same scheme as the other weights."""
    init_div_is_residual: Annotated[bool | float | None, POSITIVE] = None
    """Divide the projections that write to the residual stream by sqrt(2 * n_layers) (true, the
    default) or by a number."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        kaiming, xavier = self.name.startswith("kaiming"), self.name.startswith("xavier")
        if self.name != "baseline_":
            yield from inert(key, self, ["init_std"], "without name: baseline_")
        if not kaiming:
            why = "without name: kaiming_normal_ or kaiming_uniform_"
            yield from inert(key, self, ["fan_mode", "init_nonlinearity"], why)
        if not (xavier or (kaiming and self.init_nonlinearity == "leaky_relu")):
            why = "without an xavier name, or kaiming with init_nonlinearity: leaky_relu"
            yield from inert(key, self, ["init_gain"], why)
        if self.name == "neox_init_":
            why = "with name: neox_init_, which divides by n_layers / sqrt(10)"
            yield from inert(key, self, ["init_div_is_residual"], why)
        if self.name == "default_":
            why = f"with name: {self.name}"
            yield from inert(key, self, ["init_div_is_residual"], why)
        if xavier:
            yield from above(f"{key}init_gain", self.init_gain, 0)
        yield from self._check_embeddings(key)

    def _check_embeddings(self, key: str) -> Iterator[str]:
        limits = self.emb_init_uniform_lim
        if limits is None:
            return
        if self.emb_init_std is not None:
            yield f"{key}emb_init_uniform_lim: and emb_init_std exclude each other; remove one"
        if isinstance(limits, list):
            if len(limits) != 2 or not limits[0] < limits[1]:
                yield f"{key}emb_init_uniform_lim: {limits}; write [low, high] with low < high"
        else:
            yield from above(f"{key}emb_init_uniform_lim", limits, 0)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name == "baseline_":
            set_defaults(self, init_std=0.02)
        if self.name.startswith("kaiming"):
            set_defaults(self, fan_mode="fan_in", init_nonlinearity="relu")
            if self.init_nonlinearity == "leaky_relu":
                set_defaults(self, init_gain=0.0)
        if self.name.startswith("xavier"):
            set_defaults(self, init_gain=1.0)
        if self.name not in ("neox_init_", "default_"):
            set_defaults(self, init_div_is_residual=True)

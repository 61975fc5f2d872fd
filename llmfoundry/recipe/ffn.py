"""The `model.ffn_config` section: the feed-forward layer and its activation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmfoundry.recipe.checks import at_least, one_of

FFN_TYPES = ("mptmlp", "mptglu")

ACTIVATIONS: dict[str, tuple[str, ...]] = {  # element by element, and the arguments each takes
    "gelu": ("approximate",),
    "gelu_tanh": (),
    "quick_gelu": (),
    "silu": (),
    "relu": (),
    "relu2": (),
    "relu6": (),
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "selu": (),
    "mish": (),
    "softplus": ("beta", "threshold"),
    "softsign": (),
    "sigmoid": (),
    "logsigmoid": (),
    "tanh": (),
    "tanhshrink": (),
    "softshrink": ("lambd",),
    "hardshrink": ("lambd",),
    "hardsigmoid": (),
    "hardswish": (),
    "hardtanh": ("min_val", "max_val"),
}


@dataclass
class FFNConfig:
    """The feed-forward layer."""

    ffn_type: str = "mptmlp"
    """mptmlp: down(act(up x)). mptglu: down(act(gate x) * up x) (Shazeer, 2020)."""
    ffn_act_fn: str | dict[str, Any] = "gelu"
    """An elementwise function of torch.nn.functional, gelu_tanh, quick_gelu or relu2 (squared);
    with arguments as {name: leaky_relu, negative_slope: 0.1}."""
    ffn_hidden_size: int | None = None
    """Inner width; unset: d_model * expansion_ratio."""

    @property
    def activation(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the activation, however it was written."""
        if isinstance(self.ffn_act_fn, str):
            return self.ffn_act_fn, {}
        arguments = dict(self.ffn_act_fn)
        return str(arguments.pop("name", "")), arguments

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}ffn_type", self.ffn_type, FFN_TYPES)
        yield from self._check_activation(f"{key}ffn_act_fn")
        yield from at_least(f"{key}ffn_hidden_size", self.ffn_hidden_size, 1)

    def _check_activation(self, key: str) -> Iterator[str]:
        name, arguments = self.activation
        if not name:
            yield f"{key}: has no name; write {{name: gelu}}"
            return
        yield from one_of(key, name, ACTIVATIONS)
        for argument, value in arguments.items():
            if argument not in ACTIVATIONS.get(name, (argument,)):
                takes = ", ".join(ACTIVATIONS[name]) or "no arguments"
                yield f"{key}.{argument}: {name} takes {takes}; remove it"
            elif argument == "approximate":
                yield from one_of(f"{key}.{argument}", value, ("none", "tanh"))
            elif isinstance(value, bool) or not isinstance(value, int | float):
                yield f"{key}.{argument}: {value!r} is not a number"

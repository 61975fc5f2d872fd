"""The `preference` section: learning from preferences between answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.checks import set_defaults
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.schema import POSITIVE, Only, Range, check_fields, choice
from llmfoundry.recipe.source import AUTO, SourceConfig

FORMATS = {"dpo": "preference", "kto": "unpaired", "orpo": "preference", "simpo": "preference"}
"""The format of the examples that each method reads."""
METHODS = ("none", "dpo", "kto", "orpo", "simpo")
DPO_LOSSES = ("sigmoid", "ipo", "hinge")
REFERENCES = ("auto", "precompute", "adapter")

_DEFAULTS: dict[str, dict[str, float | str]] = {
    "none": {},
    "dpo": {
        "loss": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "sft_weight": 0.0,
        "reference": "auto",
    },
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "reference": "auto"},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0, "sft_weight": 0.0},
}


def _instead(given: str) -> str:
    """Return the setting whose method reads examples of a format."""
    methods = [name for name, format in FORMATS.items() if format == given]
    return f"preference.name: {' or '.join(methods) or 'none'}"


@dataclass
class PreferenceConfig:
    """The preference loss; `none`: the cross-entropy of supervised examples."""

    name: Annotated[str, choice(METHODS)] = "none"
    """none, dpo (Rafailov et al., 2023), kto (unpaired; Ethayarajh et al., 2024), orpo (Hong et
    al., 2024), simpo (Meng et al., 2024). orpo and simpo need no reference model. The data has
    data.format: preference, and both answers of an example, each with the prompt, share a sequence
    of max_seq_len tokens; for kto the format is unpaired."""
    loss: Annotated[str | None, choice(DPO_LOSSES), Only("name", "dpo")] = None
    """sigmoid, ipo (Azar et al., 2023) or hinge (SLiC); default sigmoid."""
    beta: Annotated[float | None, POSITIVE, Only("name")] = None
    """dpo and kto: strength of the regularization towards the reference model. orpo: weight of the
    odds-ratio loss. simpo: scale of the rewards. Default 0.1, for simpo 2."""
    label_smoothing: Annotated[float | None, Range(0, below=0.5), Only("name", "dpo")] = None
    """Assumed share of pairs with swapped labels (cDPO); default 0."""
    gamma: Annotated[float | None, Range(0), Only("name", "simpo")] = None
    """Target margin between the rewards of the chosen and the rejected answer; default 1."""
    sft_weight: Annotated[float | None, Range(0), Only("name", ("dpo", "simpo"))] = None
    """Weight of the cross-entropy of the chosen answer, which is added to the loss; default 0."""
    desirable_weight: Annotated[float | None, POSITIVE, Only("name", "kto")] = None
    """Weight of desirable answers; default 1."""
    undesirable_weight: Annotated[float | None, POSITIVE, Only("name", "kto")] = None
    """Weight of undesirable answers; default 1."""
    reference: Annotated[str | None, choice(REFERENCES), Only("name", ("dpo", "kto"))] = None
    """Source of the reference model's log-probabilities. precompute: computed once, before
    training, and cached. adapter: computed at each step with the adapter switched off. auto:
    precompute."""

    def check(self, key: str = "preference.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self.label_smoothing and self.loss in ("ipo", "hinge"):
            yield f"{key}label_smoothing: has no effect with loss: {self.loss}; remove it"

    def check_data(self, data: DataConfig) -> Iterator[str]:
        """Yield an error line for data that the method does not read or that changes answers."""
        sources: dict[str, SourceConfig] = {"data.": data}
        if data.streams:
            sources = {f"data.streams.{name}.": stream for name, stream in data.streams.items()}
        if data.validation is not None and data.validation.is_supervised:
            sources["data.validation."] = data.validation
        for key, source in sources.items():
            yield from self._check_format(f"{key}format", source.format)
        if self.name not in FORMATS:
            return
        supervised = data.supervised
        if supervised.target_prompts != "none":
            yield (
                f"data.supervised.target_prompts: {supervised.target_prompts}, but {self.name}"
                " compares answers alone; write none"
            )
        if supervised.loss != "tokens":
            yield (
                f"data.supervised.loss: has no effect with preference.name: {self.name}, which"
                " counts answers; remove it"
            )
        if data.attend_across_documents:
            yield (
                f"data.attend_across_documents: true lets the answers that {self.name} compares see"
                " each other; remove it"
            )

    def _check_format(self, key: str, given: str) -> Iterator[str]:
        needed = FORMATS.get(self.name)
        if needed is not None and given not in (needed, AUTO):
            yield (
                f"{key}: {given}, but preference.name: {self.name} reads rows of {needed}; write"
                f" that, or {_instead(given)}"
            )
        if needed is None and given in FORMATS.values():
            methods = [name for name, format in FORMATS.items() if format == given]
            yield (
                f"{key}: {given}, whose rejected answers would be learned as well; write"
                f" preference.name: {' or '.join(methods)}"
            )

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.name in _DEFAULTS:
            set_defaults(self, **_DEFAULTS[self.name])


class ResolvedPreferenceConfig(PreferenceConfig):
    """`PreferenceConfig` with defaults resolved."""

    loss: str
    beta: float
    label_smoothing: float
    gamma: float
    sft_weight: float
    desirable_weight: float
    undesirable_weight: float
    reference: str

"""The `adapter` section: a few added parameters that train in place of the model's own.

Names are peft's, whose files are read and written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.values.bounds import FRACTION, PATH, POSITIVE, Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import fill, inert

PROMPT_TUNING, PREFIX_TUNING = "prompt_tuning", "prefix_tuning"
VIRTUAL = (PROMPT_TUNING, PREFIX_TUNING)
ADAPTERS = ("none", "lora", *VIRTUAL)
INITS = ("default", "gaussian", "pissa")
PROMPT_INITS = ("sample_vocab", "text", "random")
EXPERTS = ("independent", "shared")
ALL_LINEAR = "all-linear"


@dataclass
class AdapterConfig:
    """Low-rank matrices beside frozen ones (LoRA, Hu et al., 2021), or virtual tokens."""

    name: Annotated[str, choice(ADAPTERS)] = "none"
    """none: all parameters train. lora: low-rank matrices, on hf_causal_lm by peft (extra).
    prompt_tuning: embeddings in front of every document (Lester et al., 2021). prefix_tuning: keys
    and values in front of it in every layer (Li and Liang, 2021), on hf_causal_lm alone."""
    pretrained: Annotated[str | None, PATH] = None
    """An adapter's folder in peft's format to begin from; it decides what is adapted and how."""
    num_virtual_tokens: Annotated[int | None, Range(1, 2**16)] = None
    """Only for prompt_tuning and prefix_tuning: virtual tokens before each document; default 20."""
    prompt_tuning_init: Annotated[str | None, choice(PROMPT_INITS)] = None
    """Only for prompt_tuning: what they begin as. sample_vocab: embeddings of tokens drawn from the
    vocabulary. text: of prompt_tuning_init_text. random: normal numbers. Default: sample_vocab."""
    prompt_tuning_init_text: str | None = None
    """Only for prompt_tuning_init: text, repeated or cut to num_virtual_tokens."""
    r: Annotated[int | None, Range(1, 2**16)] = None
    """Only for lora: rank of the added matrices; default 16."""
    lora_alpha: Annotated[float | None, POSITIVE] = None
    """Only for lora: the product of both is scaled by alpha / r; default 2 r."""
    lora_dropout: Annotated[float | None, FRACTION] = None
    """Only for lora: dropout on the input of the added matrices; default 0."""
    target_modules: str | list[str] | None = None
    """Only for lora: all-linear (every linear layer of the blocks and the experts), or names such
    as Wqkv, out_proj, "blocks.0-3.*"; each must match. Default: all-linear."""
    exclude_modules: list[str] = field(default_factory=list)
    """Only for lora: names left out of target_modules."""
    train_router: bool | None = None
    """Only for lora: all-linear includes the routers of experts; default false."""
    experts: Annotated[str | None, choice(EXPERTS)] = None
    """Only for lora on stacked experts. independent: matrices for each expert. shared: one pair for
    all experts of a layer. Default: independent."""
    use_rslora: bool | None = None
    """Only for lora: scale by alpha / sqrt(r) (rsLoRA, Kalajdzievski, 2023); default false."""
    use_dora: bool | None = None
    """Only for lora: learn row magnitudes separately (DoRA, Liu et al., 2024); default false."""
    init_lora_weights: Annotated[str | None, choice(INITS)] = None
    """Only for lora. default: A random, B zero. gaussian: A normal with deviation 1 / r. pissa: the
    largest singular values of the weight move into A and B (Meng et al., 2024)."""
    lora_plus_ratio: Annotated[float | None, POSITIVE] = None
    """Only for lora: learning rate of B over that of A (LoRA+, Hayou et al., 2024); default 1."""
    modules_to_save: list[str] = field(default_factory=list)
    """Only for lora: modules, such as wte or lm_head, that train whole and are saved too."""

    def check(self, key: str = "adapter.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.name not in ADAPTERS:
            return
        yield from self._check_effects(key)
        if self.name == "lora" and not self.target_modules and self.target_modules is not None:
            yield f"{key}target_modules: names nothing; write all-linear, or names such as Wqkv"
        if self.prompt_tuning_init == "text" and not self.prompt_tuning_init_text:
            yield f"{key}prompt_tuning_init: text needs prompt_tuning_init_text; write it"

    def _check_effects(self, key: str) -> Iterator[str]:
        """Lines for keys of other adapters, and for those that `pretrained` decides."""
        if self.name == "none" and self.pretrained is not None:
            yield f"{key}pretrained: has no effect with name: none; write name: lora"
        for names, fields in _OWN.items():
            if self.name not in names:
                yield from self._inert(key, fields, f"with name: {self.name}")
            elif self.pretrained is not None:
                decided = [field for field in fields if field not in _OF_TRAINING]
                why = "with pretrained, whose folder decides it"
                yield from self._inert(key, decided, why)
        if self.prompt_tuning_init_text is not None and self.prompt_tuning_init != "text":
            why = "without prompt_tuning_init: text"
            yield from self._inert(key, ["prompt_tuning_init_text"], why)

    def _inert(self, key: str, fields: Iterable[str], why: str) -> Iterator[str]:
        """As `checks.inert`; lists are unset when they are empty."""
        named = [field for field in fields if getattr(self, field) != []]
        yield from inert(key, self, named, why)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name == "lora" and self.pretrained is not None:  # whose folder says the rest
            fill(self, lora_dropout=0.0, lora_plus_ratio=1.0)
        elif self.name in VIRTUAL and self.pretrained is None:
            fill(self, num_virtual_tokens=20)
            if self.name == PROMPT_TUNING:
                fill(self, prompt_tuning_init="sample_vocab")
        elif self.name == "lora":
            fill(
                self,
                r=16,
                lora_dropout=0.0,
                target_modules=ALL_LINEAR,
                train_router=False,
                experts="independent",
                use_rslora=False,
                use_dora=False,
                init_lora_weights="default",
                lora_plus_ratio=1.0,
            )
            assert self.r is not None
            fill(self, lora_alpha=2.0 * self.r)


_LORA = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "train_router",
    "experts",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "lora_plus_ratio",
    "modules_to_save",
)
_OWN = {  # which keys are only for which adapters
    ("lora",): _LORA,
    VIRTUAL: ("num_virtual_tokens",),
    (PROMPT_TUNING,): ("prompt_tuning_init", "prompt_tuning_init_text"),
}
_OF_TRAINING = ("lora_dropout", "lora_plus_ratio")  # which a folder does not decide

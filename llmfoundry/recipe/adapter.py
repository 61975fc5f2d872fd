"""The `model` and `adapter` sections of a fine-tuning recipe.

Whose weights a run begins with, and how they are held; and a few added parameters that train in
place of the model's own. Names are peft's, whose files are read and written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from llmfoundry.recipe.attention import ATTN_IMPLS
from llmfoundry.recipe.checks import inert, set_defaults
from llmfoundry.recipe.schema import (
    ANY_TEXT,
    FRACTION,
    PATH,
    POSITIVE,
    Range,
    choice,
    out_of_bounds,
)

HOLDERS = ("auto", "mpt_causal_lm", "hf_causal_lm")
QUANTIZATIONS = ("none", "nf4")


@dataclass
class PretrainedConfig:
    """A trained model to start from; its own files say what shape it has."""

    name: Annotated[str, choice(HOLDERS)] = "auto"
    """mpt_causal_lm: the project's decoder. hf_causal_lm: the class of transformers. auto: the
    decoder where it expresses the model exactly, else the class; the run says which."""
    pretrained: Annotated[str | None, PATH] = None
    """A run's folder, a checkpoint's, a Hugging Face folder (config.json and safetensors), a
    registered version (models:/NAME@best), or a hub id."""
    revision: str | None = None
    """Only for a hub id: a branch, tag or commit."""
    trust_remote_code: bool = False
    """Run the Python code that the folder or hub repository brings; off: it is refused."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's own configuration to change: of config.json, or, for a run, of its
    recipe's model section. A key that it does not have is an error."""
    resize_embeddings: bool = False
    """Add rows to embedding and head where the tokenizer has more tokens, also those that
    `tokenizer.chat_template` adds. Beside an adapter, both train whole then; off: that is an error.
    """
    attn_impl: Annotated[
        str | None, choice(ATTN_IMPLS, "transformers' attn_implementation", ANY_TEXT)
    ] = None
    """How attention is computed: a backend of the decoder (auto, sdpa, flex, varlen, flash, flash3,
    torch),
    or transformers' attn_implementation (eager, sdpa, flash_attention_2, …); unset: the fastest."""
    quantize: Annotated[str, choice(QUANTIZATIONS)] = "none"
    """nf4: keep the frozen matrices in 4 bits (QLoRA, Dettmers et al., 2023); needs an adapter."""
    double_quantize: bool | None = None
    """Only for nf4: keep its scales in 8 bits, which saves 0.4 bits a weight; unset: true."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.pretrained is None:
            yield (
                f"{key}pretrained: is required; write a run's folder (runs/NAME), a folder with"
                " config.json and safetensors, or a hub id"
            )
        if self.quantize == "none" and self.double_quantize is not None:
            yield f"{key}double_quantize: has no effect without quantize: nf4; remove it"


ADAPTERS = ("none", "lora")
_NO_PROMPTS = "trains vectors in front of documents, which is not supported; write lora"
INITS = ("default", "gaussian", "pissa")
EXPERTS = ("independent", "shared")
ALL_LINEAR = "all-linear"


@dataclass
class AdapterConfig:
    """Low-rank matrices beside frozen ones (LoRA, Hu et al., 2021)."""

    REMOVED: ClassVar[dict[str, str]] = dict.fromkeys(
        ("num_virtual_tokens", "prompt_tuning_init", "prompt_tuning_init_text"), _NO_PROMPTS
    )
    name: Annotated[
        str,
        choice(ADAPTERS, reasons={"prompt_tuning": _NO_PROMPTS, "prefix_tuning": _NO_PROMPTS}),
    ] = "none"
    """none: all parameters train. lora: low-rank matrices, on hf_causal_lm by peft (extra)."""
    pretrained: Annotated[str | None, PATH] = None
    """An adapter's folder in peft's format to begin from, or a registered one (models:/NAME@best);
    it decides what is adapted and how."""
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
    """Only for lora: learn row magnitudes separately (DoRA, Liu et al., 2024), not of
    experts; default false."""
    init_lora_weights: Annotated[str | None, choice(INITS)] = None
    """Only for lora. default: A random, B zero. gaussian: A normal with deviation 1 / r. pissa: the
    largest singular values of the weight move into A and B (Meng et al., 2024), not of experts."""
    lora_plus_ratio: Annotated[float | None, POSITIVE] = None
    """Only for lora: learning rate of B over that of A (LoRA+, Hayou et al., 2024); default 1."""
    modules_to_save: list[str] = field(default_factory=list)
    """Only for lora: modules, such as wte or lm_head, that train whole and are saved too. Embedding
    and head are added to it where `tokenizer.chat_template` adds tokens."""

    def check(self, key: str = "adapter.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.name not in ADAPTERS:
            return
        yield from self._check_effects(key)
        if self.name == "lora" and not self.target_modules and self.target_modules is not None:
            yield f"{key}target_modules: names nothing; write all-linear, or names such as Wqkv"

    def _check_effects(self, key: str) -> Iterator[str]:
        """Lines for keys of other adapters, and for those that `pretrained` decides."""
        if self.name == "none" and self.pretrained is not None:
            yield f"{key}pretrained: has no effect with name: none; write name: lora"
        if self.name != "lora":
            yield from self._inert(key, _LORA, f"with name: {self.name}")
        elif self.pretrained is not None:
            decided = [field for field in _LORA if field not in _OF_TRAINING]
            yield from self._inert(key, decided, "with pretrained, whose folder decides it")

    def _inert(self, key: str, fields: Iterable[str], why: str) -> Iterator[str]:
        """As `checks.inert`; lists are unset when they are empty."""
        named = [field for field in fields if getattr(self, field) != []]
        yield from inert(key, self, named, why)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name == "lora" and self.pretrained is not None:  # whose folder says the rest
            set_defaults(self, lora_dropout=0.0, lora_plus_ratio=1.0)
        elif self.name == "lora":
            set_defaults(
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
            set_defaults(self, lora_alpha=2.0 * self.r)


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
_OF_TRAINING = ("lora_dropout", "lora_plus_ratio")  # which a folder does not decide

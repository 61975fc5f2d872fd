"""The `model` and `adapter` sections of a fine-tuning recipe.

`PretrainedConfig` names the model to start from and how its weights are stored. `AdapterConfig`
describes the few added parameters that train in place of the model's parameters. Names are those of
peft, whose files are read and written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from llmfoundry.recipe.attention import ATTN_IMPLS
from llmfoundry.recipe.checks import set_defaults
from llmfoundry.recipe.schema import (
    ANY_TEXT,
    FRACTION,
    PATH,
    POSITIVE,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)

HOLDERS = ("auto", "mpt_causal_lm", "hf_causal_lm")
QUANTIZATIONS = ("none", "nf4")
NEW_ROWS = ("mean", "pieces")


@dataclass
class PretrainedConfig:
    """A pretrained model to start from; its files determine its shape."""

    name: Annotated[str, choice(HOLDERS)] = "auto"
    """mpt_causal_lm: the project's decoder. hf_causal_lm: the transformers class. auto: the decoder
    if it expresses the model exactly, else the class; the log reports the choice."""
    pretrained: Annotated[str | None, PATH] = None
    """A run's folder, a checkpoint's folder, a Hugging Face folder (config.json and safetensors), a
    registered version (models:/NAME@best), or a hub id."""
    revision: str | None = None
    """A branch, tag or commit. Only with a hub id."""
    trust_remote_code: bool = False
    """Run the Python code of the folder or hub repository. Off: a model with such code is
    refused."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Changes to the configuration of the model: keys of config.json, or for a run, of its recipe's
    model section. An unknown key is an error."""
    resize_embeddings: bool = False
    """Add rows to embedding and head if the tokenizer has more tokens, including those that
    `tokenizer.chat_template` adds. With an adapter, embedding and head then train in full. Off:
    additional tokens are an error."""
    new_rows: Annotated[str, choice(NEW_ROWS)] = "mean"
    """Initial rows of new tokens in embedding and head. mean: added rows are the mean of all rows,
    and free rows of the model stay. pieces: the mean of the rows of the tokens that the text of the
    new token consisted of before."""
    attn_impl: Annotated[
        str | None, choice(ATTN_IMPLS, "transformers' attn_implementation", ANY_TEXT)
    ] = None
    """Attention implementation: a backend of the decoder (auto, sdpa, flex, varlen, flash, flash3,
    torch), or transformers' attn_implementation (eager, sdpa, flash_attention_2, …); unset: the
    fastest."""
    quantize: Annotated[str, choice(QUANTIZATIONS)] = "none"
    """nf4: store the frozen matrices in 4 bits (QLoRA, Dettmers et al., 2023), which requires an
    adapter."""
    double_quantize: Annotated[bool | None, Only("quantize", "nf4")] = None
    """Store the scales of nf4 in 8 bits, which saves 0.4 bits per weight; unset: true."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self.pretrained is None:
            yield (
                f"{key}pretrained: is required; write a run's folder (runs/NAME), a folder with"
                " config.json and safetensors, or a hub id"
            )


ADAPTERS = ("none", "lora")
_NO_PROMPTS = "trains vectors in front of documents, which is not supported; write lora"
INITS = ("default", "gaussian", "pissa")
EXPERTS = ("independent", "shared")
_LORA = Only("name", "lora")
_NEW_LORA = (_LORA, Unless("pretrained", why="whose folder decides it"))
ALL_LINEAR = "all-linear"
NEW = "new"
MOST_ROWS = 256  # of tokens that train alone: a row of the vocabulary's length selects each


@dataclass
class AdapterConfig:
    """Low-rank matrices added to frozen weights (LoRA, Hu et al., 2021)."""

    REMOVED: ClassVar[dict[str, str]] = dict.fromkeys(
        ("num_virtual_tokens", "prompt_tuning_init", "prompt_tuning_init_text"), _NO_PROMPTS
    )
    name: Annotated[
        str,
        choice(ADAPTERS, reasons={"prompt_tuning": _NO_PROMPTS, "prefix_tuning": _NO_PROMPTS}),
    ] = "none"
    """none: all parameters train. lora: low-rank matrices train; models of hf_causal_lm use peft
    (extra)."""
    pretrained: Annotated[str | None, PATH, _LORA] = None
    """A folder in peft's format, or a registered model (models:/NAME@best), with the adapter to
    continue. It decides what is adapted and how."""
    r: Annotated[int | None, Range(1, 2**16), _NEW_LORA] = None
    """Rank of the added matrices; default 16."""
    lora_alpha: Annotated[float | None, POSITIVE, _NEW_LORA] = None
    """The product of the two matrices is scaled by lora_alpha / r; default 2 r."""
    lora_dropout: Annotated[float | None, FRACTION, _LORA] = None
    """Dropout on the input of the added matrices; default 0."""
    target_modules: Annotated[str | list[str] | None, _NEW_LORA] = None
    """all-linear (every linear layer of the blocks and the experts), or names such as Wqkv,
    out_proj, "blocks.0-3.*", each of which must match. Default: all-linear."""
    exclude_modules: Annotated[list[str], _NEW_LORA] = field(default_factory=list)
    """Names to leave out of target_modules."""
    train_router: Annotated[bool | None, _NEW_LORA] = None
    """Whether all-linear includes the routers of experts; default false."""
    experts: Annotated[str | None, choice(EXPERTS), _NEW_LORA] = None
    """For models with experts. independent: matrices for each expert. shared: one pair of matrices
    for all experts of a layer. Default: independent."""
    use_rslora: Annotated[bool | None, _NEW_LORA] = None
    """Scale by lora_alpha / sqrt(r) (rsLoRA, Kalajdzievski, 2023); default false."""
    use_dora: Annotated[bool | None, _NEW_LORA] = None
    """Train the magnitudes of rows separately (DoRA, Liu et al., 2024), except in experts; default
    false."""
    init_lora_weights: Annotated[str | None, choice(INITS), _NEW_LORA] = None
    """default: A random, B zero. gaussian: A normal with standard deviation 1 / r. pissa: the
    largest singular values of the weight move into A and B (Meng et al., 2024), except in
    experts."""
    lora_plus_ratio: Annotated[float | None, POSITIVE, _LORA] = None
    """Learning rate of B divided by that of A (LoRA+, Hayou et al., 2024); default 1."""
    modules_to_save: Annotated[list[str], _NEW_LORA] = field(default_factory=list)
    """Modules, such as wte or lm_head, that train in full and are saved with the adapter. Embedding
    and head are added to the list where `tokenizer.chat_template` adds tokens."""

    trainable_token_indices: Annotated[str | list[int] | None, _NEW_LORA] = None
    """Ids of tokens whose rows of embedding and head train next to the low-rank matrices, or new:
    the tokens that the recipe adds. All other rows stay. Unset: embedding and head train in full
    where tokens are added. These rows have the optimizer's learning rate, also with
    lora_plus_ratio."""

    def check(self, key: str = "adapter.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        yield from self._check_tokens(f"{key}trainable_token_indices")
        if self.name == "lora" and not self.target_modules and self.target_modules is not None:
            yield f"{key}target_modules: names nothing; write all-linear, or names such as Wqkv"

    def _check_tokens(self, key: str) -> Iterator[str]:
        ids = self.trainable_token_indices
        if isinstance(ids, str) and ids != NEW:
            yield f"{key}: {ids}; write {NEW}, or a list of ids"
        if ids == []:
            yield f"{key}: names no token; write {NEW}, or a list of ids, or remove it"
        if isinstance(ids, list) and len(ids) > MOST_ROWS:
            yield (
                f"{key}: {len(ids)} tokens; write at most {MOST_ROWS}, or modules_to_save: [wte,"
                " lm_head], which trains all rows"
            )
        if isinstance(ids, list) and (len(set(ids)) < len(ids) or min(ids, default=0) < 0):
            yield f"{key}: write each id once, from 0"
        if ids and self.use_dora:
            yield f"{key}: rows of tokens have no magnitude; write use_dora: false, or remove one"

    def fill(self) -> None:
        """Resolve defaults in place."""
        if (
            self.name == "lora" and self.pretrained is not None
        ):  # whose folder decides all other settings
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


class ResolvedAdapterConfig(AdapterConfig):
    """`AdapterConfig` with defaults resolved."""

    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: str | list[str]
    train_router: bool
    experts: str
    use_rslora: bool
    use_dora: bool
    init_lora_weights: str
    lora_plus_ratio: float

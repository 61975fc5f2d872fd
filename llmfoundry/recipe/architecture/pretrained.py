"""The `model` section of a fine-tuning recipe: whose weights, and how they are held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.recipe.architecture.attention import ATTN_IMPLS
from llmfoundry.recipe.values.bounds import ANY_TEXT, PATH, choice, out_of_bounds

HOLDERS = ("auto", "mpt_causal_lm", "hf_causal_lm")
QUANTIZATIONS = ("none", "nf4")


@dataclass
class PretrainedConfig:
    """A trained model to start from; its own files say what shape it has."""

    name: Annotated[str, choice(HOLDERS)] = "auto"
    """mpt_causal_lm: the project's decoder. hf_causal_lm: the class of transformers. auto: the
    decoder where it expresses the model exactly, else the class; the run says which."""
    pretrained: Annotated[str | None, PATH] = None
    """A run's folder, a checkpoint's, a Hugging Face folder (config.json and safetensors), or a hub
    id."""
    revision: str | None = None
    """Only for a hub id: a branch, tag or commit."""
    trust_remote_code: bool = False
    """Run the Python code that the folder or hub repository brings; off: it is refused."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's own configuration to change: of config.json, or, for a run, of its
    recipe's model section. A key that it does not have is an error."""
    resize_embeddings: bool = False
    """Add rows to embedding and head where the tokenizer has more tokens, of whatever `pretrained`
    is; off: that is an error."""
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

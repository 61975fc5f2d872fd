"""`HFModelConfig`: the shape of a model that a class of transformers computes.

`builders/pretrained.py` makes it from config.json; nobody writes it by hand. It is a
`ModelConfig`, so that estimates and reports can ask it for widths and lengths; what decides the
model is `hf_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.recipe.architecture.model import ModelConfig

HF_CAUSAL_LM = "hf_causal_lm"


@dataclass
class HFModelConfig(ModelConfig):
    """A causal language model of transformers."""

    name: str = HF_CAUSAL_LM
    """Always hf_causal_lm."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """config.json, with what config_overrides changed."""
    hf_attn_impl: str | None = None
    """transformers' attn_implementation; unset: its own choice, sdpa where the class has it."""
    code: str | None = None
    """The folder whose own Python code makes the class, trusted by trust_remote_code; else none."""
    hf_parameters: int = 0
    """Parameters, a tied head counted once."""
    hf_matrices: int = 0
    """Of these the elements of matrices that a token meets, of experts those that it visits."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Nothing: transformers has read it."""
        return iter(())

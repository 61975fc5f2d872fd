"""`import llmfoundry.hf` registers the decoder with transformers' `AutoModelForCausalLM`.

The classes and what they can do are in `export/auto_model.py`.
"""

from llmfoundry.export.auto_model import LlmfoundryConfig, LlmfoundryForCausalLM

__all__ = ["LlmfoundryConfig", "LlmfoundryForCausalLM"]

"""`import llmfoundry.hf` registers the decoder with transformers' `AutoModelForCausalLM`.

The classes and what they can do are in `hf/auto_model.py`.
"""

from llmfoundry.hf.auto_model import LlmfoundryConfig, LlmfoundryForCausalLM

__all__ = ["LlmfoundryConfig", "LlmfoundryForCausalLM"]

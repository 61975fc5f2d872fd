"""LLM Foundry's line of recipes for training large language models, on plain PyTorch."""

__version__ = "0.1.0"

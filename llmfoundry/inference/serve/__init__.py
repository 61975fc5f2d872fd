"""An OpenAI-compatible server on the batched generator."""

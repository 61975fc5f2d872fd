"""A `model` section as transformers' config.json, and back."""

"""Adapters: a few added parameters that train in place of the model's own."""

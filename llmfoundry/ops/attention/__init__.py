"""Attention over packed sequences: backends and their selection."""

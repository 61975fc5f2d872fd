"""Mixtures of experts without dropped tokens: backends and their selection."""

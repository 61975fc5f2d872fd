"""Scaling laws: loss as a function of model size and tokens, and predictions for larger runs."""

"""Numerical kernels, each with a plain reference beside its fast paths."""

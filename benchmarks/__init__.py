"""Ours beside others, by turns, as ratios: what `make bench*` runs; README.md has the numbers."""

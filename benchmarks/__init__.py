"""Ours beside others, interleaved, as ratios: what `make bench*` runs; numbers are in README.md."""

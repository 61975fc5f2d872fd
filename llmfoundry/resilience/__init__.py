"""Around a run: `check` finds the broken GPU, node or link before the run does (README.md)."""

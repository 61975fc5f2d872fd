"""The gauntlet beside lm-evaluation-harness: `make bench-eval`."""

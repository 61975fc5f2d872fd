"""From answers to scores: judging, metrics, categories, the result."""

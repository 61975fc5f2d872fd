"""How processes share a model: what of it each holds, and what they tell each other."""

"""Supervised rows: prompts and answers from anywhere to tokens, of which some are learned."""

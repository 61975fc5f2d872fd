"""LLM Foundry's files: what each setting is here, and a recipe of a whole file."""

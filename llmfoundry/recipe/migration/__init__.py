"""A whole file of LLM Foundry's becomes a recipe of ours: read, each setting looked up, written."""

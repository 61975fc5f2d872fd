"""From rows to tokens: prompts in the project's and in LLM Foundry's form."""

"""The functions behind `import llmfoundry` and behind the scripts, which both call them."""

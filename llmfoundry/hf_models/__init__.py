"""transformers' own classes under the model's contract: blocks, hidden states, head apart."""

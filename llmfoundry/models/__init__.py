"""One decoder, of which MPT, GPT-2, Llama and Starcoder2 shapes are settings."""

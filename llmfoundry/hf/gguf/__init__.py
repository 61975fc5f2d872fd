"""GGUF, the one-file format of llama.cpp; `write.py` is its entrance."""

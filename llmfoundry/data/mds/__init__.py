"""Mosaic Data Shards: read, and written, byte for byte as mosaicml-streaming does."""

"""Text into batches: tokenizers, corpora, preparation, order, loader."""

"""Text to ids and back: tokenizers, byte-pair encoding, chat templates."""

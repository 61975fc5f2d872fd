"""Our trainer beside a bare loop and the Hugging Face Trainer: `make bench`."""

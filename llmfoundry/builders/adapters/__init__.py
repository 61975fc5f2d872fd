"""What trains in a fine-tuned run: adapters, on either kind of model."""

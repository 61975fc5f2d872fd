"""Fine-tuning beside TRL, and its memory beside the estimate: `make bench-finetune`."""

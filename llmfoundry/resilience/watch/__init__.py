"""Detection of slow ranks, speed drops, stalls and GPU errors during training."""

"""What a run takes of a rank's memory, counted on fake tensors, beside what the estimate says."""

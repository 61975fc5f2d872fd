"""What a run takes of a rank's memory, beside what the estimate says."""

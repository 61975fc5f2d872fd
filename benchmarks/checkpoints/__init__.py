"""What saving costs a run."""

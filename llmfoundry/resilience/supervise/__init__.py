"""Around a run: start it, see why it ended, and start it again, or not."""

"""Checkpoints: written sharded, opened on any layout, trusting nobody."""

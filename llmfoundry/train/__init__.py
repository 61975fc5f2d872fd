"""The loop: step, optimizer, schedule, checkpoints, callbacks."""

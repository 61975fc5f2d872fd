"""What a user is told: the text of `--help`, completion, nearest keys."""

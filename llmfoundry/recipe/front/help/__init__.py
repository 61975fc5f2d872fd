"""What a user is shown: the text of `--help`, completion, nearest keys."""

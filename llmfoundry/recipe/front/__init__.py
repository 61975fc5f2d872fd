"""The command line's front: from words and files to a typed, checked recipe."""

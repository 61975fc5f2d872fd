"""Where a run's files are, and whose they are: a folder, or a URL with a folder that stands for it."""

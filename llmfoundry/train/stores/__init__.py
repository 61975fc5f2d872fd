"""Where a run's files are: in a folder, or at a URL with a folder that stands for it; and whose."""

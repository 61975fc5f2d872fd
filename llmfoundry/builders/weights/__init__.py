"""Where weights come from when a run begins with someone's."""

"""In-context-learning tasks, their scoring, categories and averages."""

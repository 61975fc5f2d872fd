"""What a run tells: console, metrics.jsonl, MLflow, report.html."""

"""What a run reports: console, metrics.jsonl, MLflow, report.html."""

"""One recipe for each script."""

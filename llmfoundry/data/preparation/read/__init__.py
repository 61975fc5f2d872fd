"""Files, datasets and URLs to documents."""

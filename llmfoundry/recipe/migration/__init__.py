"""Another tool's whole file becomes a recipe: read, each setting looked up, written."""

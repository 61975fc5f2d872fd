"""The `model` and `adapter` sections, a module each part."""

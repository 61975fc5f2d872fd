"""Sections of hang detection, supervision and the watch of a run."""

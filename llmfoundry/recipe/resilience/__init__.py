"""Sections of what goes on around and beside a run."""

"""Preference tuning: what it minimises, and how well a model tells better answers from worse."""

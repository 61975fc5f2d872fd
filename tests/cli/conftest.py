"""`front` calls a script's front; no secret outlives its test."""

from tests.front import front, no_known_secrets

__all__ = ["front", "no_known_secrets"]

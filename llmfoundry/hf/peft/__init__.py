"""Adapters in peft's file format, both ways."""

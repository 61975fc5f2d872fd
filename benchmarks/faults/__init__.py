"""Faults injected into runs of four processes, and what became of each: `make bench-faults`."""

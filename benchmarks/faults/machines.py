"""Faults of machines, disks, stores and clocks."""

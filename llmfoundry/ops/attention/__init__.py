"""Attention over packed rows: the backends, and what picks one."""

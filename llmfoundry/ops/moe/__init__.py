"""Mixtures of experts without dropped tokens: the backends, and what picks one."""

"""Rows of public benchmarks, brought into a folder."""

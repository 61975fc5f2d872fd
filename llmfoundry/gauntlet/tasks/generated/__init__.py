"""Seeded generators of evaluation rows, answers right by construction; no download."""

"""Other tools' settings, and what each is here: one table, for hints and for scripts/migrate.py."""

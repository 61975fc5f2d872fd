"""Whether machines are sound: what is read and measured, and what it means."""

"""Which documents stay: filtered, repeated."""

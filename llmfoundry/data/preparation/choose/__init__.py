"""Which documents stay: held out, filtered, repeated."""

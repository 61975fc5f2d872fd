"""Documents to shards: read, filtered, encoded and written in parts."""

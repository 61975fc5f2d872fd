"""Documents to shards, in parts, with a manifest."""

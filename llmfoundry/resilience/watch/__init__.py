"""What a run notices about its machines while it trains."""

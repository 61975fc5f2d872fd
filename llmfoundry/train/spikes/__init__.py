"""What a run notices about itself: pure decisions, and what the loop asks them with."""

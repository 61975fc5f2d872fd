"""What values may be: bounds, durations, and the checks that sections share."""

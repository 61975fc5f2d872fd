"""From judged answers to scores: categories, the result."""

"""Laws of loss over size and tokens, and what small runs predict of a large one."""

"""What is asked: gauntlet files, their tasks, the rows of each."""

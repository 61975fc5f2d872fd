"""Generated chats with exact answers: the source `instructions`, and tasks of the gauntlet."""

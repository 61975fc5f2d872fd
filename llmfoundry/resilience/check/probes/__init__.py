"""What is read and measured on one machine, or between two; nothing here decides anything."""

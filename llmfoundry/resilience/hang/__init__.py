"""Which process hangs, where, and how all of them are ended so that the run can begin again."""

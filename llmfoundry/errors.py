"""What a user did wrong: the one exception that every room raises and every script prints.

A `UserError` becomes one line per problem on stderr and exit status 2, never a traceback. Anything
else that escapes is a defect of ours and keeps its traceback.
"""


class UserError(Exception):
    """One or more problems, each a line that names the key, file or row; why; what to write."""

    def __init__(self, *problems: str) -> None:
        assert problems, "a UserError names at least one problem"
        super().__init__("\n".join(problems))
        self.problems = problems

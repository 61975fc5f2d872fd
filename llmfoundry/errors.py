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


def one_line(error: BaseException) -> str:
    """Why something failed: the system's own reason where one led to it, else the error's text."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            return at.strerror + (f" ({at.filename})" if at.filename else "")
        at = at.__cause__ or at.__context__
    return " ".join(str(error).split()) or type(error).__name__

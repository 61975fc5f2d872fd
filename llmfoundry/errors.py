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

    def lines(self) -> list[str]:
        """The problems as a terminal can show them: each one line, none of them endless."""
        shown = [_one_line(problem) for problem in self.problems[:MOST_LINES]]
        left = len(self.problems) - len(shown)
        return [*shown, f"... and {left:,} problems more"] if left else shown


MOST_LINES, LONGEST_LINE = 50, 2000  # of what is shown


def _one_line(text: str) -> str:
    if len(text) > LONGEST_LINE:
        half = LONGEST_LINE // 2
        text = f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

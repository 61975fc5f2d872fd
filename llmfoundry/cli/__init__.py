"""The command line: the scripts' common runner, help, completion, sweeps, dry runs, and commands.

`script.py` runs a script of scripts/, `console.py` the command `llmfoundry`, and `commands/` has
one function for each script.
"""


def main() -> None:
    """Run the console command, `llmfoundry`."""
    from llmfoundry.cli.console import main as run_console  # scripts do not need it

    run_console()

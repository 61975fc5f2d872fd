"""What runs do now: list, describe, logs, follow, stop, serve; wherever they were launched.

    python scripts/runs.py list                       every run of runs/: state, step, loss, goodput
    python scripts/runs.py describe quickstart        recipe, attempts, checkpoints, scores, events
    python scripts/runs.py logs quickstart            of all machines; follow: live, until it ends
    python scripts/runs.py stop quickstart            saves and ends; now=true: at once
    python scripts/runs.py serve port=9465            the states, for Prometheus to scrape
    python scripts/runs.py list folder=/shared/runs format=json

States: waiting (in a queue), running, restarting, given up, finished, stopped (saved), failed,
unknown (nobody can be asked). The same from Python: llmfoundry.launch.runs.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import RunsRecipe

if __name__ == "__main__":
    run(RunsRecipe, "llmfoundry.cli.commands.runs:runs", help=__doc__)

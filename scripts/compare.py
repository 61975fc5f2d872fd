"""Compare runs: their curves over one another, what differs in their recipes, and their scores.

    python scripts/compare.py runs/a runs/b                     compare.html
    python scripts/compare.py runs                              all of a folder: runs/index.html
    python scripts/compare.py runs follow=true                  written anew while they run
    python scripts/compare.py runs/sweep output=sweep.html

One page that needs nothing but itself: curves by tokens, steps or hours, with zoom and smoothing,
the keys in which the recipes differ, and the last gauntlet of each run with intervals. It is made
of the runs' folders (metrics.jsonl, run.json, recipe.yaml, eval/), where nothing is written.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import CompareRecipe

if __name__ == "__main__":
    run(CompareRecipe, "llmfoundry.cli.commands.compare:compare", help=__doc__)

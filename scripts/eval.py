"""Evaluate a checkpoint: loss on held-out text, and the in-context-learning gauntlet.

    python scripts/eval.py checkpoint=runs/quickstart                     as the run measured itself
    python scripts/eval.py checkpoint=runs/quickstart/checkpoints/ba0000200
    python scripts/eval.py checkpoint=runs/quickstart eval=generated eval.icl_rows=100

Results are printed and written to results.json, by default inside the run's folder.
"""

from llmfoundry.recipe.load import run
from llmfoundry.recipe.tasks import EvalRecipe

if __name__ == "__main__":
    run(EvalRecipe, "llmfoundry.commands.evaluate:evaluate", help=__doc__)

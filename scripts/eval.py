"""Evaluate a checkpoint: loss on held-out text, and the in-context-learning gauntlet.

    python scripts/eval.py runs/quickstart                     as the run measured itself
    python scripts/eval.py runs/quickstart/checkpoints/ba0000200
    python scripts/eval.py runs/quickstart eval=generated eval.icl_rows=100
    python scripts/eval.py "models=[runs/quickstart, hf:gpt2]" eval=v0.3 output=compared

Results are printed and written to results.json, by default inside the run's folder.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import EvalRecipe

if __name__ == "__main__":
    run(EvalRecipe, "llmfoundry.cli.commands.evaluate:evaluate", help=__doc__)

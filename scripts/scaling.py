"""Predict a large run from small ones: a grid of sizes and tokens, and the law of their loss.

    python scripts/scaling.py yamls/scaling/quickstart.yaml --dry-run    runs, FLOPs, time
    python scripts/scaling.py yamls/scaling/quickstart.yaml              run what is not done; fit
    python scripts/scaling.py yamls/scaling/quickstart.yaml budget=1e15  the best model
    python scripts/scaling.py yamls/scaling/dense-vs-moe.yaml workers=2
    python scripts/scaling.py yamls/scaling/quickstart.yaml launch=slurm launch.gpus_per_node=1

Each point is an ordinary run in a folder of its own, so that the same command resumes; a larger run
is predicted before it is run. Writes scaling.json, points.csv and scaling.html. Runs that there
are, of whatever trainer, are fitted by fit=points.csv, whose columns are named parameters, tokens
or flops, and loss.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.scaling import ScalingRecipe

if __name__ == "__main__":
    run(ScalingRecipe, "llmfoundry.cli.commands.scaling:scaling", help=__doc__)

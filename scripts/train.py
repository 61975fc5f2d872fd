"""Train a language model from a recipe.

    python scripts/train.py yamls/quickstart.yaml
    python scripts/train.py yamls/quickstart.yaml optimizer.lr=1e-3 max_duration=100ba   keys
    python scripts/train.py yamls/quickstart.yaml model=mpt-125m eval=off                groups
    python scripts/train.py yamls/quickstart.yaml --cfg job > my.yaml                    flat copy
    python scripts/train.py yamls/quickstart.yaml -m optimizer.lr=1e-3,3e-3              sweep
    python scripts/train.py runs/quickstart/recipe.yaml                                  resume
    torchrun --nproc-per-node 8 scripts/train.py yamls/mpt-125m.yaml                     cluster

A run writes runs/NAME/: recipe.yaml (itself a recipe), metrics.jsonl, report.html, checkpoints/.
NAME is the recipe file's unless run_name says otherwise.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.train import TrainRecipe

if __name__ == "__main__":
    run(TrainRecipe, "llmfoundry.cli.commands.train:train", help=__doc__)

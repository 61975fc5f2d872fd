"""Prepare a recipe's tokenizer and token shards, and nothing else.

    python scripts/prepare_data.py yamls/quickstart.yaml
    python scripts/prepare_data.py yamls/mpt-125m.yaml data.num_workers=32

Training prepares what is missing by itself; this does it ahead, on a machine without a GPU. Both
keep the result in data.cache_folder, keyed by its content.
"""

from llmfoundry.recipe.load import run
from llmfoundry.recipe.train import TrainRecipe

if __name__ == "__main__":
    run(TrainRecipe, "llmfoundry.commands.prepare_data:prepare_data", help=__doc__)

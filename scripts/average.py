"""Average the weights of checkpoints, as a checkpoint that eval, convert and load_path take.

python scripts/average.py runs/quickstart last=2 output=runs/mean
python scripts/average.py runs/a runs/b 'proportions=[3,1]' output=runs/mixed
python scripts/average.py runs/mpt-125m last=5 weights=ema output=runs/mpt-125m-mean
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import AverageRecipe

if __name__ == "__main__":
    run(AverageRecipe, "llmfoundry.api.averaging:average_checkpoints", help=__doc__)

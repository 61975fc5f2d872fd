"""Send what a run that has ended logged to MLflow, TensorBoard or W&B, where they lack it.

    python scripts/track.py runs/quickstart                                    its own stores
    python scripts/track.py runs/quickstart logger.tracking_uri=http://HOST:5000     another
    python scripts/track.py runs/quickstart logger.tensorboard=true logger.mlflow=false

metrics.jsonl is compared with each store value by value; what is there is not sent again. For a run
whose store was locked or away when it ended, that was killed, or whose folder was moved.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import TrackRecipe

if __name__ == "__main__":
    run(TrackRecipe, "llmfoundry.cli.commands.track:track", help=__doc__)

"""Serve a model over HTTP: an OpenAI-compatible server.

python scripts/serve.py runs/quickstart
python scripts/serve.py runs/quickstart-sft port=0 slots=32 model_name=sft
python scripts/serve.py runs/quickstart host=0.0.0.0 api_key_env=SERVE_KEY
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import ServeRecipe

if __name__ == "__main__":
    run(ServeRecipe, "llmfoundry.cli.commands.serve:serve", help=__doc__)

"""Continue a prompt with a checkpoint's model, or answer a message.

python scripts/generate.py runs/quickstart prompt="def __init__(self"
python scripts/generate.py runs/quickstart prompt="def __init__(self" temperature=0.3
python scripts/generate.py runs/quickstart prompt="class Reader:" max_new_tokens=40
python scripts/generate.py runs/quickstart-sft message="Reverse: d a c" temperature=0
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import GenerateRecipe

if __name__ == "__main__":
    run(GenerateRecipe, "llmfoundry.cli.commands.generate:generate", help=__doc__)

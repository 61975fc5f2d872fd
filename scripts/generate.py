"""Continue a prompt with a checkpoint's model.

python scripts/generate.py checkpoint=runs/quickstart prompt="def "
python scripts/generate.py checkpoint=runs/quickstart prompt="import " temperature=0
python scripts/generate.py checkpoint=runs/quickstart prompt="class A:" max_new_tokens=40 top_p=0.9
"""

from llmfoundry.recipe.load import run
from llmfoundry.recipe.tasks import GenerateRecipe

if __name__ == "__main__":
    run(GenerateRecipe, "llmfoundry.commands.generate:generate", help=__doc__)

"""Show what a training run reads at some time, without a model.

    python scripts/inspect_data.py yamls/quickstart.yaml                the first step
    python scripts/inspect_data.py yamls/quickstart.yaml at=1e6tok      the step at a time
    python scripts/inspect_data.py yamls/quickstart.yaml at=0.5dur n=8 json=true
    python scripts/inspect_data.py runs/quickstart/recipe.yaml at=300ba

Tables of that step's rows (slot, stream, shard, row, beginning of the text), of what each stream
has given until then, and of the phases. A corpus that is not prepared yet is prepared first.
"""

from llmfoundry.recipe.inspect import InspectRecipe
from llmfoundry.recipe.load import run

if __name__ == "__main__":
    run(InspectRecipe, "llmfoundry.commands.inspect_data:inspect_data", help=__doc__)

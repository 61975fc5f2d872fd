"""Show what a training run reads at some time, without a model.

    python scripts/inspect_data.py yamls/quickstart.yaml                the first step
    python scripts/inspect_data.py yamls/quickstart.yaml at=1e6tok      the step at a time
    python scripts/inspect_data.py yamls/quickstart.yaml at=0.5dur n=8 json=true
    python scripts/inspect_data.py runs/quickstart/recipe.yaml at=300ba
    python scripts/inspect_data.py yamls/finetune/quickstart-sft.yaml   what is learned, in color

Tables of that step's rows (slot, stream, shard, row, beginning of the text), of what each stream
has given until then, and of the phases. A corpus that is not prepared yet is prepared first. Of
supervised rows the whole text follows: what is learned in green, or {+so+} where there is no
color (NO_COLOR, a pipe), and a line between documents that do not see each other.
"""

from llmfoundry.cli.recipe_types import inspected
from llmfoundry.cli.script import run

if __name__ == "__main__":
    run(inspected, "llmfoundry.cli.commands.inspect_data:inspect_data", help=__doc__)

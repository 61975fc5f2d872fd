"""Turn a checkpoint into a Hugging Face folder, or a Hugging Face model into a checkpoint.

python scripts/convert.py runs/quickstart to=hf output=exported/quickstart
python scripts/convert.py runs/mpt-125m to=hf output=exported/mpt-125m dtype=bf16
python scripts/convert.py from=hf checkpoint=HUB_ID_OR_FOLDER output=runs/imported
"""

from llmfoundry.recipe.front.script import run
from llmfoundry.recipe.scripts.after_training import ConvertRecipe

if __name__ == "__main__":
    run(ConvertRecipe, "llmfoundry.commands.convert:convert", help=__doc__)

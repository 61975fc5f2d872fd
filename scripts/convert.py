"""Turn a checkpoint into a Hugging Face folder or a GGUF file, or a Hugging Face model into one.

python scripts/convert.py runs/quickstart to=hf output=exported/quickstart
python scripts/convert.py runs/mpt-125m to=hf output=exported/mpt-125m dtype=bf16
python scripts/convert.py runs/mpt-125m to=gguf output=exported/mpt-125m.gguf dtype=q8_0
python scripts/convert.py from=hf checkpoint=HUB_ID_OR_FOLDER output=runs/imported
python scripts/convert.py from=hf checkpoint=HUB_ID_OR_FOLDER to=gguf output=exported/model.gguf

Engines: vLLM takes the to=hf folder of Llama, Qwen, GPT-2, Starcoder2, Mixtral and DBRX shapes, but
not MPT's (since 0.29) and not architecture=llmfoundry. transformers' continuous batching is right
for these, and gives wrong tokens without an error for MPT's (ALiBi). llama.cpp takes to=gguf of all
of them. `llmfoundry serve` takes every model.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import ConvertRecipe

if __name__ == "__main__":
    run(ConvertRecipe, "llmfoundry.api.conversion:convert", help=__doc__)

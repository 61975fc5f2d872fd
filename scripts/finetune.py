"""Fine-tune a model on supervised rows, chats, pairs of answers, or text.

    python scripts/finetune.py yamls/finetune/quickstart-sft.yaml
    python scripts/finetune.py yamls/finetune/quickstart-sft.yaml model.pretrained=runs/my-run
    python scripts/finetune.py yamls/finetune/llama-8b-lora.yaml data.paths=my/chats.jsonl
    python scripts/inspect_data.py yamls/finetune/quickstart-sft.yaml          what is learned

A run writes runs/NAME/, as scripts/train.py does; an adapter stands beside each checkpoint in
peft's format. `--help adapter`, `--help data` and so on print a section's keys.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.finetune import FinetuneRecipe

if __name__ == "__main__":
    run(FinetuneRecipe, "llmfoundry.cli.commands.train:train", help=__doc__)

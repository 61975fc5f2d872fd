"""Talk with a checkpoint's model on a terminal; its chat template puts the messages.

python scripts/chat.py runs/quickstart-sft
python scripts/chat.py runs/quickstart-sft temperature=0 system="Remember: key is 41."
echo "Reverse: d a c" | python scripts/chat.py runs/quickstart-sft temperature=0
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.after_training import ChatRecipe

if __name__ == "__main__":
    run(ChatRecipe, "llmfoundry.cli.commands.chat:chat", help=__doc__)

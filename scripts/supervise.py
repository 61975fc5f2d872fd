"""Train a recipe, and start it again when it ends before it is complete, if that is of use.

    python scripts/supervise.py quickstart                           as scripts/train.py takes it
    python scripts/supervise.py yamls/finetune/quickstart-sft.yaml   or as scripts/finetune.py does
    python scripts/supervise.py mpt-7b supervise.act=true            bad machines are taken out

Finds out why an attempt ended (a mistake, numbers, a machine, the network, a hang, a stop), has
suspected machines checked, and decides: again, again without them, or not. Every decision is a line
in the run's events.jsonl. Exit status: 0 complete, 2 a mistake in the recipe, 75 stopped and saved
(run it again), 93 given up (do not), anything else a failure that another start may mend.
"""

from llmfoundry.cli.recipe_types import supervised
from llmfoundry.cli.script import run

if __name__ == "__main__":
    run(supervised, "llmfoundry.cli.commands.supervise:supervise", help=__doc__)

"""Plan a run before money is spent: memory, seconds, days, money, and the fastest layout.

    python scripts/plan.py mpt-7b hardware=8xh100
    python scripts/plan.py llama-8b hardware=64xh100 tokens=15e12 price=2.50
    python scripts/plan.py dbrx hardware=3072xh100 global_train_batch_size=6144 layouts=20
    python scripts/plan.py mpt-7b hardware=8xa100-40gb parallel.activation_checkpointing=auto
    python scripts/plan.py mpt-7b hardware=8xh100 format=json layouts=0                 for programs
    python scripts/plan.py eval dbrx hardware=8xh100      what fits of an evaluation or a server
    python scripts/plan.py --help hardware                                  GPUs, and one's own

No GPU is needed, and nothing is built or downloaded. Of the recipe's own layout: memory by kind,
messages, seconds part by part, MFU. Then the fastest layouts that fit, with what to write to have
the first, and why it is first. Times are computed from data sheets; benchmarks/README.md has them
beside published runs.
"""

from llmfoundry.cli.recipe_types import planned
from llmfoundry.cli.script import run

if __name__ == "__main__":
    run(planned, "llmfoundry.cli.commands.plan:plan", help=__doc__)

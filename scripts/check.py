"""Find the broken GPU, machine or link before a run does; by themselves, or with a run's recipe.

    python scripts/check.py                                   this machine: two minutes or less
    python scripts/check.py quickstart                        and every path that the recipe names
    python scripts/check.py level=quick                       seconds: nothing is computed or sent
    python scripts/check.py health_check.burn_seconds=120     until GPUs are hot
    srun --nodes 4 --ntasks-per-node 8 python scripts/check.py mpt-7b

GPU counters, kernel log, disks, clocks, limits, versions; products, memory bandwidth, and
all-reduces between all pairs. What cannot be looked at says why. Writes check.json and check.html
to output=check. Exit status: 0 nothing is bad, 3 something is, 2 a mistake in the command, 1 the
check itself failed (torchrun, if you start it, makes 1 of every status but 0; read check.json).
"""

from llmfoundry.cli.recipe_types import checked_for
from llmfoundry.cli.script import run

if __name__ == "__main__":
    run(checked_for, "llmfoundry.cli.commands.check:check", help=__doc__)

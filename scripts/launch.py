"""Launch a recipe: on this machine in the background, by ssh, as a job of Slurm or of Kubernetes.

    python scripts/launch.py quickstart                            here; log: runs/quickstart/launch
    python scripts/launch.py mpt-7b launch=ssh 'launch.hosts=[n1,n2]' launch.workdir=/shared/runs
    python scripts/launch.py mpt-7b launch=slurm nodes=4           sbatch, 8 GPUs a machine
    python scripts/launch.py mpt-7b launch=slurm nodes=4 dry_run=true   only print the script
    python scripts/launch.py mpt-7b launch=kubernetes launch.image=me/foundry save_folder=s3://my/run

A supervisor runs there, and starts the run again where that is of use. The composed recipe goes
along (launch.yaml in the run's folder), and launch.json keeps what was launched, from which commit,
and where it is. The same command resumes a run that has ended. Secrets go by their names alone.
"""

from llmfoundry.cli.recipe_types import launched
from llmfoundry.cli.script import run

if __name__ == "__main__":
    run(launched, "llmfoundry.cli.commands.launch:launch", help=__doc__)

"""Make a recipe of LLM Foundry's YAML: training, evaluation, tasks, MCLI.

    python scripts/migrate.py llm-foundry/mpt-125m.yaml
    python scripts/migrate.py theirs.yaml output=ours.yaml
    python scripts/migrate.py llm-foundry/mcli/mcli-1b.yaml output=mpt-1b.yaml

Every setting of the file gets a line: kept, renamed, meaning changed, without effect (why), or not
possible (what to do); and one where its own default is another than ours, which is written
out. Exit status 2 if the result needs an edit before it loads.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.before_training import MigrateRecipe

if __name__ == "__main__":
    run(MigrateRecipe, "llmfoundry.cli.commands.migrate:migrate_file", help=__doc__)

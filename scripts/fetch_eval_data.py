"""Fetch the rows of benchmarks that gauntlets read; this repository holds none.

    git clone --depth 1 https://github.com/mosaicml/llm-foundry ../llm-foundry
    python scripts/fetch_eval_data.py from_foundry=../llm-foundry               rows of v0.3
    python scripts/fetch_eval_data.py gauntlet=eval/gauntlets/light.yaml from_foundry=../llm-foundry
    python scripts/fetch_eval_data.py 'tasks=[arc_easy,piqa,copa]' from_hub=true

Rows of LLM Foundry's repository are those of published results; data sets of the Hugging Face hub
are often newer or longer, and what differs is said for each task. Files that are there are checked,
not fetched again, so a stopped run can be repeated. Exit status 2 if any file is missing at the
end. Each task's rows keep the licence of their source.
"""

from llmfoundry.cli.script import run
from llmfoundry.recipe.before_training import FetchRecipe

if __name__ == "__main__":
    run(FetchRecipe, "llmfoundry.cli.commands.fetch_eval_data:fetch_eval_data", help=__doc__)

"""Prepare a recipe's text: its tokenizer and its shards, and nothing else.

    python scripts/prepare_data.py yamls/quickstart.yaml
    python scripts/prepare_data.py yamls/mpt-125m.yaml data.num_workers=32
    python scripts/prepare_data.py yamls/mpt-125m.yaml prepare.output=s3://bucket/c4
    python scripts/prepare_data.py yamls/mpt-125m.yaml prepare.output=c4 prepare.format=mds

Training prepares what is missing by itself; this does it ahead, on a machine without a GPU. Without
prepare.output the result is where training looks for it, data.cache_folder, keyed by its content.
With it, it is a folder here or at a URL that any run reads: data.name=shards data.remote=FOLDER
data.split=train. A preparation that was stopped resumes where it was.

With teacher=MODEL top_k=64, a model then reads the tokens, and its most probable next tokens are
stored next to them for loss=distill (docs/distillation.md).
"""

from llmfoundry.cli.recipe_types import prepared
from llmfoundry.cli.script import run

if __name__ == "__main__":
    run(prepared, "llmfoundry.cli.commands.prepare_data:prepare_data", help=__doc__)

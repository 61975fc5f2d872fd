"""First look at supervised rows: the mistakes that the first rows show, before all are prepared.

Entry point: `check_first_rows`, which training and `--dry-run` call for each supervised source. The
first rows pass through the same reader, chat template and tokenizer as all rows do later, and
through the same policies for rows that are too long or have no token in the loss.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from llmfoundry.data.supervised.packed_examples import PackOptions, check_lengths
from llmfoundry.data.supervised.prepare_rows import prepare_first_rows
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.data import DataConfig

FIRST_ROWS = 256  # enough for systematic mistakes; takes about a second


def check_first_rows(
    config: DataConfig, options: PackOptions, tokenizer: Tokenizer, *, most: int = FIRST_ROWS
) -> int:
    """Check the first rows of a source.

    Args:
        config: data source, on this machine.
        options: settings of the packing, with the recipe key of the source.
        tokenizer: tokenizer with its chat template.
        most: maximum number of rows.

    Returns:
        The number of rows that were read; at most `most`.

    Raises:
        UserError: the source cannot be read, the template rejects a row, or the recipe treats a row
            as an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = prepare_first_rows(
            config, options.key, tokenizer, Path(folder), seed=options.seed, most=most
        )
        facts = store.facts
        if config.supervised.bad_rows == "error":
            facts.bad.check(options.key, facts.rows, "the first " if facts.rows >= most else "")
        if len(store.examples):
            check_lengths(store, options, tokenizer.token_bytes())
    return facts.rows

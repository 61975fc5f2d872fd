"""What a process sends in a step by each layout: counted, by the formulas, one over the other.

    python -m benchmarks.memory.communication [mpt-7b llama-8b dbrx] [--ranks 512] [--layers 2]

A recipe at its own width, with fewer blocks, takes a step of two microbatches of a row on fake
tensors as the first of so many ranks (`fake_ranks.py`). What it sends is counted by `sent_bytes.py`
and computed by `llmfoundry/plan/communication.py`. The last column is of the kind of message,
among as many processes, that differs most.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from benchmarks.memory.fake_ranks import count, spread
from benchmarks.memory.layouts import LAYOUTS, words
from benchmarks.record import table
from llmfoundry.errors import UserError
from llmfoundry.plan.communication import communication
from llmfoundry.plan.memory import GIB
from llmfoundry.recipe.parallel import LEVELS
from llmfoundry.recipe.parallel_limits import limits
from llmfoundry.recipe.scripts.train import TrainRecipe

RECIPES = ("mpt-7b", "llama-8b", "dbrx")
MICROBATCHES = 2
SENT_COLUMNS = {
    "recipe": "{}",
    "layout": "{}",
    "degrees": "{}",
    "counted GiB": "{:.3f}",
    "formula GiB": "{:.3f}",
    "of counted, formula": "{:.5f}",
    "of counted, that of the worst kind": "{:.5f}",
    "collectives": "{:,}",
}


def formula(recipe: TrainRecipe, ranks: int, microbatch: int) -> Counter[tuple[str, int]]:
    """Bytes by kind of collective and number of processes."""
    found: Counter[tuple[str, int]] = Counter()
    for messages in communication(recipe, ranks, microbatch):
        found[messages.kind, messages.processes] += messages.sent
    return found


def counted(name: str, layout: str, ranks: int, more: list[str]) -> dict[str, object]:
    """A recipe's row of the table; raises UserError where it cannot be spread so."""
    recipe = spread(name, [*words(layout, ranks), "device_train_microbatch_size=1", *more])
    degrees = recipe.parallel.degrees(ranks)
    refused = [*limits(recipe.model, recipe.parallel, degrees)]
    if refused:
        raise UserError(*refused)
    recipe.global_train_batch_size = MICROBATCHES * degrees.data
    _, seen = count(recipe, ranks, microbatches=MICROBATCHES)
    said = formula(recipe, ranks, 1)
    ratios = [said[key] / seen.sent[key] for key in seen.sent]
    assert said.keys() == seen.sent.keys(), f"only one of both: {said.keys() ^ seen.sent.keys()}"
    return {
        "recipe": name,
        "layout": layout,
        "degrees": " ".join(f"{k[0]}{v}" for k, v in vars(degrees).items() if v > 1),
        "counted GiB": seen.sent.total() / GIB,
        "formula GiB": said.total() / GIB,
        "of counted, formula": said.total() / seen.sent.total(),
        "of counted, that of the worst kind": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "collectives": seen.calls.total(),
    }


def sent_rows(names: list[str], ranks: int, more: list[str]) -> Iterator[dict[str, object]]:
    """Of each recipe and each layout that it may have."""
    for name in names:
        for layout in LAYOUTS:
            try:
                yield counted(name, layout, ranks, more)
            except UserError as error:  # such as experts of a model that has none
                print(f"{name} {layout}: {error}")


def sent() -> None:
    """Count each recipe on each layout, and print it beside the formulas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--checkpointing", default="selective", choices=LEVELS)
    given = parser.parse_args()
    more = [
        f"model.n_layers={given.layers}",
        f"parallel.activation_checkpointing={given.checkpointing}",
    ]
    found = list(sent_rows(given.recipes, given.ranks, more))
    print("\n".join([f"sent by one of {given.ranks} ranks", *table(found, SENT_COLUMNS)]))


if __name__ == "__main__":
    sent()

"""The dense model: our trainer, a bare loop and the Hugging Face Trainer, interleaved, as ratios.

    python -m benchmarks.training [--rounds 3] [--steps 16] [--only ours "bare loop"]

`ours` runs as a recipe does by default: packed rows without attention across documents. `full rows`
is the mathematics of the others, for which each row is one document. Takes minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import HEADS, LAYERS, ROWS, SEQ, VOCAB, D
from benchmarks.harness import (
    PRECISIONS,
    contender,
    interleaved,
    measure,
    ours,
    prepare,
    shown,
    speeds,
    table,
    write,
)  # fmt: skip

WARM_UP = 5
MODEL = f"model: {{d_model: {D}, n_heads: {HEADS}, n_layers: {LAYERS}, no_bias: true}}\n"
SIZES = {"d": D, "layers": LAYERS, "heads": HEADS, "vocabulary": VOCAB, "tokens": SEQ, "rows": ROWS}
BARE, FULL = "bare loop", "ours, full rows"
YARDSTICK = {"ours, compiled": "bare loop, compiled"}  # of the others: the bare loop


def main() -> None:
    """Run everything, print a table for each precision, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of each contender")
    parser.add_argument("--only", nargs="+", help="of the contenders; the bare loop is needed")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepare(MODEL, folder / "bench.yaml")
        for precision in PRECISIONS:

            def contenders(turn: int, precision: str = precision) -> dict[str, Any]:
                commands = _commands(recipe, precision, given.steps, turn)
                return {
                    who: partial(measure, words, folder, warm_up=WARM_UP)
                    for who, words in commands.items()
                    if who in (given.only or commands)
                }

            results = interleaved(contenders, rounds=given.rounds)
            found = speeds(results, lambda who: YARDSTICK.get(who, BARE), "bare")
            print("\n".join(["", precision, *table(found, shown("bare"))]), flush=True)
            rows += [{"precision": precision} | row for row in found]
    print(f"\nwritten to {write('training', rows, SIZES | vars(given))}")


def _commands(recipe: Path, precision: str, steps: int, turn: int) -> dict[str, list[str]]:
    mine = partial(ours, recipe, precision, steps)
    bare = partial(contender, "bare_loop", precision=precision, steps=steps)
    return {
        "ours": mine(f"{precision}-{turn}"),
        BARE: bare(),
        FULL: [*mine(f"{precision}-{turn}-full"), "data.attend_across_documents=true"],
        "ours, compiled": [*mine(f"{precision}-{turn}-compiled"), "compile=true"],
        "bare loop, compiled": bare(compiled=True),
        "HF Trainer": contender("hf_trainer", precision=precision, steps=steps),
    }


if __name__ == "__main__":
    main()

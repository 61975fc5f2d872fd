"""The dense model: our trainer, a bare loop and the Hugging Face Trainer by turns, as ratios.

    python -m benchmarks.training.compare [--rounds 3] [--steps 16] [--only ours "bare loop"]

`ours` runs as a recipe does by itself: packed rows, whose documents do not see each other. `whole
rows` is the mathematics of the others, in which all of a row is one text. Takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import table, write
from benchmarks.training.bare import HEADS, LAYERS, ROWS, SEQ, VOCAB, D
from benchmarks.turns import PRECISIONS, by_turns, measure, ours, prepare, shown, speeds

WARM_UP = 5
MODEL = f"model: {{d_model: {D}, n_heads: {HEADS}, n_layers: {LAYERS}, no_bias: true}}\n"
SIZES = {"d": D, "layers": LAYERS, "heads": HEADS, "vocabulary": VOCAB, "tokens": SEQ, "rows": ROWS}
BARE, WHOLE = "bare loop", "ours, whole rows"
YARDSTICK = {"ours, compiled": "bare loop, compiled"}  # whom one is measured by; the bare loop


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
            results = by_turns(
                partial(_commands, recipe, precision, given.steps, given.only),
                partial(measure, folder=folder, warm_up=WARM_UP),
                rounds=given.rounds,
            )
            found = speeds(results, lambda who: YARDSTICK.get(who, BARE), "bare")
            print("\n".join(["", precision, *table(found, shown("bare"))]), flush=True)
            rows += [{"precision": precision} | row for row in found]
    print(f"\nwritten to {write('training', rows, SIZES | vars(given))}")


def _commands(
    recipe: Path, precision: str, steps: int, only: list[str] | None, turn: int
) -> dict[str, list[str]]:
    options = ["--precision", precision, "--steps", str(steps)]
    bare = [sys.executable, "-m", "benchmarks.training.bare", *options]
    mine = partial(ours, recipe, precision, steps)
    commands = {
        "ours": mine(f"{precision}-{turn}"),
        BARE: bare,
        WHOLE: [*mine(f"{precision}-{turn}-whole"), "data.attend_across_documents=true"],
        "ours, compiled": [*mine(f"{precision}-{turn}-compiled"), "compile=true"],
        "bare loop, compiled": [*bare, "--compile"],
        "HF Trainer": [sys.executable, "-m", "benchmarks.training.hf_trainer", *options],
    }
    return {name: words for name, words in commands.items() if name in (only or commands)}


if __name__ == "__main__":
    main()

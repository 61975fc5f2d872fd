"""Inject faults into runs of four processes, and print what became of each.

python -m benchmarks.faults                              all of them: minutes each on two cores
python -m benchmarks.faults "rank killed" "typo in a key"
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.faults import links as links
from benchmarks.faults import machines as machines
from benchmarks.faults import processes as processes
from benchmarks.faults import stores as stores
from benchmarks.faults import supervisor as supervisor
from benchmarks.faults.outcome import NotHereError
from benchmarks.faults.runs import LENGTH, RANKS, SAVE, Place
from benchmarks.faults.table import FAULTS, markdown, row
from benchmarks.harness import write


def main(names: list[str]) -> int:
    """Print the table; write the result where all faults were asked for. 1: not all as expected."""
    if unknown := [name for name in names if name not in FAULTS]:
        print(f"no such fault: {', '.join(unknown)}; there are: {', '.join(FAULTS)}")
        return 2
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="llmfoundry-faults-") as folder:
        place = Place(Path(folder))
        for name in names or FAULTS:
            try:
                outcomes.append(FAULTS[name].outcome(place))
            except NotHereError as why:
                print(f"{name}: not injected: {why}", file=sys.stderr, flush=True)
                continue
            print(f"{name}: {outcomes[-1].seen}", file=sys.stderr, flush=True)
    print(markdown(outcomes))
    if not names:
        settings = {"ranks": RANKS, "steps": LENGTH, "save_interval": SAVE}
        print(f"\nwritten to {write('faults', [row(one) for one in outcomes], settings)}")
    return 0 if all(one.as_expected for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A run that nothing happens to: what is told of it that is not so.

    python -m benchmarks.faults.quiet [STEPS]

Four processes under the supervisor with all that watches a run on, 2,000 steps by default. On a
machine that others use too, a drop of speed or a slow process may be true: load is in the result.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.runs import RANKS, Place
from benchmarks.harness import table, write
from llmfoundry.events import read_events

STEPS = 2000
_EXPECTED = ("start", "decision")
SHOWN = {"run": "{}", "steps": "{}", "events": "{}", "seconds": "{:.0f}", "load": "{:.1f}"}


def measured(steps: int, folder: Path) -> dict[str, Any]:
    """The events of such a run, but for its start and its end."""
    length = (f"max_duration={steps}ba", "save_interval=100ba", "save_num_checkpoints_to_keep=2")
    gpu, pace = "callbacks.watch.gpu=log", "callbacks.plugins.pace.seconds=0"
    loads = [os.getloadavg()[0]]
    with Place(folder / "place").start("quiet", *length, gpu, pace) as run:
        while run.process.poll() is None:
            loads.append(os.getloadavg()[0])
            time.sleep(1.0)
        told = list(read_events(run.folder))
        done = run.steps()
    if run.process.returncode or len(done) != steps:
        raise RuntimeError(run.said()[-3000:])
    false = [e for e in told if e["kind"] not in _EXPECTED or e.get("cause", "done") != "done"]
    for event in false:
        print(f"{event['kind']}: {event['what']}")
    seconds = done[-1].time - done[0].time
    load = sum(loads) / len(loads)
    found: dict[str, Any] = {"run": "quiet", "steps": len(done), "events": len(false)}
    return found | {"seconds": seconds, "load": load}


def main() -> int:
    """Print what was told, and write the result; 1: something was."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory(prefix="llmfoundry-quiet-") as folder:
        row = measured(steps, Path(folder))
    print("\n".join(table([row], SHOWN)))
    print(f"\nwritten to {write('faults-quiet', [row], {'ranks': RANKS})}")
    return 1 if row["events"] else 0


if __name__ == "__main__":
    sys.exit(main())

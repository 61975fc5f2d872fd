"""Compare training speed with a bare PyTorch loop and with the Hugging Face Trainer.

    python scripts/bench.py [--rounds 3] [--steps 16]

Each contender is a process of its own; they take turns on this machine's CPU. Takes minutes.
"""

import argparse

from llmfoundry.bench.compare import compare

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    print(compare(rounds=options.rounds, steps=options.steps))

"""Compare training speed with a bare PyTorch loop and with the Hugging Face Trainer.

    python -m benchmarks [--rounds 3] [--steps 16]
    python -m benchmarks --moe [--rounds 3] [--steps 24]

With --moe mixtures of experts instead: the layer beside a dense one of equal active FLOPs, and the
whole model beside transformers' DBRX under the Hugging Face Trainer. Each contender is a process of
its own; they take turns on this machine's CPU. Takes minutes.
"""

import argparse

from benchmarks.compare import compare
from benchmarks.compare_moe import compare_moe
from llmfoundry.terminal import outlast_readers

if __name__ == "__main__":
    outlast_readers()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moe", action="store_true", help="mixtures of experts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each contender: 16, with --moe 24")
    options = parser.parse_args()
    if options.moe:
        for text in compare_moe(rounds=options.rounds, steps=options.steps or 24):
            print(text, flush=True)
    else:
        print(compare(rounds=options.rounds, steps=options.steps or 16))

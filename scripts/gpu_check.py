r"""Check a GPU from end to end: tests, kernels, speed, memory, losses; one JSON, one page.

    python scripts/gpu_check.py                        25 minutes on the first GPU
    python scripts/gpu_check.py minutes=60
    python scripts/gpu_check.py device=cpu             shrunk: whether the check itself works
    python scripts/gpu_check.py steps=kernels,mfu      some of its steps
    python scripts/gpu_check.py resume=true            continue, after a kill or without time
    python scripts/gpu_check.py wheels=my/wheels       on a machine that has only torch

Writes gpu-check/gpu-check.json and gpu-check.html (output=FOLDER: elsewhere) atomically after every
item; an item that fails, hangs or runs out of memory is a row, and the rest still runs. Steps, in
order of importance: device, tests, layouts, kernels, experts, mfu, memory, activations, loss,
losses, bare, data, save, profile. Exit status: 0 all ran and is right, 1 something is wrong or had
no time, 2 a mistake in the command.

Without a network: torch 2.11 to 2.13, this repository, and a folder with the wheels of hydra-core,
omegaconf, antlr4-python3-runtime, pyyaml, numpy, psutil, tqdm, msgspec, tokenizers, packaging,
jinja2, markupsafe and fsspec; for the tests pytest, pluggy, iniconfig and pygments too. On a
machine with a network and the same Python and processor:
    pip wheel --no-deps -w my/wheels hydra-core omegaconf antlr4-python3-runtime==4.9.3 pyyaml
    pip wheel --no-deps -w my/wheels numpy psutil tqdm msgspec tokenizers packaging fsspec
    pip wheel --no-deps -w my/wheels jinja2 markupsafe pytest pluggy iniconfig pygments
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nothing need be installed

if __name__ == "__main__":
    from benchmarks.gpu_check.wheels import start

    sys.exit(start(sys.argv[1:], __doc__ or ""))

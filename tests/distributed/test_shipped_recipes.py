"""Shipped recipes, shrunk in duration alone, on every layout of two processes beside one process.

Started as users start them, from their own initialization and text, in fp32 and as they are. What
amplifies the rounding of sums in another order, and how far: `llmfoundry/distributed/README.md`.
Every comparison prints its largest relative difference beside the tolerance (`pytest -s`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest

from tests.selection import slow_but
from tests.tiny import ROOT, run

STEPS = 10
FP32 = "precision=fp32"
QUIET = ("eval=off", "logger=none", "callbacks.generate.prompts=[]", "save_interval=0ba")
LAYOUTS = {
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp",),
    "context": ("parallel=fsdp", "parallel.context_parallel_degree=2"),
    "tensor": ("parallel=single", "parallel.tensor_parallel_degree=2"),
    "expert": ("parallel=fsdp", "parallel.expert_parallel_degree=2"),
}
HEADS = {  # as shipped two ranks cannot share them: 3, and of keys and values 1
    "quickstart": "model.n_heads=2",
    "dbrx-tiny": "model.attn_config.kv_n_heads=2",
}
HALVES = {  # of the microbatch that one process takes
    "quickstart": "device_train_microbatch_size=1",
    "dbrx-tiny": "device_train_microbatch_size=4",
}
OWN: tuple[str, ...] = ()
ADAMW = ("optimizer=decoupled_adamw", "optimizer.lr=4e-3")
LION = ("optimizer=decoupled_lionw", "optimizer.lr=4e-4")
FORCED = "model.ffn_config.moe_force_balance=true"  # no router chooses
# The largest relative difference of losses and of gradient norms over the steps, with headroom: of
# the table in llmfoundry/distributed/README.md. Optimizer, or what else amplifies rounding of sums.
DENSE = {
    "muon": (OWN, 1e-6, 1e-5),
    "adamw": (ADAMW, 2e-5, 5e-4),
    "lion": (LION, 1e-4, 1e-3),
}
AMP = {"quickstart": (1e-2, 5e-2), "dbrx-tiny": (3e-2, 4e-1)}  # as shipped: bfloat16 has 8 bits
CHOICES = 2e-2, 2e-1  # once a token has met another expert
NO_CHOICES = 1e-6, 1e-4  # of the same mixture and optimizer
Steps = list[tuple[float, float]]
Train = Callable[..., Steps]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Losses and gradient norms of a recipe's first steps; each run once."""
    folder = tmp_path_factory.mktemp("shipped")

    @cache
    def measured(recipe: str, *overrides: str, processes: int = 1, steps: int = STEPS) -> Steps:
        name = f"run{len(list(folder.glob('runs/*')))}"
        words = [*QUIET, f"max_duration={steps}ba", "log_interval=1ba", f"run_name={name}"]
        words += [f"data.cache_folder={folder / 'cache'}", *overrides]
        run("train.py", ROOT / f"yamls/{recipe}.yaml", *words, cwd=folder, processes=processes)
        lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss/train/total" in row]
        assert [row["time/batch"] for row in rows] == [*range(1, steps + 1)]
        return [(row["loss/train/total"], row["l2_norm/grad/global"]) for row in rows]

    return measured


def compare(found: Steps, expected: Steps, loss: float, norm: float) -> None:
    """Losses and norms within relative tolerances; prints how far they are apart."""
    losses, norms = (
        max(abs(step[i] / alone[i] - 1) for step, alone in zip(found, expected, strict=True))
        for i in (0, 1)
    )
    print(f"loss {losses:.1e} (tolerance {loss:.0e}), norm {norms:.1e} ({norm:.0e})")
    assert losses <= loss and norms <= norm


def on_layout(train: Train, recipe: str, layout: str, *words: str, steps: int) -> tuple[Steps, ...]:
    """Steps on a layout of two processes, and those of one process."""
    if layout == "tensor":
        words = (*words, HEADS[recipe])
    two = train(recipe, *words, *LAYOUTS[layout], processes=2, steps=steps)
    return two, train(recipe, *words, steps=steps)


@pytest.mark.parametrize(
    "layout",
    slow_but(["ddp"], [n for n in LAYOUTS if n != "expert"]),  # test_matrix.py has all
)
def test_the_quickstart_with_muon_has_one_process_losses(train: Train, layout: str) -> None:
    found = on_layout(train, "quickstart", layout, FP32, steps=4)
    compare(*found, *DENSE["muon"][1:])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", DENSE)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expert"])
def test_the_quickstart_with_each_optimizer(train: Train, layout: str, optimizer: str) -> None:
    words, *tolerance = DENSE[optimizer]
    compare(*on_layout(train, "quickstart", layout, FP32, *words, steps=STEPS), *tolerance)


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("quickstart", FP32),
        *(
            pytest.param(recipe, precision, marks=pytest.mark.slow)
            for recipe, precision in (
                ("quickstart", "precision=amp_bf16"),
                ("dbrx-tiny", FP32),
                ("dbrx-tiny", "precision=amp_bf16"),
            )
        ),
    ],
)
def test_two_replicas_are_one_process_with_half_the_microbatch_bit_for_bit(
    train: Train, recipe: str, precision: str
) -> None:
    """What another layout amplifies, another microbatch of one process amplifies as much."""
    alone = train(recipe, precision, HALVES[recipe], steps=4)
    assert train(recipe, precision, *LAYOUTS["ddp"], processes=2, steps=4) == alone


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiny_dbrx_has_one_process_losses_where_no_router_chooses(
    train: Train, layout: str
) -> None:
    found = on_layout(train, "dbrx-tiny", layout, FP32, FORCED, steps=STEPS)
    compare(*found, *NO_CHOICES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiny_dbrx_is_close_until_a_token_meets_another_expert(
    train: Train, layout: str
) -> None:
    found, alone = on_layout(train, "dbrx-tiny", layout, FP32, steps=STEPS)
    compare(found[:1], alone[:1], 1e-6, 1e-5)
    compare(found, alone, *CHOICES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [pair for pair in product(HEADS, LAYOUTS) if pair != ("quickstart", "expert")],
)
def test_recipes_as_shipped_are_close_in_bf16(train: Train, recipe: str, layout: str) -> None:
    compare(*on_layout(train, recipe, layout, steps=STEPS), *AMP[recipe])

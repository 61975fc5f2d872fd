"""The table of layouts in llmfoundry/distributed/README.md is the estimate's, number by number."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from benchmarks.memory import GPU, MEMORY, spread
from llmfoundry.plan.communication import communication
from llmfoundry.plan.fit import choose_fit
from llmfoundry.plan.memory import GIB
from llmfoundry.recipe.parallel import limits
from llmfoundry.recipe.train import TrainRecipe
from tests.selection import slow_but
from tests.tiny import ROOT

README = ROOT / "llmfoundry" / "distributed" / "README.md"
LINES = [line for line in README.read_text().splitlines() if re.match(r"\| [\d,]+ \| `", line)]
ROUTINE = LINES[1::6]
LONG = ["max_seq_len=32768", "global_train_batch_size=512"]


def made(model: str, degrees: str, processes: int) -> TrainRecipe:
    """The recipe of a row of the table."""
    given = dict(re.findall(r"(replicate|shard|context|tensor|expert) (\d+)", degrees))
    words = ["parallel.activation_checkpointing=auto"]
    for name in ("replicate", "shard", "context", "tensor", "expert"):
        of_data = name in ("replicate", "shard")
        key = f"data_parallel_{name}" if of_data else f"{name}_parallel"
        words.append(f"parallel.{key}_degree={given.get(name, 1)}")
    if "32k" in model.partition(",")[2]:
        words += LONG
    elif processes == 3072:
        words.append("global_train_batch_size=6144")
    return spread(model.split("`")[1], words)


@pytest.mark.parametrize("line", slow_but(ROUTINE, LINES))
def test_a_row_of_the_table_is_what_the_estimate_says(line: str) -> None:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    gpus, model, degrees, gib, again, pace, sends, leaves, parts = cells
    processes = int(gpus.replace(",", ""))
    recipe = made(model, degrees, processes)
    spread_by = recipe.parallel.degrees(processes)  # refuses what is not so many
    assert not [*limits(recipe.model, recipe.parallel, spread_by)]
    fit = choose_fit(recipe, world_size=processes, available=MEMORY, device=GPU)
    recipe = fit.choice.apply(recipe)
    times = recipe.global_train_batch_size // spread_by.data // fit.microbatch
    assert fit.need.total(fit.microbatch) / GIB == pytest.approx(float(gib), abs=0.051)
    assert (fit.choice.name, f"{fit.microbatch} x {times}") == (again, pace)
    sent: Counter[str] = Counter()
    messages = communication(recipe, processes, fit.microbatch)
    for message in messages:
        sent[message.what] += message.sent
    between = sum(message.between for message in messages)
    assert between / GIB == pytest.approx(float(leaves), abs=0.51)
    assert sent.total() / GIB == pytest.approx(float(sends), abs=0.51)
    said = {what: float(number) for what, number in re.findall(r"(\w+) ([\d.]+)", parts)}
    seen = {what: count / GIB for what, count in sent.items() if count > 0.1 * GIB}
    assert said == pytest.approx(seen, abs=0.51)

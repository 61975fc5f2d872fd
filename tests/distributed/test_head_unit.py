"""An untied head as an FSDP unit: when it is gathered, how often, and the same gradients.

Losses and weights of whole runs are those of one process in `test_matrix.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from llmfoundry.distributed.fsdp import materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.parallel import ParallelConfig
from tests.models.test_decoder import make_config
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
LAYERS, LENGTH = 3, 11
CONFIG = ParallelConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=2)


def make_root(*, tied: bool) -> Root:
    with torch.device("meta"):
        return Root(Decoder(make_config(n_layers=LAYERS, tie_word_embeddings=tied)))


def batch_of(rank: int, model: Decoder) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(rank)
    tokens = torch.randint(model.config.vocab_size, (2, LENGTH), generator=draws)
    return tokens, tokens.roll(-1, 1)


def objectives(labels: Tensor) -> dict[str, Any]:
    """Functions of the hidden states: whose gradient is computed forward, and only backward."""
    factors = torch.arange(1.0, 1 + labels.numel()).view_as(labels)
    return {
        "loss": lambda model, hidden: model.loss(hidden, labels),
        "log_probs": lambda model, hidden: (model.log_probs(hidden, labels) * factors).sum(),
        "logits": lambda model, hidden: model.head(hidden).square().sum(),
    }


def gradients(root: Root) -> dict[str, list[float]]:
    return {
        name: full_tensor(p.grad).flatten().tolist()
        for name, p in root.model.named_parameters()
        if p.grad is not None
    }


def state_of(root: Root) -> str:
    """Whether the head is sharded, gathered, or on its way."""
    if not isinstance(root.model.head_weight, DTensor):
        return "whole"
    unit: Any = root.head
    group = None if unit is None else unit._get_fsdp_state()._fsdp_param_group
    is_coming = group is not None and group._all_gather_result is not None
    return "coming" if is_coming else "sharded"


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    world = World(rank, 2, rank, CPU)
    meshes, found = build_mesh(CONFIG, world), {}
    for tied in (False, True):
        root = make_root(tied=tied)
        materialize(root, world, meshes, CONFIG, precision="fp32")
        root.model.init_weights(5)
        states: list[tuple[str, str]] = []

        def note(where: str, root: Root = root, states: Any = states) -> None:
            states.append((where, state_of(root)))

        for number, block in enumerate(root.model.blocks):
            block.register_forward_pre_hook(lambda *_, n=number, note=note: note(f"forward {n}"))
            block.norm_1.register_full_backward_hook(
                lambda *_, n=number, note=note: note(f"backward {n}")
            )
        tokens, labels = batch_of(rank, root.model)
        of_case = found[f"tied={tied}"] = {}
        for name, objective in objectives(labels).items():
            states.clear()
            root.zero_grad()

            def finish(model: Decoder, hidden: Tensor, of: Any = objective) -> Tensor:
                note("head")
                return of(model, hidden)

            with CommDebugMode() as collectives:
                root(tokens, None, finish).backward()
            note("behind")
            counts = {str(op).split(".")[-1]: n for op, n in collectives.comm_counts.items()}
            of_case[name] = {
                "states": list(states),
                "counts": counts,
                "gradients": gradients(root),
            }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("head")
    on_ranks(work, (folder,), 2)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("objective", ["loss", "log_probs", "logits"])
def test_the_head_is_whole_from_the_last_block_to_its_own_gradient(
    found: dict[str, Any], objective: str
) -> None:
    states = dict(found["tied=False"][objective]["states"])
    places = [f"{way} {n}" for way in ("forward", "backward") for n in range(LAYERS)]
    expected = dict.fromkeys([*places, "behind"], "sharded")
    assert states == expected | {f"forward {LAYERS - 1}": "coming", "head": "whole"}
    tied = dict(found["tied=True"][objective]["states"])
    assert tied == dict.fromkeys([*places, "head"], "whole") | {"behind": "sharded"}


@pytest.mark.parametrize("objective", ["loss", "log_probs", "logits"])
def test_it_takes_one_collective_each_way(found: dict[str, Any], objective: str) -> None:
    for tied in (False, True):
        counts = found[f"tied={tied}"][objective]["counts"]
        # blocks twice (again in the backward pass), the root and the head once
        units = 1 if tied else 2
        assert sum(n for op, n in counts.items() if "allgather" in op) == 2 * LAYERS + units
        assert sum(n for op, n in counts.items() if "reduce_scatter" in op) == LAYERS + units


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("objective", ["loss", "log_probs", "logits"])
def test_gradients_are_those_of_one_process(
    found: dict[str, Any], objective: str, tied: bool
) -> None:
    root = make_root(tied=tied)
    root.to_empty(device=CPU)
    root.model.init_weights(5)
    for rank in range(2):
        tokens, labels = batch_of(rank, root.model)
        root(tokens, None, objectives(labels)[objective]).backward()
    mine = found[f"tied={tied}"][objective]["gradients"]
    assert mine.keys() == gradients(root).keys()
    for name, values in gradients(root).items():
        torch.testing.assert_close(
            torch.tensor(mine[name]), torch.tensor(values), rtol=2e-5, atol=2e-5, msg=name
        )

"""What a process sends in a step, as its collectives are watched, beside the formulas."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory.fake_ranks import count, read
from benchmarks.memory.sent_bytes import SentBytes
from llmfoundry.assemble.job import build_root
from llmfoundry.estimate.communication import communication
from llmfoundry.parallel.apply import parallelize
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import build_mesh
from llmfoundry.parallel.sharding import replicate
from llmfoundry.recipe.scripts.train import TrainRecipe
from tests.warm_scripts import on_ranks

SMALL = [
    "model.d_model=64",
    "model.n_heads=4",
    "model.n_layers=3",
    "model.vocab_size=512",
    "max_seq_len=32",
    "device_train_microbatch_size=2",
    "parallel.activation_checkpointing=none",
]
SHAPES = {
    "mpt": ("mpt-125m", []),
    "llama": (
        "llama-1b",
        ["model.attn_config.kv_n_heads=4", "model.ffn_config.ffn_hidden_size=96"],
    ),
    "dbrx": ("dbrx-1b", ["model.attn_config.kv_n_heads=4", "model.ffn_config.ffn_hidden_size=16"]),
}
LAYOUTS = {
    "fsdp-8": (8, ["replicate=1", "shard=8"]),
    "fsdp-3": (3, ["replicate=1", "shard=3"]),  # parts that are not even
    "hsdp-4x2": (8, ["replicate=4", "shard=2"]),
}


def make(name: str, ranks: int, degrees: list[str], *words: str) -> TrainRecipe:
    """A recipe shrunk, of two microbatches of two rows."""
    recipe, own = SHAPES[name]
    data = 1
    for degree in degrees:
        key, _, value = degree.partition("=")
        data *= int(value) if key in ("replicate", "shard") else 1
    rows = f"global_train_batch_size={4 * data}"
    spread = [
        f"parallel.{'data_parallel_' if key in ('replicate', 'shard') else ''}{key}"
        f"{'_parallel' if key not in ('replicate', 'shard') else ''}_degree={value}"
        for key, _, value in (degree.partition("=") for degree in degrees)
    ]
    return read(recipe, ranks, [*SMALL, *own, rows, *spread, *words])


def formula(recipe: TrainRecipe, ranks: int) -> Counter[tuple[str, int]]:
    """Bytes by kind and number of processes."""
    found: Counter[tuple[str, int]] = Counter()
    for messages in communication(recipe, ranks, 2):
        found[messages.kind, messages.processes] += messages.sent
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_sent_in_a_step_are_those_of_the_formula(layout: str, shape: str) -> None:
    ranks, degrees = LAYOUTS[layout]
    recipe = make(shape, ranks, degrees)
    _, counted = count(recipe, ranks, microbatches=2)
    assert counted.sent == formula(recipe, ranks)
    assert sum(counted.sent.values()) > 100 * counted.small > 0


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.reshard_after_forward=false"],
        ["parallel.reduce_scatter_each_microbatch=false"],
        ["precision=bf16"],
        ["precision=fp32"],
        ["parallel.activation_checkpointing=whole"],
        ["model.tie_word_embeddings=true"],
    ],
    ids=lambda words: words[0],
)
def test_what_changes_the_bytes_is_in_the_formula(words: list[str]) -> None:
    recipe = make("llama", 8, ["replicate=2", "shard=4"], *words)
    _, counted = count(recipe, 8, microbatches=2)
    assert counted.sent == formula(recipe, 8)


def test_replicas_send_their_gradients_twice_less_their_own(tmp_path: Path) -> None:
    """On gloo: DDP's reducer waits for what a fake group does not give."""
    on_ranks(replicas, (tmp_path,), 2)
    recipe = make("mpt", 2, ["replicate=2", "shard=1"])
    counted = json.loads((tmp_path / "sent.json").read_text())
    assert counted == sum(formula(recipe, 2).values())


def replicas(rank: int, folder: Path) -> None:
    """A forward and a backward pass of DDP."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    recipe = make("mpt", 2, ["replicate=2", "shard=1"])
    world, root = World(rank, 2, rank, torch.device("cpu")), build_root(recipe)
    meshes = build_mesh(recipe.parallel, world)
    parallelize(root, world, meshes, recipe.parallel, precision="fp32")
    root.model.init_weights(1)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    module = replicate(root, meshes)
    with SentBytes() as sent:
        module(tokens, None, lambda model, hidden: model.loss(hidden, tokens)).backward()
    if rank == 0:
        (folder / "sent.json").write_text(json.dumps(sent.sent["all_reduce", 2]))
    dist.destroy_process_group()

"""What a process sends in a step, as its collectives are watched, beside the formulas."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks import layouts, memory
from benchmarks.layouts import formula
from benchmarks.memory import SentBytes, count, read
from llmfoundry.builders.model import build_root
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.fsdp import apply_ddp
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.plan.communication import (
    CollectiveTraffic,
    between_nodes,
    communication,
    spanning,
    waited_for,
)
from llmfoundry.recipe.train import TrainRecipe
from tests.selection import slow_but
from tests.warm_scripts import on_ranks

SMALL = [
    "model.d_model=512",
    "model.n_heads=4",
    "model.n_layers=2",
    "model.vocab_size=512",
    "max_seq_len=128",
    "device_train_microbatch_size=2",
    "parallel.activation_checkpointing=none",
]
SHAPES = {
    "mpt": ("mpt-125m", []),
    "llama": (
        "llama-1b",
        ["model.attn_config.kv_n_heads=4", "model.ffn_config.ffn_hidden_size=96"],
    ),
    "deepseek": (
        "deepseek-v3",
        [
            f"model.attn_config.{key}"
            for key in (
                *("q_lora_rank=640", "kv_lora_rank=576"),
                *("qk_nope_head_dim=32", "qk_rope_head_dim=16", "v_head_dim=24"),
            )
        ]
        + [
            f"model.ffn_config.{key}"
            for key in (
                *("ffn_hidden_size=16", "shared_expert_hidden_size=16", "dense_hidden_size=96"),
                *("moe_num_experts=16", "moe_n_group=4", "moe_topk_group=2", "moe_top_k=4"),
                "first_k_dense_replace=1",
            )
        ],
    ),
    "dbrx": ("dbrx-1b", ["model.attn_config.kv_n_heads=4", "model.ffn_config.ffn_hidden_size=16"]),
}
LAYOUTS = {
    "fsdp-8": (8, "shard=8", ["mpt", "llama", "dbrx"]),
    "fsdp-3": (3, "shard=3", ["mpt", "dbrx"]),  # parts that are not even
    "hsdp-4x2": (8, "replicate=4 shard=2", ["llama", "dbrx"]),
    "tensor-2": (2, "tensor=2", ["mpt", "deepseek"]),
    "hsdp-tensor-2x2x2": (8, "replicate=2 shard=2 tensor=2", ["llama"]),
    "ulysses-4x2": (8, "shard=4 context=2", ["mpt", "dbrx", "deepseek"]),
    "tensor-ulysses-2x2x2": (8, "shard=2 context=2 tensor=2", ["llama"]),
    "expert-8": (8, "shard=8 expert=8", ["dbrx"]),
    "expert-hsdp-2x4": (8, "replicate=2 shard=4 expert=2", ["dbrx"]),
    "expert-tensor-2x2": (8, "shard=4 tensor=2 expert=4", ["dbrx", "deepseek"]),
    "expert-context-2x4": (8, "shard=2 context=4 expert=2", ["dbrx"]),
    "all-16": (16, "replicate=2 shard=2 context=2 tensor=2 expert=4", ["dbrx"]),
    "gathered-2x3": (6, "shard=2 context=3", ["llama", "dbrx"]),  # which does not divide 4 heads
}
CASES = [(layout, shape) for layout, (_, _, shapes) in LAYOUTS.items() for shape in shapes]
ROUTINE = [
    ("hsdp-4x2", "dbrx"),
    ("tensor-2", "mpt"),
    ("tensor-ulysses-2x2x2", "llama"),
    ("gathered-2x3", "llama"),
    ("tensor-2", "deepseek"),
]
CHANGES = [  # of a shape on so many processes
    ("llama", "replicate=2 shard=4", "parallel.reshard_after_forward=false"),
    ("llama", "replicate=2 shard=4", "parallel.reduce_scatter_each_microbatch=false"),
    ("llama", "replicate=2 shard=4", "precision=bf16"),
    ("llama", "replicate=2 shard=4", "parallel.activation_checkpointing=whole"),
    ("llama", "replicate=2 shard=4", "model.tie_word_embeddings=true"),
    ("llama", "shard=4 tensor=2", "precision=fp32"),
    ("llama", "shard=4 tensor=2", "precision=bf16"),
    ("llama", "shard=4 tensor=2", "parallel.activation_checkpointing=whole"),
    ("llama", "shard=4 tensor=2", "parallel.activation_checkpointing=selective"),
    ("llama", "shard=4 tensor=2", "max_seq_len=127"),
    ("llama", "shard=4 context=2", "parallel.activation_checkpointing=whole"),
    ("llama", "shard=4 context=2", "parallel.activation_checkpointing=selective"),
    ("llama", "shard=1 context=8", "parallel.activation_checkpointing=selective"),
    ("llama", "shard=1 context=8", "max_seq_len=165"),
    ("llama", "shard=2 context=4", "model.attn_config.kv_n_heads=2"),
    ("dbrx", "shard=4 tensor=2 expert=4", "parallel.activation_checkpointing=whole"),
    ("dbrx", "shard=4 tensor=2 expert=4", "parallel.activation_checkpointing=selective"),
    ("dbrx", "shard=2 context=4 expert=8", "parallel.activation_checkpointing=whole"),
    ("dbrx", "shard=8 expert=4", "parallel.activation_checkpointing=selective"),
    ("dbrx", "shard=8 expert=4", "precision=bf16"),
    ("deepseek", "shard=4 tensor=2 expert=4", "parallel.activation_checkpointing=whole"),
    ("deepseek", "shard=4 tensor=2 expert=4", "parallel.activation_checkpointing=selective"),
    ("deepseek", "shard=4 tensor=2", "model.attn_config.q_lora_rank=null"),
    ("deepseek", "shard=2 context=4", "parallel.context_parallel_method=all_gather"),
    ("dbrx", "shard=8 expert=4", "parallel.expert_capacity=1.5"),
    ("dbrx", "shard=4 tensor=2 expert=4", "parallel.expert_capacity=9"),  # four is all
    ("mpt", "shard=4 tensor=2", "parallel.reduce_scatter_each_microbatch=false"),
    ("mpt", "shard=4 tensor=2", "model.no_bias=false"),
]


KINDS_OF_TORCH = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def make(name: str, ranks: int, degrees: str, *words: str) -> TrainRecipe:
    """A recipe shrunk, of two microbatches of two rows."""
    recipe, own = SHAPES[name]
    spread, data = {"data_parallel_replicate": "1"}, 1
    for degree in degrees.split():
        key, _, value = degree.partition("=")
        of_data = key in ("replicate", "shard")
        data *= int(value) if of_data else 1
        spread[f"data_parallel_{key}" if of_data else f"{key}_parallel"] = value
    rows = f"global_train_batch_size={4 * data}"
    layout = [f"parallel.{key}_degree={value}" for key, value in spread.items()]
    return read(recipe, ranks, [*SMALL, *own, rows, *layout, *words])


@pytest.mark.parametrize("case", slow_but(ROUTINE, CASES))
def test_bytes_sent_in_a_step_are_those_of_the_formula(case: tuple[str, str]) -> None:
    layout, shape = case
    ranks, degrees, _ = LAYOUTS[layout]
    recipe = make(shape, ranks, degrees)
    _, counted = count(recipe, ranks, microbatches=2)
    assert counted.sent == formula(recipe, ranks, 2)
    said = {(each.kind, each.processes, each.apart) for each in communication(recipe, ranks, 2)}
    assert counted.groups == said  # which ranks: what leaves a node follows from them
    assert sum(counted.sent.values()) > 100 * counted.small > 0


@pytest.mark.parametrize("change", slow_but(CHANGES[3:4], CHANGES))
def test_what_changes_the_bytes_is_in_the_formula(change: tuple[str, str, str]) -> None:
    shape, degrees, words = change
    recipe = make(shape, 8, degrees, words)
    _, counted = count(recipe, 8, microbatches=2)
    assert counted.sent == formula(recipe, 8, 2)


BETWEEN = [  # kind, processes, ranks apart, of so many, on nodes of so many: share that leaves one
    ("all_to_all", 8, 1, 512, 8, 0.0),
    ("all_to_all", 16, 1, 512, 8, 8 / 15),
    ("all_to_all", 16, 1, 512, 4, 12 / 15),
    ("all_to_all", 4, 4, 32, 8, 2 / 3),  # two of a node
    ("all_to_all", 4, 1, 12, 6, 2 / 9),  # one group of three lies on two nodes
    ("all_gather", 128, 1, 512, 8, 1 / 8),  # one of eight links of a ring's node leads out
    ("all_gather", 16, 8, 512, 8, 1.0),
    ("all_gather", 64, 2, 512, 8, 1 / 4),
    ("all_reduce", 4, 128, 512, 8, 1.0),
    ("all_reduce", 8, 1, 8, 8, 0.0),
    ("reduce_scatter", 6, 1, 12, 8, 2 / 12),  # the second group alone, twice
]


@pytest.mark.parametrize("case", BETWEEN, ids=lambda case: "-".join(map(str, case[:5])))
def test_what_leaves_a_node(case: tuple[str, int, int, int, int, float]) -> None:
    kind, processes, apart, world, node, share = case
    messages = CollectiveTraffic("x", kind, processes, apart, 1 << 30)
    assert between_nodes(messages, world, node) == pytest.approx(share)


@pytest.mark.parametrize(("expert", "waits", "most"), [(8, 0.952, 0.50), (16, 4.31, 0.41)])
def test_experts_within_a_node_are_waited_for_less(expert: int, waits: float, most: float) -> None:
    """By hand: 7/8 of 360 GiB at 360 GB/s; 1/2 of it at 45 GB/s; 960 times 14 or 18 us.

    `most`: MFU with products at 70 % of peak, blocks computed again, these waits and nothing else.
    """
    degrees = ["replicate_degree=4", "shard_degree=128"]
    layout = [f"parallel.data_parallel_{degree}" for degree in degrees]
    recipe = read("dbrx", 512, [*layout, f"parallel.expert_parallel_degree={expert}"])
    rows = recipe.device_train_microbatch_size
    assert rows == 4 and recipe.parallel.activation_checkpointing == "whole"
    one = layouts.Built(recipe, True, 0.0, 0, 0, (0, 0), [], 0.0)
    assert waited_for(one.messages, layouts.H100) == pytest.approx(waits, abs=0.01)
    assert 0.7 * most < one.step.mfu(layouts.H100) < most
    lines = [*spanning(recipe, 512, rows, 8)]
    assert len(lines) == (expert == 16)
    for line in lines:
        assert line.startswith("parallel.expert_parallel_degree: 16 spans nodes of 8 processes")
        assert "about 4.3 s" in line and line.endswith("at most 8 stays inside")


class Unplaced(nullcontext[None]):
    """For CommDebugMode, which loses its place among blocks whose forward pass is replaced."""

    name, is_bw, activation_checkpointing = "Global", False, False
    module_parents_dict: ClassVar[dict[str, set[str]]] = {"Global": set()}


class BothModes(SentBytes):
    """Ours, and torch's around it."""

    def __enter__(self) -> BothModes:
        self.theirs = CommDebugMode()
        self.theirs.advanced_module_tracker = Unplaced()  # type: ignore[assignment]
        self.theirs.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.theirs.__exit__(*error)


@pytest.mark.parametrize("case", slow_but([("all-16", "dbrx")], CASES))
def test_torch_s_own_debug_mode_sees_as_many_collectives(
    case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, shape = case
    ranks, degrees, _ = LAYOUTS[layout]
    monkeypatch.setattr(memory, "SentBytes", BothModes)
    _, counted = count(make(shape, ranks, degrees), ranks, microbatches=2)
    assert isinstance(counted, BothModes)
    theirs: Counter[str] = Counter()
    for operator, calls in counted.theirs.get_comm_counts().items():
        theirs[KINDS_OF_TORCH[operator.__name__]] += calls
    assert theirs == counted.calls


def test_replicas_send_their_gradients_twice_less_their_own(tmp_path: Path) -> None:
    """On gloo: DDP's reducer waits for what a fake group does not give."""
    on_ranks(replicas, (tmp_path,), 2)
    recipe = make("mpt", 2, "replicate=2")
    counted = json.loads((tmp_path / "sent.json").read_text())
    assert counted == sum(formula(recipe, 2, 2).values())


def replicas(rank: int, folder: Path) -> None:
    """A forward and a backward pass of DDP."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    recipe = make("mpt", 2, "replicate=2")
    world, root = World(rank, 2, rank, torch.device("cpu")), build_root(recipe)
    meshes = build_mesh(recipe.parallel, world)
    parallelize(root, world, meshes, recipe.parallel, precision="fp32")
    root.model.init_weights(1)
    tokens = torch.zeros(2, 128, dtype=torch.long)
    module = apply_ddp(root, meshes)
    with SentBytes() as sent:
        module(tokens, None, lambda model, hidden: model.loss(hidden, tokens)).backward()
    if rank == 0:
        (folder / "sent.json").write_text(json.dumps(sent.sent["all_reduce", 2]))
    dist.destroy_process_group()

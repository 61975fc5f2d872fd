"""Every layout of processes takes the steps of one process: losses, norms, weights.

Each number of processes is started once and runs all its layouts. Rows have very different numbers
of labels, one process has none at all, and no microbatch divides its rows; what they are compared
with is a plain loop over whole batches that shares nothing with `train_step`.

A mixture of experts takes them too. Bytes of gradients that wait between microbatches are counted.

Some meshes have an axis beside those of data: processes along it, such as those of a tensor group,
read the same rows and count them once.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.memory.live_bytes import LiveBytes
from llmfoundry.assemble.data import build_loader
from llmfoundry.assemble.evaluate import build_evaluated, build_validation
from llmfoundry.assemble.job import weight_dtype
from llmfoundry.gauntlet.questions import Prompt, Request
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.ops.layout import Layout
from llmfoundry.parallel.apply import parallelize
from llmfoundry.parallel.context import token_cut
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import build_mesh, on_mesh
from llmfoundry.parallel.sharding import replicate as wrap
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.values.duration import Clock, Duration
from llmfoundry.train.optimizer_monitor import OptimizerMonitor
from llmfoundry.train.optimizers.optim import build_optimizer
from llmfoundry.train.step import Guard, train_step
from tests.models.test_decoder import make_config
from tests.train.test_preference_reference import Run
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
STEPS, ROWS, LENGTH, CLIP = 4, 12, 16, 0.5
EPS = 1e-4  # AdamW's: an element whose gradient is hardly more than rounding hardly moves
MICROBATCH = {1: 5, 2: 4, 4: 2, 6: 1}  # of 12, 6, 3 and 2 rows a process
EXPERTS: dict[str, Any] = {  # as DBRX has them, with both losses of its routers
    "no_bias": True,
    "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True},
    "ffn_config": {
        "ffn_type": "dmoe",
        "mlp_type": "glu",
        "ffn_act_fn": "silu",
        "ffn_hidden_size": 16,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_loss_weight": 0.05,
        "moe_zloss_weight": 0.01,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "shared": {"ffn_config": {"shared_expert_hidden_size": 24, "moe_normalize_expert_weights": 1}},
    "biases": {"no_bias": False},
    "bias": {
        "ffn_config": {
            "moe_balancing": "bias",
            "moe_loss_weight": None,
            "moe_bias_update_rate": 0.1,
            "moe_normalize_expert_weights": 2,
        }
    },
    "reference": {"ffn_config": {"moe_impl": "torch", "mlp_type": "mlp", "moe_top_k": 3}},
}
SHAPES: dict[str, dict[str, Any]] = {  # of models without experts
    "": {},
    "alibi": {"no_bias": True, "attn_config": {"alibi": True, "clip_qkv": 6}},
    "gqa": {"no_bias": True, "norm_type": "rmsnorm", "attn_config": EXPERTS["attn_config"]},
    "untied": {  # neither 2 nor 4 processes divide the vocabulary
        "vocab_size": 67,
        "tie_word_embeddings": False,
        "attn_config": {"qk_gn": True},
    },
}
REQUESTS = [Request((n, 5, 9, 7), (7, n), "a") for n in range(1, 8)]
LABELS = (16, 1, 9, 2, 16, 3, 0, 0, 0, 16, 5, 1)  # of each row; on 4 processes the third has none


@dataclass(frozen=True)
class Entry:
    """A layout of processes, and how its blocks are run."""

    processes: int
    replicate: int = 1
    shard: int = 1
    checkpointing: bool | str = False
    compiled: bool = False
    precision: str = "fp32"
    once: bool = False
    """Gradients are reduce-scattered once a step, not after every microbatch."""
    experts: bool = False
    expert: int = 1
    """Processes that share a layer's experts."""
    variant: str = ""
    """Of the mixture: one of VARIANTS; without experts one of SHAPES."""
    context: int = 1
    """Processes that share the tokens of each row."""
    method: str | None = None
    """How they do."""
    tensor: int = 1
    """Processes that share matrices."""

    @property
    def data_size(self) -> int:
        return self.replicate * self.shard

    @property
    def config(self) -> ParallelConfig:
        """What a recipe says, filled."""
        config = ParallelConfig(
            data_parallel_replicate_degree=self.replicate,
            data_parallel_shard_degree=self.shard,
            expert_parallel_degree=self.expert,
            context_parallel_degree=self.context,
            context_parallel_method=self.method,
            tensor_parallel_degree=self.tensor,
            activation_checkpointing=self.checkpointing,
        )
        config.fill()
        return config


ENTRIES = {
    "one": Entry(1),
    "one-checkpointing": Entry(1, checkpointing=True),
    "ddp-2": Entry(2, replicate=2),
    "fsdp-2": Entry(2, shard=2),
    "fsdp-2-checkpointing": Entry(2, shard=2, checkpointing=True),
    "ddp-2-compiled": Entry(2, replicate=2, compiled=True),
    "fsdp-2-compiled-checkpointing": Entry(2, shard=2, checkpointing=True, compiled=True),
    "ddp-4": Entry(4, replicate=4),
    "fsdp-4": Entry(4, shard=4),
    "hsdp-2x2": Entry(4, replicate=2, shard=2),
    "hsdp-2x2-checkpointing": Entry(4, replicate=2, shard=2, checkpointing=True),
    "fsdp-2-once": Entry(2, shard=2, once=True),
    "hsdp-2x2-once": Entry(4, replicate=2, shard=2, once=True),
    "fsdp-2-experts": Entry(2, shard=2, experts=True),
    "fsdp-4-experts": Entry(4, shard=4, experts=True),
    "hsdp-2x2-experts": Entry(4, replicate=2, shard=2, experts=True),
    "expert-2-selective": Entry(
        2, shard=2, experts=True, expert=2, variant="shared", checkpointing="selective"
    ),
    "expert-2-fsdp-4": Entry(4, shard=4, experts=True, expert=2),
    "expert-2-hsdp-2x2": Entry(
        4, replicate=2, shard=2, experts=True, expert=2, variant="bias", checkpointing=True
    ),
    "ulysses-2": Entry(2, context=2, method="ulysses", variant="alibi"),
    "gather-2-checkpointing": Entry(
        2, context=2, method="all_gather", variant="gqa", checkpointing=True
    ),
    "ulysses-4": Entry(4, context=4, method="ulysses", variant="gqa"),
    "gather-2-hsdp": Entry(4, replicate=2, context=2, method="all_gather", experts=True),
    "ulysses-2-expert-2-selective": Entry(
        4, shard=2, context=2, experts=True, expert=2, variant="shared", checkpointing="selective"
    ),
    "tensor-2": Entry(2, tensor=2),
    "tensor-2-expert-2": Entry(
        2, tensor=2, experts=True, expert=2, variant="shared", checkpointing=True
    ),
    "tensor-2-fsdp-2-selective": Entry(
        4, shard=2, tensor=2, variant="gqa", checkpointing="selective"
    ),
    "tensor-2-replicas-2": Entry(4, replicate=2, tensor=2, variant="untied"),
    "tensor-4": Entry(4, tensor=4, variant="alibi"),
}
EXPERT_2 = Entry(2, shard=2, experts=True, expert=2)
SLOW = {  # behind `slow`: the product of what the others have singly
    **{f"expert-2-{variant}": replace(EXPERT_2, variant=variant) for variant in VARIANTS},
    "expert-2-once": replace(EXPERT_2, once=True),
    "expert-2-checkpointing": replace(EXPERT_2, checkpointing=True),
    "expert-2-compiled": replace(EXPERT_2, compiled=True, variant="shared"),
    "expert-2-compiled-checkpointing": replace(EXPERT_2, compiled=True, checkpointing=True),
    "expert-4": Entry(4, shard=4, experts=True, expert=4),
    "expert-2-hsdp-2x2-once": Entry(4, replicate=2, shard=2, experts=True, expert=2, once=True),
    "expert-2-fsdp-4-selective": Entry(
        4, shard=4, experts=True, expert=2, variant="shared", checkpointing="selective"
    ),
    # 64 rows of experts' matrices over 3 processes: shards are uneven
    "expert-2-fsdp-6": Entry(6, shard=6, experts=True, expert=2, variant="biases"),
    "expert-2-hsdp-3x2": Entry(
        6, replicate=3, shard=2, experts=True, expert=2, variant="shared", checkpointing=True
    ),
}
CONTEXTS = {
    "2": Entry(2, context=2),
    "4": Entry(4, context=4),
    "2-fsdp-2": Entry(4, shard=2, context=2),
    "2-replicas-2": Entry(4, replicate=2, context=2),
}
MODELS = {  # MPT's, grouped queries with rotary positions, DBRX's
    "mpt": {"variant": "alibi"},
    "gqa": {"variant": "gqa"},
    "dbrx": {"experts": True},
}
HOWS: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing": {"checkpointing": True},
    "selective": {"checkpointing": "selective"},
    "compiled": {"compiled": True},
    "once": {"once": True},
}
for (layout, entry), method, (model, shape), (how, blocks) in product(
    CONTEXTS.items(), ("ulysses", "all_gather"), MODELS.items(), HOWS.items()
):
    SLOW[f"{method}-{layout}-{model}-{how}"] = replace(entry, method=method, **shape, **blocks)
EIGHT = Entry(8, shard=4, context=2, experts=True, expert=2)
SLOW |= {
    "ulysses-2-expert-2-fsdp-4": EIGHT,
    "gather-2-expert-2-fsdp-4": replace(EIGHT, method="all_gather", checkpointing=True),
    "ulysses-4-expert-8-fsdp-2": replace(EIGHT, shard=2, context=4, expert=8),
    "gather-4-expert-4-replicas-2": replace(
        EIGHT, replicate=2, shard=1, context=4, expert=4, method="all_gather"
    ),
    "gather-2-expert-4-hsdp-2x2": replace(
        EIGHT, replicate=2, shard=2, expert=4, method="all_gather", checkpointing="selective"
    ),
    "ulysses-8-gathered": Entry(8, context=8, variant="gqa"),
    "ulysses-2-tensor-2": Entry(4, context=2, tensor=2, variant="gqa"),
    "gather-2-tensor-2": Entry(4, context=2, tensor=2, variant="alibi", method="all_gather"),
    "ulysses-2-tensor-2-fsdp-2": Entry(
        8, shard=2, context=2, tensor=2, variant="alibi", checkpointing=True
    ),
}
TENSORS = {
    "2": Entry(2, tensor=2),
    "2-fsdp-2": Entry(4, shard=2, tensor=2),
    "2-replicas-2": Entry(4, replicate=2, tensor=2),
}
for (layout, entry), (model, shape), (how, blocks) in product(
    TENSORS.items(), (MODELS | {"untied": {"variant": "untied"}}).items(), HOWS.items()
):
    SLOW[f"tensor-{layout}-{model}-{how}"] = replace(entry, **shape, **blocks)
MIXED = Entry(8, shard=2, context=2, tensor=2, experts=True)
SLOW |= {
    "tensor-4-untied": Entry(4, tensor=4, variant="untied", checkpointing="selective"),
    "tensor-2-fsdp-2-expert-4": Entry(4, shard=2, tensor=2, experts=True, expert=4),
    "tensor-2-fsdp-2-expert-2": Entry(
        4, shard=2, tensor=2, experts=True, expert=2, variant="bias", checkpointing="selective"
    ),
    "tensor-2-ulysses-2-fsdp-2": MIXED,
    "tensor-2-gather-2-expert-8": replace(MIXED, expert=8, method="all_gather"),
    "tensor-2-hsdp-2x2-expert-2": Entry(
        8, replicate=2, shard=2, tensor=2, experts=True, expert=2, variant="biases", once=True
    ),
}
LOW = {
    "tensor-2-bf16": Entry(2, tensor=2, precision="bf16"),
    "one-bf16": Entry(1, precision="bf16"),
    "ddp-2-bf16": Entry(2, replicate=2, precision="bf16"),
    "fsdp-2-bf16": Entry(2, shard=2, precision="bf16"),
    "hsdp-2x2-bf16": Entry(4, replicate=2, shard=2, precision="bf16"),
}


def global_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for row, kept in enumerate(LABELS):
        labels[row, kept:] = IGNORE
    return Batch(
        tokens, labels, Layout.from_lengths([[1 + row, LENGTH - 1 - row] for row in range(ROWS)])
    )


def share(batch: Batch, world: World) -> Batch:
    """This process's rows."""
    return list(batch.split(ROWS // world.data_size))[world.data_rank]


def make_optimizer_config() -> OptimizerConfig:
    config = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1, eps=EPS)
    config.fill()
    return config


def take_steps(entry: Entry, world: World) -> dict[str, Any]:
    """Losses and gradient norms of each step, and all norms after the last.

    Of the last step also `held`: bytes that it has made and keeps as each microbatch begins.
    """
    config = entry.config
    mesh = build_mesh(config, world)
    world = on_mesh(world, mesh)
    with torch.device("meta"):
        root = Root(make_decoder(entry.experts, entry.variant)).to(weight_dtype(entry.precision))
    mode = "default" if entry.compiled else None
    parallelize(root, world, mesh, config, precision=entry.precision, compile_mode=mode)
    root.model.init_weights(5)
    module = wrap(root, mesh)
    optimizer = build_optimizer(root.model, make_optimizer_config())
    monitor, trainer = OptimizerMonitor(), SimpleNamespace(root=root, optimizer=optimizer)
    losses, norms, live, held = [], [], LiveBytes(), list[int]()
    for step in range(STEPS):
        watched = step == STEPS - 1 and entry.shard > 1 and not entry.compiled
        if watched:
            root.register_forward_pre_hook(lambda *_: held.append(live.settled()), prepend=True)
        with live if watched else nullcontext():
            result = train_step(
                module,
                optimizer,
                share(global_batch(step), world),
                number=step,
                microbatch=MICROBATCH[world.data_size],
                autocast=nullcontext,
                clipping=GradientClippingConfig("norm", CLIP),
                guard=Guard(CPU),
                data_group=world.data_group,
                token_group=world.token_group,
                cut=token_cut(root),
                reduce_scatter_each=not entry.once,
                on_gradients=partial(monitor.on_gradients, trainer),  # type: ignore[arg-type]
            )
        assert result.count == sum(LABELS)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    found = monitor.measure(trainer)  # type: ignore[arg-type]
    metrics = {name: value.item() for name, value in found.items()}
    return {"loss": losses, "norm": norms, "metrics": metrics, "held": held}


def beside_data(world: World) -> World:
    """Two shares of rows on four processes; neighbours read the same."""
    config = ParallelConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2)
    return on_mesh(world, build_mesh(config, world))


def make_decoder(experts: bool, variant: str = "") -> Decoder:
    if not experts:
        return Decoder(make_config(n_layers=2, **SHAPES[variant]))
    changes = VARIANTS[variant]
    ffn = EXPERTS["ffn_config"] | changes.get("ffn_config", {})
    return Decoder(make_config(n_layers=2, **EXPERTS | changes | {"ffn_config": ffn}))


def measured(world: World, folder: Path) -> dict[str, Any]:
    """What is made of a share of the rows: batches, the reference, validation, the gauntlet."""
    run = Run(folder)
    job = run.job = replace(run.job, world=world)
    run.begin()
    recipe, config = job.recipe, EvalConfig()
    recipe.global_train_batch_size = 4
    clock = Clock(4, 4 * recipe.max_seq_len, 2, Duration.parse("2ba"))
    subject = build_evaluated(job, config, 1)
    found = {
        "rows": build_loader(recipe, run.data, clock, job.tokenizer, world).rows(1).ids.tolist(),
        "references": [x for row in run.rows for x in row.references.ravel().tolist()],
        "preference": {  # rewards are rounding alone: the model is its reference
            name: value
            for name, value in build_validation(job, config, 1)().items()
            if not name.startswith("rewards/")
        },
        "scores": [score.logprob for score in subject.score(REQUESTS)],
        "texts": subject.generate([Prompt((n, 7), "", (), 4) for n in range(1, 6)]),
    }
    recipe.preference.name = "none"
    return found | {"language": build_validation(job, config, 1)()}


def work(rank: int, size: int, folder: Path, slow: bool = False) -> None:
    """All entries of so many processes."""
    torch.set_num_threads(1)
    if size > 1:
        meeting = f"file://{folder}/meeting{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    compile = torch.compile  # inductor would take a minute
    torch.compile = lambda f, *, mode: compile(f, backend="aot_eager")  # type: ignore[assignment]
    try:
        found = {
            name: take_steps(entry, World(rank, size, rank, CPU))
            for name, entry in (SLOW if slow else ENTRIES | LOW).items()
            if entry.processes == size
        }
    finally:
        torch.compile = compile
    if size != 2 and not slow:
        world = World(rank, size, rank, CPU)
        world = world if size == 1 else beside_data(world)
        text = json.dumps(measured(world, folder / f"cache-{size}-{rank}"))
        (folder / f"measured-{size}-{rank}.json").write_text(text)
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every entry gave."""
    folder, results = tmp_path_factory.mktemp("matrix"), {}
    for size in (1, 2, 4):
        if size == 1:
            work(0, 1, folder)
        else:
            on_ranks(work, (size, folder), size)
        results |= json.loads((folder / f"{size}.json").read_text())
        for file in folder.glob(f"measured-{size}-*.json"):
            results[file.stem] = json.loads(file.read_text())
    return results


@pytest.fixture(scope="module")
def found_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every entry of SLOW gave."""
    folder, results = tmp_path_factory.mktemp("slow"), {}
    for size in sorted({entry.processes for entry in SLOW.values()}):
        on_ranks(work, (size, folder, True), size)
        results |= json.loads((folder / f"{size}.json").read_text())
    return results


@cache
def plain(
    experts: bool = False, variant: str = ""
) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses, gradient norms, and the last weights' norms, of a loop as one would write it."""
    model = make_decoder(experts, variant)
    model.init_weights(5)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=EPS, foreach=False
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step)
        hidden, routing = model.run(batch.tokens, batch.layout)
        logits = model.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        if routing is not None:
            loss = loss + sum(routing.losses.values()) / ROWS
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if variant == "bias":
            assert routing is not None
            for block, load in zip(model.blocks, routing.load, strict=True):
                block.ffn.router.bias_steps += (load.mean() - load).sign().int()
    return (
        losses,
        norms,
        {n: float(p.detach().double().norm()) for n, p in model.named_parameters()},
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_losses_norms_and_weights_are_those_of_a_plain_loop(
    found: dict[str, Any], name: str
) -> None:
    compare(ENTRIES[name], found[name])
    if not ENTRIES[name].experts and not ENTRIES[name].variant:
        assert found[name]["metrics"] == pytest.approx(found["one"]["metrics"], rel=2e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_layouts_too(found_slow: dict[str, Any], name: str) -> None:
    compare(SLOW[name], found_slow[name])
    watched = SLOW[name].shard > 1 and not SLOW[name].compiled
    if watched and SLOW[name].processes < 6:  # whose shards are padded
        compare_held(SLOW[name], found_slow[name]["held"])


def compare(entry: Entry, found: dict[str, Any]) -> None:
    """Losses, norms and weights with a plain loop's."""
    losses, norms, weights = plain(entry.experts, entry.variant)
    assert min(norms) > CLIP, "the bound must bind"
    assert found["loss"] == pytest.approx(losses, rel=1e-6)
    assert found["norm"] == pytest.approx(norms, rel=1e-6)
    metrics = found["metrics"]
    for parameter, norm in weights.items():
        assert metrics[f"l2_norm/param/{parameter}"] == pytest.approx(norm, rel=1e-5, abs=2e-6)
    gradients = [value for key, value in metrics.items() if key.startswith("l2_norm/grad/")]
    assert math.hypot(*gradients) == pytest.approx(norms[-1], rel=1e-5)


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e.shard > 1 and not e.compiled])
def test_gradients_between_microbatches_are_of_the_shard_alone(
    found: dict[str, Any], name: str
) -> None:
    compare_held(ENTRIES[name], found[name]["held"])


def compare_held(entry: Entry, found: list[int]) -> None:
    """4 bytes for each parameter of the shard; of the whole model where they wait for the last."""
    model = make_decoder(entry.experts, entry.variant)
    sizes = {n: 4 * p.numel() for n, p in model.named_parameters()}
    whole, whole_experts = sum(sizes.values()), sum(sizes[n] for n in sizes if ".experts." in n)
    before, *held = found
    assert len(held) == -(-ROWS // entry.data_size // MICROBATCH[entry.data_size]) - 1 > 0
    alike = sum(size for name, size in sizes.items() if name.endswith(OF_ALL_TENSOR_RANKS))
    here = (whole - alike) / entry.tensor + alike  # of a process, were there no FSDP
    for bytes_held in held:
        gradients = here if entry.once else here / (entry.shard * entry.context)
        if entry.once and entry.expert > 1:
            gradients = whole - whole_experts * (1 - 1 / entry.expert)
        assert bytes_held - before == pytest.approx(gradients, rel=0.02)


OF_ALL_TENSOR_RANKS = (
    *("norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias", "norm_f.weight"),
    *("norm_f.bias", "wpe.weight", "out_proj.bias", "down_proj.bias"),
)


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_weights_stay_near_fp32_on_every_layout(found: dict[str, Any], name: str) -> None:
    assert found[name]["loss"] == pytest.approx(plain()[0], abs=0.03)
    assert found[name]["loss"] != pytest.approx(plain()[0], abs=1e-5)


def test_processes_beside_the_data_axes_read_the_same_rows(found: dict[str, Any]) -> None:
    alone = found["measured-1-0"]["rows"]
    assert len(alone) == 4 and alone[:2] != alone[2:]
    for rank in range(4):
        first = rank // 2 * 2
        assert found[f"measured-4-{rank}"]["rows"] == alone[first : first + 2]


def test_each_row_is_counted_once_whatever_axes_there_are(found: dict[str, Any]) -> None:
    alone = found["measured-1-0"]
    assert alone["language"]["metrics/eval/LanguageCrossEntropy"] > 0
    for rank in range(4):
        told = found[f"measured-4-{rank}"]
        assert told["texts"] == alone["texts"]
        for name in ("language", "preference", "references", "scores"):
            assert told[name] == pytest.approx(alone[name], rel=1e-5), name

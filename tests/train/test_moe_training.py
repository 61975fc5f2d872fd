"""Training with experts: the losses that routers add, whatever the microbatches and processes."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.distributed.fsdp import apply_ddp, materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.router import Routing
from llmfoundry.ops.packed_layout import Batch, PackedLayout
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepResult, StepSettings, train_step
from llmfoundry.train.step_metrics import routing_metrics
from tests.models.plain_moe import balancing_loss
from tests.models.test_decoder import make_config
from tests.models.test_moe import DMOE, K
from tests.tiny import activations, run, write_recipe
from tests.train.test_step import make_batch
from tests.train.test_step import plain_loss as plain_language_loss
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
LBL, Z = 0.3, 0.05
WEIGHTS = {"moe_loss_weight": LBL, "moe_zloss_weight": Z, "moe_normalize_expert_weights": 1}


def make_root(**settings: Any) -> Root:
    model = Decoder(make_config(ffn_config=DMOE | settings))
    model.init_weights(3)
    return Root(model)


def eight_rows() -> Batch:
    """`make_batch`'s six rows, and the first two again."""
    six = make_batch()
    two = next(six.split(2))
    assert six.layout is not None and two.layout is not None
    return Batch(
        torch.cat([six.tokens, two.tokens]),
        torch.cat([six.labels, two.labels]),
        PackedLayout.from_lengths([*six.layout.lengths, *two.layout.lengths]),  # type: ignore[arg-type]
    )


def make_optimizer(root: Root, lr: float = 0.01) -> torch.optim.Optimizer:
    config = OptimizerConfig(name="adamw", lr=lr, weight_decay=0.1)
    config.fill()
    return build_optimizer(root.model, config)


def one_step(root: Root, batch: Batch, microbatch: int, guard: Guard | None = None) -> StepResult:
    return train_step(
        root,
        make_optimizer(root),
        batch,
        StepSettings(
            microbatch=microbatch,
            autocast=nullcontext,
            clipping=GradientClippingConfig("norm", 1e9),
        ),
        number=0,
        guard=guard or Guard(CPU),
    )


def routers(root: Root, batch: Batch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The mean cross-entropy, and every router's input (B * T, D) and weight (E, D)."""
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        block.ffn.router.register_forward_hook(lambda m, i, out: seen.append((i[0], m.weight)))
        for block in root.model.blocks
    ]
    language = plain_language_loss(root, batch)
    for handle in handles:
        handle.remove()
    return language, seen


def plain_losses(root: Root, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, balancing loss of every row by the formula, and z-loss, of the whole batch."""
    language, seen = routers(root, batch)
    rows = [(row, w) for x, w in seen for row in x.view(len(batch.tokens), -1, x.shape[-1])]
    lbl = torch.stack([balancing_loss(row, w, K) for row, w in rows]).mean()
    z = torch.stack([((x @ w.T).exp().sum(-1).log() ** 2).mean() for x, w in seen]).mean()
    return language, LBL * lbl, Z * z


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("microbatch", [8, 4, 2, 1])
def test_losses_and_gradient_are_the_formulas_over_the_global_batch(
    microbatch: int, checkpointing: bool
) -> None:
    """Accumulation of 1, 2, 4 and 8 microbatches; blocks computed once and twice."""
    root, batch = make_root(**WEIGHTS), eight_rows()
    parts = plain_losses(root, batch)
    gradients = torch.autograd.grad(sum(parts), list(root.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    wrap_blocks(root, activations(root, checkpointing), compile_mode=None)
    result = one_step(root, batch, microbatch)
    assert list(result.parts) == ["loss", "lbl", "z"]
    for ours, theirs in zip(result.parts.values(), parts, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.loss, sum(parts).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=1e-6)
    assert result.parts["lbl"] > LBL * 1.02, "the router must not be balanced"


def test_the_scope_of_a_microbatch_averages_over_microbatches() -> None:
    """The losses of megablocks' batch-wise formula, weighted by tokens: 4 rows and then 2."""
    root, batch = make_root(moe_lbl_scope="microbatch", **WEIGHTS), make_batch()
    parts = []
    for part in batch.split(4):
        losses = [balancing_loss(x, w, K) for x, w in routers(root, part)[1]]
        parts.append(LBL * torch.stack(losses).mean().detach())
    expected = (4 * parts[0] + 2 * parts[1]) / 6
    found = one_step(root, batch, 4).parts["lbl"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_loads_of_a_step_are_those_of_its_tokens_whatever_the_microbatch() -> None:
    found = [one_step(make_root(), make_batch(), size).routing for size in (6, 4, 1)]
    for routing in found:
        assert routing is not None
        assert routing.load.sum(1).tolist() == [6 * 16 * K] * 2
        assert torch.equal(routing.load, found[0].load)
        torch.testing.assert_close(routing.probability, found[0].probability)


def test_a_step_without_weights_on_routers_minimises_the_language_loss_alone() -> None:
    root, batch = make_root(moe_balancing="none"), make_batch()
    expected = plain_language_loss(root, batch).detach()
    result = one_step(root, batch, 2)
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6)
    assert result.parts == {} and result.routing is not None


def test_biases_move_once_a_step_by_the_load_of_all_microbatches() -> None:
    root, guard = make_root(moe_balancing="bias"), Guard(CPU)
    result = one_step(root, make_batch(), 1, guard)
    assert result.routing is not None and result.parts == {}
    steps = torch.stack([block.ffn.router.bias_steps for block in root.model.blocks])
    expected = (result.routing.load.mean(1, keepdim=True) - result.routing.load).sign()
    assert torch.equal(steps, expected.int()) and steps.any()
    norm = root.model.blocks[0].norm_1
    handle = norm.register_forward_hook(lambda m, i, out: out * float("nan"))
    one_step(root, make_batch(), 1, guard)
    handle.remove()
    held = torch.stack([block.ffn.router.bias_steps for block in root.model.blocks])
    assert guard.first_bad() == 0 and torch.equal(held, steps)


def test_muon_makes_every_expert_orthogonal_by_itself() -> None:
    """The update is lr * 0.2 * sqrt(max(rows, columns)) * a matrix of singular values near 1."""
    root = make_root(mlp_type="glu")
    config = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.0)
    config.fill()
    optimizer = build_optimizer(root.model, config)
    experts = root.model.blocks[1].ffn.experts
    before = {name: p.detach().clone() for name, p in experts.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for parameter in root.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    for name in ("w1", "v1", "w2"):
        moved = (before[name] - getattr(experts, name).detach()).view(experts.n, 16, 24)
        values = torch.linalg.svdvals(moved / (0.01 * 0.2 * 24**0.5))
        assert values.shape == (experts.n, 16)
        assert values.min() > 0.5 and values.max() < 1.3
    assert "exp_avg" in optimizer.state[experts.w1_bias], "biases are AdamW's"


def test_routing_metrics_are_their_definitions() -> None:
    load = torch.tensor([[4.0, 2, 0, 2], [2, 2, 2, 2]])
    probability = torch.tensor([[2.0, 1, 1, 0], [1, 1, 1, 1]])
    found = routing_metrics(Routing({}, load, probability, load.sum(1) / 2), choices=8)
    assert found["moe/dropped_tokens"] == 0
    assert found["moe/layer_00/load_max"] == 2 and found["moe/layer_00/load_min"] == 0
    assert found["moe/layer_00/load_std"] == pytest.approx(0.5**0.5)
    assert found["moe/layer_00/router_entropy"] == pytest.approx(1.5 * torch.tensor(2.0).log())
    assert found["moe/layer_01/router_entropy"] == pytest.approx(torch.tensor(4.0).log())
    assert found["moe/load_max"] == 2 and found["moe/load_min"] == 0
    assert found["moe/load_std"] == pytest.approx(0.5)
    assert (
        routing_metrics(Routing({}, load, probability, load.sum(1) / 2), choices=9)[
            "moe/dropped_tokens"
        ]
        == 2
    )


@dataclass(frozen=True)
class Entry:
    """A layout of two processes, and how blocks are run."""

    shard: int = 1
    checkpointing: bool = False
    compiled: bool = False


ENTRIES = {
    "ddp": Entry(),
    "fsdp": Entry(2),
    "fsdp-checkpointing": Entry(2, checkpointing=True),
    "fsdp-compiled-checkpointing": Entry(2, checkpointing=True, compiled=True),
}
BALANCING = {"loss": WEIGHTS, "bias": {"moe_balancing": "bias", "moe_bias_update_rate": 0.05}}
STEPS = 4


def take_steps(entry: Entry, world: World, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What every step gave."""
    config = ParallelConfig(data_parallel_shard_degree=entry.shard)
    config.fill()
    mesh = build_mesh(config, world)
    with torch.device("meta"):
        root = Root(Decoder(make_config(ffn_config=DMOE | settings)))
    mode = "default" if entry.compiled else None
    wrap_blocks(root, activations(root, entry.checkpointing), compile_mode=mode)
    materialize(root, world, mesh, config, precision="fp32")
    root.model.init_weights(3)
    module, optimizer, guard = apply_ddp(root, mesh), make_optimizer(root), Guard(CPU)
    found = []
    for step in range(STEPS):
        batch = make_batch()
        part = list(batch.split(6 // world.size))[world.rank]
        result = train_step(
            module,
            optimizer,
            part,
            StepSettings(
                microbatch=2, autocast=nullcontext, clipping=GradientClippingConfig("norm", 0.5)
            ),
            number=step,
            guard=guard,
        )
        assert result.routing is not None
        losses = {"total": result.loss, "norm": result.grad_norm, **result.parts}
        biases = [buffer.tolist() for buffer in root.buffers()]
        found.append({name: value.item() for name, value in losses.items()})
        found[-1] |= {"load": result.routing.load.tolist(), "biases": biases}
    return found


def work(rank: int, folder: Path) -> None:
    """All entries, on two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    compile = torch.compile  # inductor would take a minute
    torch.compile = lambda f, *, mode: compile(f, backend="aot_eager")  # type: ignore[assignment]
    world = World(rank, 2, rank, CPU)
    found = {
        f"{name}/{kind}": take_steps(entry, world, settings)
        for name, entry in ENTRIES.items()
        for kind, settings in BALANCING.items()
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.compile = compile
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every entry gave, and what one process gives."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(work, (folder,), 2)
    alone = World(0, 1, 0, CPU)
    one = {kind: take_steps(Entry(), alone, settings) for kind, settings in BALANCING.items()}
    return json.loads((folder / "found.json").read_text()) | one


@pytest.mark.parametrize("kind", BALANCING)
@pytest.mark.parametrize("name", ENTRIES)
def test_two_processes_take_the_steps_of_one(found: dict[str, Any], name: str, kind: str) -> None:
    for ours, theirs in zip(found[f"{name}/{kind}"], found[kind], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"load", "biases", "norm"}:
            assert ours[key] == pytest.approx(theirs[key], rel=0, abs=1e-6), key
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
        assert ours["load"] == theirs["load"] and ours["biases"] == theirs["biases"]
    assert len(ours["biases"]) == (2 if kind == "bias" else 0)


FFN = "{ffn_type: dmoe, mlp_type: glu, ffn_hidden_size: 24, moe_num_experts: 5, moe_top_k: 2, "
LOSS = f"model.ffn_config={FFN} moe_loss_weight: 0.1, moe_zloss_weight: 0.01}}"
BIAS = f"model.ffn_config={FFN} moe_balancing: bias, moe_bias_update_rate: 0.01}}"
EIGHT = ("max_duration=8ba", "schedule.t_warmup=1ba", "save_interval=4ba", "eval=off")
SHARDS = ("parallel.data_parallel_replicate_degree=1", "parallel.data_parallel_shard_degree=2")


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss/train/total" in row]


@pytest.mark.slow
def test_a_run_in_shards_resumes_alone_with_its_biases(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    run("train.py", "tiny.yaml", "run_name=whole", *EIGHT, BIAS, cwd=tmp_path)
    first = (*EIGHT, BIAS, *SHARDS, "max_duration=4ba", "schedule.t_max=8ba")
    run("train.py", "tiny.yaml", "run_name=resumed", *first, cwd=tmp_path, processes=2)
    run("train.py", "tiny.yaml", "run_name=resumed", *EIGHT, BIAS, cwd=tmp_path)
    ours, theirs = rows(tmp_path, "resumed"), rows(tmp_path, "whole")
    assert len(ours) == len(theirs) == 8
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss/train/total"] == pytest.approx(b["loss/train/total"], rel=0, abs=1e-6)
        assert a["moe/load_std"] == pytest.approx(b["moe/load_std"], abs=0.02)


def test_a_logged_step_has_all_losses_and_loads(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    z_loss = "loss.z_loss_weight=0.01"
    run("train.py", "tiny.yaml", "run_name=loss", *EIGHT, LOSS, z_loss, cwd=tmp_path)
    logged = rows(tmp_path, "loss")
    # a log-sum-exp is at least the log of the vocabulary, if logits have mean 0
    assert logged[0]["loss/train/z_loss"] > 0.01 * math.log(257) ** 2
    for row in logged:
        parts = sum(row[f"loss/train/{name}"] for name in ("loss", "lbl", "z", "z_loss"))
        assert row["loss/train/total"] == pytest.approx(parts, rel=1e-6)
        bits = row["metrics/train/bits_per_byte"] / row["loss/train/loss"]
        assert bits == pytest.approx(1 / math.log(2), rel=0.02)  # its tokens are bytes
        assert row["moe/dropped_tokens"] == 0
        assert 1 <= row["moe/load_max"] <= 5 / 2 and 0 <= row["moe/load_min"] <= 1
        assert row["moe/layer_01/router_entropy"] <= math.log(5) + 1e-6
    lines = (tmp_path / "runs" / "loss" / "routing.jsonl").read_text().splitlines()
    loads = [json.loads(line)["load"] for line in lines]
    assert [sum(layer) for step in loads for layer in step] == [4 * 64 * 2] * 2 * len(lines)
    assert len(lines) == len(logged) == 8
    assert "Load of experts, layer 1" in (tmp_path / "runs" / "loss" / "report.html").read_text()

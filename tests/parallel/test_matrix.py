"""Every layout of processes takes the steps of one process: losses, norms, weights.

`layouts.py` has the layouts and their models. Rows have very different numbers of labels, one
process has none at all, and no microbatch divides its rows; what they are compared with is a plain
loop over whole batches that shares nothing with `train_step`. Bytes of gradients that wait between
microbatches are counted.

Some meshes have an axis beside those of data: processes along it, such as those of a tensor group,
read the same rows and count them once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
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
from llmfoundry.models.adapters.adapt import add_adapter, init_adapter, is_added
from llmfoundry.models.adapters.plan import plan_adapter
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.quantized import place
from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.ops.layout import Layout
from llmfoundry.parallel.apply import parallelize
from llmfoundry.parallel.context import token_cut
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import build_mesh, on_mesh
from llmfoundry.parallel.sharding import replicate as wrap
from llmfoundry.recipe.architecture.adapter import AdapterConfig
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.values.duration import Clock, Duration
from llmfoundry.train.optimizer_monitor import OptimizerMonitor
from llmfoundry.train.optimizers.optim import build_optimizer
from llmfoundry.train.step import Guard, train_step
from tests.models.test_decoder import make_config
from tests.parallel.layouts import MODELS, ROUTINE, SLOW, Entry
from tests.train.test_preference_reference import Run
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
STEPS, ROWS, LENGTH, CLIP = 3, 12, 16, 0.5
EPS = 1e-4  # AdamW's: an element whose gradient is hardly more than rounding hardly moves
MICROBATCH = {1: 5, 2: 4, 4: 2, 6: 1}  # of 12, 6, 3 and 2 rows a process
REQUESTS = [Request((n, 5, 9, 7), (7, n), "a") for n in range(1, 8)]
Found = dict[str, Any]  # by entry; and what ranks measured
LABELS = (16, 1, 9, 2, 16, 3, 0, 0, 0, 16, 5, 1)  # of each row; on 4 processes the third has none


def global_batch(step: int, packed: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for row, kept in enumerate(LABELS):
        labels[row, kept:] = IGNORE
    documents = [[1 + row, LENGTH - 1 - row] for row in range(ROWS)]
    return Batch(tokens, labels, Layout.from_lengths(documents) if packed else None)


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
        root = Root(make_model(entry.model, entry.adapter)).to(weight_dtype(entry.precision))
    mode = "default" if entry.compiled else None
    parallelize(root, world, mesh, config, precision=entry.precision, compile_mode=mode)
    fill(root.model)
    module = wrap(root, mesh)
    optimizer = build_optimizer(root.model, make_optimizer_config())
    monitor, trainer = OptimizerMonitor(), SimpleNamespace(root=root, optimizer=optimizer)
    on_gradients = partial(monitor.on_gradients, trainer)  # type: ignore[arg-type]
    losses, norms, live, held = [], [], LiveBytes(), list[int]()
    rows = MICROBATCH[world.data_size] if entry.accumulated else ROWS // world.data_size
    for step in range(STEPS):
        watched = step == STEPS - 1 and entry.counts_bytes
        if watched:
            root.register_forward_pre_hook(lambda *_: held.append(live.settled()), prepend=True)
        with live if watched else nullcontext():
            result = train_step(
                module,
                optimizer,
                share(global_batch(step, entry.packed), world),
                number=step,
                microbatch=rows,
                autocast=nullcontext,
                clipping=GradientClippingConfig("norm", CLIP),
                guard=Guard(CPU),
                data_group=world.data_group,
                token_group=world.token_group,
                cut=token_cut(root),
                reduce_scatter_each=not entry.once,
                on_gradients=on_gradients if step == STEPS - 1 else None,
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


def make_model(name: str, adapter: bool) -> Decoder:
    """One of MODELS; with an adapter, frozen but for its factors."""
    model = Decoder(make_config(n_layers=2, **MODELS[name]))
    if adapter:
        config = AdapterConfig(name="lora", r=4)
        config.fill()
        add_adapter(model, plan_adapter(model, config, split_qkv=True))
    return model


def fill(model: Decoder) -> None:
    """The base's weights, and both factors of adapters random: they start away from zero."""
    source = Decoder(model.config)
    source.init_weights(5)
    for name, value in source.state_dict().items():
        place(model, name, value)
    if not any(map(is_added, model.state_dict())):
        return
    init_adapter(model, 7)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            place(model, name, torch.randn(parameter.shape, generator=generator) * 0.2)


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


def work(rank: int, size: int, folder: Path, entries: dict[str, Entry], measure: bool) -> None:
    """Entries of so many processes, and what else they are to measure."""
    torch.set_num_threads(1)
    if size > 1:
        meeting = f"file://{folder}/meeting{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    compile = torch.compile  # inductor would take a minute
    torch.compile = lambda f, *, mode: compile(f, backend="aot_eager")  # type: ignore[assignment]
    world = World(rank, size, rank, CPU)
    try:
        found = {name: take_steps(entry, world) for name, entry in entries.items()}
    finally:
        torch.compile = compile
    if measure:
        world = world if size == 1 else beside_data(world)
        text = json.dumps(measured(world, folder / f"cache-{size}-{rank}"))
        (folder / f"measured-{size}-{rank}.json").write_text(text)
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


def run_all(entries: dict[str, Entry], folder: Path, *, measuring: tuple[int, ...] = ()) -> Found:
    """What every entry gives; so many processes measure what they make of rows, too."""
    results = {}
    for size in sorted({entry.processes for entry in entries.values()}):
        chosen = {name: entry for name, entry in entries.items() if entry.processes == size}
        arguments = (size, folder, chosen, size in measuring)
        if size == 1:
            work(0, *arguments)
        else:
            on_ranks(work, arguments, size)
        results |= json.loads((folder / f"{size}.json").read_text())
        for file in folder.glob(f"measured-{size}-*.json"):
            results[file.stem] = json.loads(file.read_text())
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_all(ROUTINE, tmp_path_factory.mktemp("matrix"), measuring=(1, 4))


@pytest.fixture(scope="module")
def found_slow(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Found]:
    """What each entry of a group gives, of those that pytest was asked for."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}

    @cache
    def found_of(group: str) -> Found:
        entries = {name: entry for name, entry in SLOW[group].items() if name in asked}
        try:
            return run_all(entries, tmp_path_factory.mktemp("slow"))
        except AssertionError as error:  # of its processes: once is enough
            return {"failed": str(error)}

    return found_of


@cache
def plain(
    name: str, adapter: bool = False, packed: bool = True
) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses, gradient norms, and the last weights' norms, of a loop as one would write it."""
    model = make_model(name, adapter)
    fill(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=EPS, foreach=False
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step, packed)
        hidden, routing = model.run(batch.tokens, batch.layout)
        logits = model.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        if routing is not None:
            loss = loss + sum(routing.losses.values()) / ROWS
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if MODELS[name].get("ffn_config", {}).get("moe_balancing") == "bias":
            assert routing is not None
            for block, load in zip(model.blocks, routing.load, strict=True):
                block.ffn.router.bias_steps += (load.mean() - load).sign().int()
    return losses, norms, {n: float(p.detach().double().norm()) for n, p in trained.items()}


def plain_of(entry: Entry) -> tuple[list[float], list[float], dict[str, float]]:
    """The plain loop on an entry's model and batches."""
    return plain(entry.model, entry.adapter, entry.packed)


@pytest.mark.parametrize("name", ROUTINE)
def test_losses_norms_and_weights_are_those_of_a_plain_loop(found: Found, name: str) -> None:
    compare(ROUTINE[name], found[name])


@pytest.mark.slow
@pytest.mark.timeout(900)  # all of a group are computed before its first
@pytest.mark.parametrize(
    ("group", "name"),
    [pytest.param(group, name, id=name) for group, names in SLOW.items() for name in names],
)
def test_more_layouts_too(found_slow: Callable[[str], Found], group: str, name: str) -> None:
    found = found_slow(group)
    assert "failed" not in found, found["failed"]
    compare(SLOW[group][name], found[name])


def compare(entry: Entry, found: dict[str, Any]) -> None:
    """Losses, norms, weights and bytes with a plain loop's."""
    losses, norms, weights = plain_of(entry)
    assert min(norms) > CLIP, "the bound must bind"
    if entry.precision == "bf16":
        assert found["loss"] == pytest.approx(losses, abs=0.03)
        assert found["loss"] != pytest.approx(losses, abs=1e-5)
        return
    assert found["loss"] == pytest.approx(losses, rel=1e-6)
    assert found["norm"] == pytest.approx(norms, rel=1e-6)
    metrics = found["metrics"]
    for parameter, norm in weights.items():
        assert metrics[f"l2_norm/param/{parameter}"] == pytest.approx(norm, rel=1e-5, abs=2e-6)
    gradients = [value for key, value in metrics.items() if key.startswith("l2_norm/grad/")]
    assert math.hypot(*gradients) == pytest.approx(norms[-1], rel=1e-5)
    if entry.counts_bytes:
        compare_held(entry, found["held"])


def compare_held(entry: Entry, found: list[int]) -> None:
    """4 bytes for each parameter of the shard; of the whole model where they wait for the last."""
    model = make_model(entry.model, entry.adapter)
    gradients = sum(4 * p.numel() * held_share(n, entry) for n, p in model.named_parameters())
    before, *held = found
    data_size = entry.replicate * entry.shard
    assert len(held) == -(-ROWS // data_size // MICROBATCH[data_size]) - 1 > 0
    for bytes_held in held:
        assert bytes_held - before == pytest.approx(gradients, rel=0.02)


def held_share(name: str, entry: Entry) -> float:
    """How much of a parameter's gradient a process holds between microbatches."""
    data, tensor = entry.shard * entry.context, entry.tensor
    if entry.is_mixture and ".ffn." in name:  # FSDP alone cuts it, over tensor ranks too
        whole = 1 / entry.expert if ".experts." in name else 1
        return whole if entry.once else 1 / (data * tensor)
    here = 1 if name.endswith(OF_ALL_TENSOR_RANKS) else 1 / tensor
    return here if entry.once else here / data


OF_ALL_TENSOR_RANKS = (
    *("norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias", "norm_f.weight"),
    *("norm_f.bias", "wpe.weight", "out_proj.bias", "down_proj.bias"),
    *("q_ln.weight", "q_ln.bias", "k_ln.weight", "k_ln.bias"),
)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_metrics_of_every_parameter_are_those_of_one_process(found: Found, name: str) -> None:
    assert found[name]["metrics"] == pytest.approx(found["one"]["metrics"], rel=2e-3, abs=1e-5)


def test_processes_beside_the_data_axes_read_the_same_rows(found: Found) -> None:
    alone = found["measured-1-0"]["rows"]
    assert len(alone) == 4 and alone[:2] != alone[2:]
    for rank in range(4):
        first = rank // 2 * 2
        assert found[f"measured-4-{rank}"]["rows"] == alone[first : first + 2]


def test_each_row_is_counted_once_whatever_axes_there_are(found: Found) -> None:
    alone = found["measured-1-0"]
    assert alone["language"]["metrics/eval/LanguageCrossEntropy"] > 0
    for rank in range(4):
        told = found[f"measured-4-{rank}"]
        assert told["texts"] == alone["texts"]
        for name in ("language", "preference", "references", "scores"):
            assert told[name] == pytest.approx(alone[name], rel=1e-5), name

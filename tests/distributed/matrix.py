"""Steps of a model on a layout, and the same by a plain loop: on CPUs, GPUs, or one GPU.

`test_matrix.py` runs them on a CPU's processes, `test_matrix_on_gpus.py` on GPUs. The plain loop
takes whole batches and shares nothing with `train_step`. Nothing here knows which device it is on
but `Place`: where processes compute, and what carries their collectives.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmfoundry.builders.model import weight_dtype
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.context import token_sharding
from llmfoundry.distributed.fsdp import apply_ddp as wrap
from llmfoundry.distributed.mesh import Meshes, build_mesh, with_mesh
from llmfoundry.distributed.process_group import World, choose_device, default_backend
from llmfoundry.models.adapter import add_adapter, init_adapter, is_added
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.quantized import place
from llmfoundry.ops import compression
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout, TeacherTokens
from llmfoundry.plan.meter import LiveBytes
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.recipe.loss import LossConfig, ResolvedLossConfig
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import GLOO
from llmfoundry.train.callbacks import OptimizerMonitor
from llmfoundry.train.distillation import Distillation
from llmfoundry.train.objective import CrossEntropy
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepHooks, StepSettings, train_step
from tests.distributed.layouts import MODELS, Z_LOSSES, Entry
from tests.models.test_decoder import make_config
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
STEPS, ROWS, LENGTH, CLIP = 3, 12, 16, 0.5
EPS = 1e-4  # AdamW's: an element whose gradient is hardly more than rounding hardly moves
MICROBATCH = {1: 5, 2: 4, 4: 2, 6: 1}  # of 12, 6, 3 and 2 rows a process
Found = dict[str, Any]  # by entry; and what ranks measured
Measure = Callable[[World, Path], dict[str, Any]]
LABELS = (16, 1, 9, 2, 16, 3, 0, 0, 0, 16, 5, 1)  # of each row; on 4 processes the third has none


@dataclass(frozen=True)
class Place:
    """Where the processes of a layout compute.

    Attributes:
        device: `cpu` or `cuda`.
        backend: of collectives between GPUs, as `parallel.dist_backend`; under gloo, processes
            share the GPUs that there are.
        close: relative difference of losses and gradient norms from the plain loop there. A GPU's
            matrix products of other shapes add up in other orders: 1e-5 is not measured yet.
    """

    device: str = "cpu"
    backend: str | None = None
    close: float = 1e-6

    def join(self, rank: int, size: int, folder: Path) -> World:
        """This process among the others, as `launch.join` has it, which meet in a file."""
        device = choose_device(rank, self.backend) if self.device == "cuda" else CPU
        if size > 1:
            meeting = f"file://{folder}/meeting{size}"
            backend = default_backend(device, self.backend)
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
        return World(rank, size, rank, device)


ON_CPU = Place()
SHARED_GPU = Place("cuda", GLOO, close=1e-5)
OWN_GPUS = Place("cuda", close=1e-5)


def global_batch(step: int, packed: bool = True, *, taught: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for row, kept in enumerate(LABELS):
        labels[row, kept:] = IGNORE
    documents = [[1 + row, LENGTH - 1 - row] for row in range(ROWS)]
    layout, teacher = PackedLayout.from_lengths(documents) if packed else None, None
    if taught:
        logits = torch.randn(ROWS, LENGTH, 64, generator=generator)
        top = logits.log_softmax(-1).topk(5)
        teacher = TeacherTokens(top.indices.int(), top.values)
    return Batch(tokens, labels, layout, teacher=teacher)


def make_objective(entry: Entry) -> CrossEntropy | Distillation:
    """The recipe's objective."""
    z_loss = Z_LOSSES.get(entry.model)
    if not entry.taught:
        return CrossEntropy(z_loss)
    config = LossConfig("distill", "symmetric", 2.0, 0.7, 0.4, z_loss)
    return Distillation(cast(ResolvedLossConfig, config))


def taught_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The mean of `make_objective` without z-loss, as one would write it."""
    keep, t = batch.labels != IGNORE, 2.0
    assert batch.teacher is not None
    ids = batch.teacher.ids.long()[keep]
    q = (batch.teacher.log_probs[keep] / t).softmax(-1)
    p = (logits[keep] / t).softmax(-1).gather(-1, ids)
    s = p / p.sum(-1, keepdim=True)
    forward, reverse = (q * (q / p).log()).sum(-1), (s * (s / q).log()).sum(-1)
    nats = F.cross_entropy(logits[keep], batch.labels[keep])
    return 0.4 * nats + 0.7 * t**2 * (0.5 * forward + 0.5 * reverse).mean()


def share(batch: Batch, world: World) -> Batch:
    """This process's rows, on its device."""
    return list(batch.split(ROWS // world.data_size))[world.data_rank].to(world.device)


def make_optimizer_config() -> OptimizerConfig:
    config = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1, eps=EPS)
    config.fill()
    return config


def take_steps(entry: Entry, world: World) -> dict[str, Any]:
    """Losses and gradient norms of each step, and all norms after the last.

    Of the last step also `held`: bytes that it has made and keeps as each microbatch begins.
    """
    root, world, mesh = spread(entry, world)
    fill(root.model)
    return train(entry, root, wrap(root, mesh), world)


def spread(entry: Entry, world: World) -> tuple[Root, World, Meshes | None]:
    """A model on a layout, without values yet."""
    config, compression.SMALL = entry.config, 1
    mesh = build_mesh(config, world)
    world = with_mesh(world, mesh)
    with torch.device("meta"):
        root = Root(make_model(entry, world.device)).to(weight_dtype(entry.precision))
    mode = "default" if entry.compiled else None
    parallelize(root, world, mesh, config, precision=entry.precision, compile_mode=mode)
    return root, world, mesh


def train(entry: Entry, root: Root, module: nn.Module, world: World) -> dict[str, Any]:
    """Steps of a model that is spread and filled; what `take_steps` gives."""
    optimizer = build_optimizer(root.model, make_optimizer_config())
    monitor, trainer = OptimizerMonitor(), SimpleNamespace(root=root, optimizer=optimizer)
    on_gradients = partial(monitor.on_gradients, trainer)  # type: ignore[arg-type]
    losses, norms, live, held = [], [], LiveBytes(), list[int]()
    rows = MICROBATCH[world.data_size] if entry.accumulated else ROWS // world.data_size
    for step in range(STEPS):
        watched = step == STEPS - 1 and entry.counts_bytes and world.device == CPU
        if watched:
            root.register_forward_pre_hook(lambda *_: held.append(live.settled()), prepend=True)
        with live if watched else nullcontext():
            result = train_step(
                module,
                optimizer,
                share(global_batch(step, entry.packed, taught=entry.taught), world),
                StepSettings(
                    microbatch=rows,
                    autocast=nullcontext,
                    clipping=GradientClippingConfig("norm", CLIP),
                    objective=make_objective(entry),
                    data_group=world.data_group,
                    token_group=world.token_group,
                    shard_tokens=token_sharding(root),
                    reduce_scatter_each=not entry.once,
                ),
                number=step,
                guard=Guard(world.device),
                hooks=StepHooks(on_gradients=on_gradients if step == STEPS - 1 else None),
            )
        assert result.count == sum(LABELS)
        assert ("z_loss" in result.parts) == (entry.model in Z_LOSSES)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    found = monitor.measure(trainer)  # type: ignore[arg-type]
    metrics = {name: value.item() for name, value in found.items()}
    return {"loss": losses, "norm": norms, "metrics": metrics, "held": held}


def make_model(entry: Entry, device: torch.device) -> Decoder:
    """One of MODELS; with an adapter, frozen but for its factors.

    In fp32 on a GPU attention is PyTorch's own: that of `auto` would be compiled for each shape.
    """
    settings = copy.deepcopy(MODELS[entry.model])
    if device.type == "cuda" and entry.precision == "fp32":
        settings["attn_config"] = settings.get("attn_config", {}) | {"attn_impl": "sdpa"}
    model = Decoder(make_config(n_layers=2, **settings))
    if entry.adapter:
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


class Operators(TorchDispatchMode):
    """Notes which collectives are called.

    Attributes:
        names: of operators, their namespace before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator."""
        if "c10d" in func.namespace:
            self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def work(
    rank: int,
    size: int,
    where: Place,
    folder: Path,
    entries: dict[str, Entry],
    measure: Measure | None,
) -> None:
    """Entries of so many processes, and what else they are to measure."""
    torch.set_num_threads(1)
    world = where.join(rank, size, folder)
    compile = torch.compile  # inductor would take a minute
    if world.device == CPU:
        torch.compile = lambda f, *, mode: compile(f, backend="aot_eager")  # type: ignore[assignment]
    try:
        found = {name: watched_steps(entry, world) for name, entry in entries.items()}
    finally:
        torch.compile = compile
    if measure is not None:
        text = json.dumps(measure(world, folder / f"cache-{size}-{rank}"))
        (folder / f"measured-{size}-{rank}.json").write_text(text)
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


def watched_steps(entry: Entry, world: World) -> dict[str, Any]:
    """As `take_steps`, and `collectives`: the operators that were called."""
    if entry.compiled:  # a graph is no operator
        return take_steps(entry, world)
    with Operators() as called:
        found = take_steps(entry, world)
    return found | {"collectives": sorted(called.names)}


def run_all(
    entries: dict[str, Entry],
    folder: Path,
    where: Place = ON_CPU,
    *,
    measuring: tuple[int, ...] = (),
    measure: Measure | None = None,
) -> Found:
    """What every entry gives; so many processes also `measure`, a function of a module."""
    results = {}
    for size in sorted({entry.processes for entry in entries.values()}):
        chosen = {name: entry for name, entry in entries.items() if entry.processes == size}
        arguments = (size, where, folder, chosen, measure if size in measuring else None)
        if size == 1:
            work(0, *arguments)
        else:
            on_ranks(work, arguments, size)
        results |= json.loads((folder / f"{size}.json").read_text())
        for file in folder.glob(f"measured-{size}-*.json"):
            results[file.stem] = json.loads(file.read_text())
    return results


Steps = tuple[list[float], list[float], dict[str, float]]


def plain_of(entry: Entry, device: torch.device) -> Steps:
    """The plain loop on an entry's model and batches, in fp32."""
    same = Entry(model=entry.model, adapter=entry.adapter, taught=entry.taught, packed=entry.packed)
    return plain(same, device)


@cache
def plain(entry: Entry, device: torch.device) -> Steps:
    """Losses, gradient norms, and the last weights' norms, of a loop as one would write it."""
    model = make_model(entry, device)
    fill(model)
    model.to(device)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=EPS, foreach=False
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step, entry.packed, taught=entry.taught).to(device)
        hidden, routing = model.run(batch.tokens, batch.layout)
        logits = model.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        loss = taught_loss(logits, batch) if entry.taught else loss
        squares = logits[batch.labels != IGNORE].logsumexp(-1).square()
        loss = loss + Z_LOSSES.get(entry.model, 0.0) * squares.mean()
        if routing is not None:
            loss = loss + sum(routing.losses.values()) / ROWS
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if MODELS[entry.model].get("ffn_config", {}).get("moe_balancing") == "bias":
            assert routing is not None
            mixtures = model.blocks[-len(routing.load) :]  # the first may have no experts
            for block, load in zip(mixtures, routing.load, strict=True):
                block.ffn.router.bias_steps += (load.mean() - load).sign().int()
    return losses, norms, {n: float(p.detach().double().norm()) for n, p in trained.items()}


def compare(entry: Entry, found: dict[str, Any], where: Place = ON_CPU) -> dict[str, float]:
    """Losses, norms, weights and bytes with a plain loop's; the largest differences."""
    losses, norms, weights = plain_of(entry, torch.device(where.device))
    apart = {"loss": furthest(found["loss"], losses), "grad norm": furthest(found["norm"], norms)}
    assert min(norms) > CLIP, "the bound must bind"
    if entry.precision == "bf16":
        assert found["loss"] == pytest.approx(losses, abs=0.03)
        assert found["loss"] != pytest.approx(losses, abs=1e-5)
        return apart
    if entry.compression != "none":  # of gradients alone: the first loss is exact
        assert found["loss"][0] == pytest.approx(losses[0], rel=where.close)
        assert found["loss"] == pytest.approx(losses, rel=0.01)
        assert found["norm"] == pytest.approx(norms, rel=0.05)
        assert found["norm"] != pytest.approx(norms, rel=1e-4)
        return apart
    assert found["loss"] == pytest.approx(losses, rel=where.close)
    assert found["norm"] == pytest.approx(norms, rel=where.close)
    metrics = found["metrics"]
    for parameter, norm in weights.items():
        assert metrics[f"l2_norm/param/{parameter}"] == pytest.approx(
            norm, rel=10 * where.close, abs=2e-6
        )
    gradients = [value for key, value in metrics.items() if key.startswith("l2_norm/grad/")]
    assert math.hypot(*gradients) == pytest.approx(norms[-1], rel=10 * where.close)
    if entry.counts_bytes and where.device == "cpu":
        compare_held(entry, found["held"])
    return apart


def furthest(found: list[float], right: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, right, strict=True))


def compare_held(entry: Entry, found: list[int]) -> None:
    """4 bytes for each parameter of the shard; of the whole model where they wait for the last."""
    model = make_model(entry, CPU)
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
    *("Wq_a.weight", "q_a_ln.weight", "Wkv_a.weight", "kv_a_ln.weight"),
)

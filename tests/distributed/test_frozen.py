"""Adapters on frozen weights, in full precision or 4 bits: every layout takes one process's steps.

Compared with a plain loop that holds each weight as W + s B A and differentiates that, its W read
back from the 4 bits; and, under autocast, with one process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from llmfoundry.builders.model import build_autocast
from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.distributed.fsdp import apply_ddp, materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.adapter import add_adapter, init_adapter, is_added
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.quantized import matrices, narrow_frozen, place, quantize_frozen
from llmfoundry.ops.packed_layout import IGNORE
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.recipe.optimizer import GradientClippingConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepSettings, train_step
from tests.distributed.matrix import (
    CLIP,
    CPU,
    EPS,
    MICROBATCH,
    STEPS,
    global_batch,
    make_optimizer_config,
    share,
)
from tests.models.test_decoder import make_config
from tests.models.test_quantized import GLU, MIXTURE
from tests.tiny import activations
from tests.warm_scripts import on_ranks

LAYOUTS = {"one": (1, 1), "ddp": (2, 1), "fsdp": (1, 2)}  # replicas and shards


@dataclass(frozen=True)
class Kind:
    """What trains, and how the rest is kept."""

    settings: dict[str, Any]
    quantized: bool = False
    precision: str = "fp32"
    checkpointing: bool = False
    tokens: tuple[int, ...] = ()


# the plain loop has no loss of routers
EXPERTS = MIXTURE | {"ffn_config": MIXTURE["ffn_config"] | {"moe_balancing": "none"}}
KINDS = {
    "lora": Kind(GLU),
    "lora-tokens": Kind(GLU | {"tie_word_embeddings": True}, tokens=(40, 2, 63)),
    "qlora": Kind(GLU, quantized=True, checkpointing=True),
    "qlora-experts": Kind(EXPERTS, quantized=True),
    "lora-amp": Kind(GLU, precision="amp_bf16"),
    "qlora-amp": Kind(MIXTURE, quantized=True, precision="amp_bf16"),
}


def make_root(kind: Kind) -> Root:
    """On the meta device, frozen but for adapters that begin away from zero."""
    config = AdapterConfig(name="lora", r=4, trainable_token_indices=[*kind.tokens] or None)
    config.fill()
    with torch.device("meta"):
        root = Root(Decoder(make_config(n_layers=2, **kind.settings)))
    add_adapter(root.model, plan_adapter(root.model, config, split_qkv=True))
    if kind.precision != "fp32":
        narrow_frozen(root.model, torch.bfloat16)
    if kind.quantized:
        quantize_frozen(root.model, double=True)
    return root


def fill(model: Decoder, kind: Kind) -> None:
    """The base's weights, and adapters with both factors random."""
    source = Decoder(make_config(n_layers=2, **kind.settings))
    source.init_weights(5)
    for name, value in source.state_dict().items():
        place(model, name, value)
    init_adapter(model, 7)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            place(model, name, torch.randn(parameter.shape, generator=generator) * 0.05)


def take_steps(kind: Kind, layout: str, world: World) -> dict[str, Any]:
    """Losses and gradient norms of each step, and what was kept in which dtype."""
    replicas, shards = LAYOUTS[layout]
    config = ParallelConfig(
        data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards
    )
    config.fill()
    mesh, root = build_mesh(config, world), make_root(kind)
    wrap_blocks(root, activations(root, kind.checkpointing), compile_mode=None)
    materialize(root, world, mesh, config, precision=kind.precision)
    fill(root.model, kind)
    module, optimizer = apply_ddp(root, mesh), build_optimizer(root.model, make_optimizer_config())
    losses, norms = [], []
    for step in range(STEPS):
        result = train_step(
            module,
            optimizer,
            share(global_batch(step), world),
            StepSettings(
                microbatch=MICROBATCH[world.size],
                autocast=build_autocast(kind.precision, CPU),
                clipping=GradientClippingConfig("norm", CLIP),
            ),
            number=step,
            guard=Guard(CPU),
        )
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    states = {len(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]}
    return {
        "loss": losses,
        "norm": norms,
        "dtypes": sorted({str(p.dtype) for p in root.parameters()}),
        "trained": sorted({str(p.dtype) for p in root.parameters() if p.requires_grad}),
        "states": sorted(states),
        "n_states": len(optimizer.state),
        "n_trained": sum(is_added(n) and p.requires_grad for n, p in root.named_parameters()),
    }


def work(rank: int, size: int, folder: Path) -> None:
    """All kinds and layouts of so many processes."""
    torch.set_num_threads(1)
    if size > 1:
        meeting = f"file://{folder}/meeting{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    found = {
        f"{name} {layout}": take_steps(kind, layout, World(rank, size, rank, CPU))
        for name, kind in KINDS.items()
        for layout, degrees in LAYOUTS.items()
        if degrees[0] * degrees[1] == size
    }
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("frozen")
    work(0, 1, folder)
    on_ranks(work, (2, folder), 2)
    return {
        key: value
        for size in (1, 2)
        for key, value in json.loads((folder / f"{size}.json").read_text()).items()
    }


def plain(kind: Kind) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a loop that builds W + s B A of every matrix."""
    adapted = make_root(kind).model.to_empty(device="cpu")
    fill(adapted, kind)
    model = Decoder(make_config(n_layers=2, **kind.settings))
    model.init_weights(5)
    base = {name: p.detach() for name, p in model.named_parameters()}
    pairs: dict[str, tuple[nn.Parameter, nn.Parameter, list[tuple[int, int]]]] = {}
    for path, module in adapted.blocks.named_modules(prefix="blocks"):
        for name in matrices(module):
            dense = module.dense(name) if isinstance(module, ExpertWeights) else module.dense()
            base[f"{path}.{name}"] = dense.detach().reshape(-1, dense.shape[-1]).clone()
            prefix = f"{name}_" if isinstance(module, ExpertWeights) else ""
            a, b = (
                nn.Parameter(getattr(module, f"{prefix}lora_{x}").detach().clone()) for x in "AB"
            )
            one = module.lora[name] if isinstance(module, ExpertWeights) else module.lora
            pairs[f"{path}.{name}"] = (a, b, one.parts)
    trained = [factor for a, b, _ in pairs.values() for factor in (a, b)]
    if kind.tokens:
        change = nn.Parameter(adapted.wte.lora_B.detach().T.clone())
        trained.append(change)
    optimizer = torch.optim.AdamW(
        trained, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=EPS, foreach=False
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step)
        weights = base | {n: base[n] + 2 * delta(n, *pair) for n, pair in pairs.items()}
        if kind.tokens:
            ids = torch.tensor(kind.tokens)
            weights["wte.weight"] = base["wte.weight"].index_add(0, ids, change)
        hidden = functional_call(model, weights, (batch.tokens, batch.layout))
        is_tied = model.config.tie_word_embeddings
        logits = F.linear(hidden, weights["wte.weight" if is_tied else "lm_head.weight"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def delta(name: str, a: Tensor, b: Tensor, parts: Any) -> Tensor:
    """B A of a layer in its weight's shape; of stacked experts each one's."""
    if ".experts." not in name:
        split = a.split(4)
        pieces = [b[begin:end] @ split[i] for i, (begin, end) in enumerate(parts)]
        return torch.cat(pieces)
    each = [y @ x for x, y in zip(a.chunk(5), b.chunk(5), strict=True)]
    return torch.cat([one.T if name.endswith("w2") else one for one in each])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["lora", "lora-tokens", "qlora", "qlora-experts"])
def test_steps_are_those_of_a_plain_loop(found: dict[str, Any], name: str, layout: str) -> None:
    losses, norms = plain(KINDS[name])
    assert found[f"{name} {layout}"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert found[f"{name} {layout}"]["norm"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["lora-amp", "qlora-amp"])
def test_autocast_on_two_processes_stays_near_one(
    found: dict[str, Any], name: str, layout: str
) -> None:
    one = found[f"{name} one"]["loss"]
    assert found[f"{name} {layout}"]["loss"] == pytest.approx(one, abs=0.01)


@pytest.mark.parametrize("name", KINDS)
def test_only_adapters_have_gradients_and_moments(found: dict[str, Any], name: str) -> None:
    for layout in LAYOUTS:
        entry = found[f"{name} {layout}"]
        assert entry["trained"] == ["torch.float32"]
        assert entry["n_states"] == entry["n_trained"] > 8
        low = ["torch.bfloat16"] if KINDS[name].precision != "fp32" else []
        low += ["torch.uint8"] if KINDS[name].quantized else []
        assert entry["dtypes"] == sorted([*low, "torch.float32"])

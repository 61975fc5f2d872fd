"""Experts on several processes: strange loads, every optimizer, adapters, losses over all tokens.

What two or four processes do is held to what one process does, which has all experts and sends
nothing. Plain training is in test_matrix.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.builders.model import build_autocast, weight_dtype
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.mesh import build_mesh, with_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.gauntlet.models.own_decoder import OwnModel
from llmfoundry.gauntlet.questions import GenerationPrompt
from llmfoundry.models.adapter import add_adapter, base_sample, init_adapter
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.moe import MoE
from llmfoundry.models.quantized import place, quantize_frozen
from llmfoundry.models.router import Router, StatisticsGroups
from llmfoundry.ops import compression
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepSettings, train_step
from tests.gauntlet.test_generation import LETTERS
from tests.models.test_decoder import make_config
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
LENGTH, STEPS = 16, 3
FFN: dict[str, Any] = {
    "ffn_type": "dmoe",
    "mlp_type": "glu",
    "ffn_act_fn": "silu",
    "ffn_hidden_size": 16,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_zloss_weight": 0.01,
}


@dataclass(frozen=True)
class Case:
    """A run of a few steps.

    Attributes:
        ffn: changes of the feed-forward layer.
        padding: tokens at the end of each row that are none.
        favourite: the experts that all tokens go to, by the bias of their scores.
        optimizer, clipping: of the recipe.
        adapter: of experts alone, independent or shared; quantised: beside it, the base in 4 bits.
        precision: of the recipe.
        microbatch: rows of a process at a time.
        parallel: of the recipe, beside the degrees.
        alone: what the single process has otherwise.
        close: relative difference of losses and norms.
    """

    ffn: dict[str, Any] = field(default_factory=dict)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    favourite: tuple[int, ...] = ()
    optimizer: str = "adamw"
    clipping: tuple[str, float] = ("norm", 0.5)
    adapter: str = ""
    quantised: bool = False
    precision: str = "fp32"
    microbatch: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)
    close: float = 1e-6


BIAS = {"moe_balancing": "bias", "moe_bias_update_rate": 0.5}
CASES = {
    # the second process has a microbatch without a token, then one of three tokens
    "padding": Case(padding=(0, 3, 16, 13)),
    "padding everywhere": Case(padding=(16, 16, 0, 16)),
    # all tokens go to the first process, or all away from it
    "first process": Case(ffn=BIAS, favourite=(0, 1)),
    "second process": Case(ffn=BIAS, favourite=(2, 3), padding=(0, 16, 0, 16)),
    "one expert": Case(ffn=BIAS | {"moe_top_k": 1}, favourite=(3,)),
    "reference": Case(ffn={"moe_impl": "torch"} | BIAS, favourite=(0, 1), padding=(16, 0, 0, 0)),
    "every expert": Case(ffn={"moe_top_k": 4, "moe_normalize_expert_weights": 1.0}),
    "global": Case(
        ffn={"moe_lbl_scope": "global", "moe_loss_weight": 0.5},
        padding=(0, 5, 2, 0),
        microbatch=2,
        alone={"microbatch": 4, "moe_lbl_scope": "microbatch"},
    ),
    "lion": Case(optimizer="decoupled_lionw", clipping=("value", 1e-3), close=1e-5),
    "muon": Case(optimizer="muon", clipping=("adaptive", 0.02), close=1e-5),
    "adaptive": Case(clipping=("adaptive", 0.02)),
    "lora": Case(adapter="independent"),
    "lora shared": Case(adapter="shared"),
    "qlora": Case(adapter="independent", quantised=True),
    "eight bits": Case(parallel={"activation_compression": "int8"}, close=0.03),
    "eight bits, recomputed": Case(
        parallel={"activation_compression": "int8", "activation_checkpointing": "whole"}, close=0.03
    ),
    "selective": Case(parallel={"activation_checkpointing": "selective"}),
    "eight bits, selective": Case(
        parallel={"activation_compression": "int8", "activation_checkpointing": "selective"},
        close=0.03,
    ),
    "experts recomputed": Case(
        parallel={
            "activation_checkpointing": "whole",
            "activation_checkpointing_target": {"experts": 1, "feed_forward": "last-1"},
        }
    ),
    # room for any load; for none but an even one, of which some is padding
    "room": Case(padding=(0, 3, 16, 13), parallel={"expert_capacity": 2.0}),
    "no room": Case(ffn=BIAS, favourite=(0, 1), parallel={"expert_capacity": 1.0}),
    "room, recomputed": Case(
        parallel={"expert_capacity": 2.0, "activation_checkpointing": "whole"}, padding=(16,) * 4
    ),
    "room, selective": Case(
        parallel={"expert_capacity": 1.25, "activation_checkpointing": "selective"}
    ),
    "room, biases": Case(ffn=BIAS, favourite=(1, 2), parallel={"expert_capacity": 1.0}),
    "room, lora": Case(adapter="independent", parallel={"expert_capacity": 2.0}),
    "room, qlora": Case(adapter="shared", quantised=True, parallel={"expert_capacity": 2.0}),
    "room, bf16": Case(precision="bf16", close=0.03, parallel={"expert_capacity": 2.0}),
    "bf16": Case(precision="bf16", close=0.03),
    "amp": Case(precision="amp_bf16", close=0.03),
}


def make_root(case: Case) -> Root:
    """On the meta device."""
    ffn = FFN | {key: value for key, value in case.ffn.items() if key != "microbatch"}
    with torch.device("meta"):
        # keys' biases have no gradient but rounding, which an optimizer makes steps of
        root = Root(Decoder(make_config(n_layers=2, ffn_config=ffn, attention_bias=False)))
    root.to(weight_dtype(case.precision))
    if case.adapter:
        config = AdapterConfig(name="lora", r=2, experts=case.adapter)
        config.target_modules = ["w1", "v1", "w2"]
        config.fill()
        add_adapter(root.model, plan_adapter(root.model, config, split_qkv=True))
    if case.quantised:
        quantize_frozen(root.model, double=True)
    return root


def fill(model: Decoder, case: Case) -> None:
    """The base's weights, adapters away from their start, and what favours experts."""
    source = Decoder(model.config)
    source.init_weights(5)
    for name, value in source.named_parameters():
        place(model, name, value.detach())
    for module in model.modules():
        if isinstance(module, Router) and hasattr(module, "bias_steps"):
            module.bias_steps.zero_()
            module.bias_steps[list(case.favourite)] = 50
    if case.adapter:
        init_adapter(model, 7)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                place(model, name, torch.randn(parameter.shape, generator=generator) * 0.05)


def make_batch(case: Case, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (4, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    lengths = []
    for row, pad in enumerate(case.padding):
        labels[row, LENGTH - pad - (0 if pad else 1) :] = IGNORE
        real = LENGTH - pad
        lengths.append([n for n in (min(5, real), real - min(5, real), pad) if n])
    return Batch(tokens, labels, PackedLayout.from_lengths(lengths, case.padding))


def take_steps(case: Case, world: World, degrees: dict[str, int]) -> dict[str, Any]:
    """Losses, norms and loads of each step, and the weights after the last."""
    config, compression.SMALL = ParallelConfig(**degrees, **case.parallel), 1
    config.fill()
    meshes = build_mesh(config, world)
    world = with_mesh(world, meshes)
    root = make_root(case)
    parallelize(root, world, meshes, config, precision=case.precision)
    fill(root.model, case)
    settings = OptimizerConfig(name=case.optimizer, lr=0.01, weight_decay=0.1)
    if case.optimizer != "decoupled_lionw":
        settings.eps = 1e-5
    settings.fill()
    optimizer = build_optimizer(root.model, settings)
    found: dict[str, Any] = {"loss": [], "norm": [], "load": [], "overflow": []}
    rows = 4 // world.data_size
    for step in range(STEPS):
        batch = list(make_batch(case, step).split(rows))[world.data_rank]
        result = train_step(
            root,
            optimizer,
            batch,
            StepSettings(
                microbatch=case.microbatch,
                autocast=build_autocast(case.precision, CPU),
                clipping=GradientClippingConfig(*case.clipping),
                data_group=world.data_group,
            ),
            number=step,
            guard=Guard(CPU),
        )
        assert result.routing is not None
        found["loss"].append(result.loss.item())
        found["norm"].append(result.grad_norm.item())
        found["load"].append(result.routing.load.tolist())
        found["overflow"].append(result.overflow)
    found["weights"] = {
        n: full_tensor(p.detach()).clone() for n, p in root.model.named_parameters()
    }
    found["sample"] = base_sample(root.model, frozen=False)
    return found


LAYOUTS = {
    2: {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 2},
    4: {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 4},
}
ROUTINE = (
    "padding",
    "first process",
    "global",
    "muon",
    "selective",
    "lora shared",
    "qlora",
    "room",
    "no room",
)
"""The others, and these on four processes, are behind `slow`."""


def work(rank: int, size: int, folder: Path, names: tuple[str, ...]) -> None:
    """Some cases, and what is done to layers alone and in generation."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting{size}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    world, degrees = World(rank, size, rank, CPU), LAYOUTS[size] | {"expert_parallel_degree": 2}
    found: dict[str, Any] = {name: take_steps(CASES[name], world, degrees) for name in names}
    if names == ROUTINE and size == 2:
        found["texts"] = texts(spread(world, degrees), world)
        found["routers"] = router_weights(spread(world, degrees, "amp_bf16"))
        dense = {**LAYOUTS[size], "tensor_parallel_degree": 1}
        found["routers without ep"] = router_weights(spread(world, dense, "amp_bf16"))
        found["balance"] = {kind: shared_row(kind, rank) for kind in ("summed", "tensor")}
    torch.save(found, folder / f"{size}-{rank}.pt")
    dist.destroy_process_group()


Found = list[dict[str, Any]]  # by rank


def on(size: int, folder: Path, *names: str) -> Found:
    on_ranks(work, (size, folder, names), size)
    return [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on(2, tmp_path_factory.mktemp("two"), *ROUTINE)


@pytest.fixture(scope="module")
def found_slow(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on(2, tmp_path_factory.mktemp("slow"), *(n for n in CASES if n not in ROUTINE))


@pytest.fixture(scope="module")
def found_on_four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on(4, tmp_path_factory.mktemp("four"), *ROUTINE)


def alone(name: str) -> dict[str, Any]:
    """What one process does."""
    case = CASES[name]
    ffn = case.ffn | {k: v for k, v in case.alone.items() if k != "microbatch"}
    case = replace(case, ffn=ffn, microbatch=case.alone.get("microbatch", case.microbatch))
    return take_steps(case, World(0, 1, 0, CPU), {})


@pytest.mark.parametrize("name", ROUTINE)
def test_steps_are_those_of_one_process(found: Found, name: str) -> None:
    compare(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUTINE])
def test_more_steps_are_too(found_slow: Found, name: str) -> None:
    compare(found_slow, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTINE)
def test_steps_of_four_processes_are_too(found_on_four: Found, name: str) -> None:
    compare(found_on_four, name)


def test_rows_without_room_are_counted_on_all_ranks(found: Found) -> None:
    """Each of four microbatches of 16 tokens sends 32 rows to the first process in two layers."""
    without_room = 2 * 4 * (LENGTH * 2 - LENGTH * 2 // 2)
    for rank in found:
        assert rank["no room"]["overflow"] == [without_room] * STEPS
        assert rank["room"]["overflow"] == rank["padding"]["overflow"] == [0] * STEPS


def compare(found: Found, name: str) -> None:
    """What each process found with what one process finds."""
    expected, close = alone(name), CASES[name].close
    for rank in found:
        own = rank[name]
        assert own["loss"] == pytest.approx(expected["loss"], rel=close)
        assert own["norm"] == pytest.approx(expected["norm"], rel=close)
        if close > 1e-4:
            continue
        assert own["load"] == expected["load"]
        for expert in range(4) if CASES[name].favourite else ():
            loads = [layer[expert] for layer in own["load"][0]]
            assert all((load > 0) == (expert in CASES[name].favourite) for load in loads)
        for key, weight in expected["weights"].items():
            torch.testing.assert_close(own["weights"][key], weight, rtol=1e-4, atol=2e-6)
        for key, numbers in expected["sample"].items():
            assert own["sample"][key] == pytest.approx(numbers, rel=1e-4, abs=2e-6)


def spread(world: World, degrees: dict[str, int], precision: str = "fp32") -> Root:
    """A model for evaluation on all processes."""
    config = ParallelConfig(**degrees)
    config.fill()
    meshes = build_mesh(config, world)
    root = make_root(Case(precision=precision))
    parallelize(root, with_mesh(world, meshes), meshes, config, precision=precision)
    fill(root.model, Case())
    return root


def router_weights(root: Root) -> list[tuple[Tensor, torch.dtype]]:
    """Each router's weight as the forward pass sees it, and the dtype of its gradient."""
    weights: list[Tensor] = []
    for module in root.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda m, *_: weights.append(m.weight.detach().clone()))
    with torch.autocast("cpu", torch.bfloat16):
        total = root(make_batch(Case(), 0).tokens, None, lambda _, hidden: hidden.float().sum())
    total.backward()
    grads = [m.weight.grad for m in root.modules() if isinstance(m, Router)]
    return [(w, g.dtype) for w, g in zip(weights, grads, strict=True) if g is not None]


def test_routers_see_fp32_weights_under_fsdp_as_one_process_does(found: Found) -> None:
    expected = router_weights(spread(World(0, 1, 0, CPU), {}, "amp_bf16"))
    rounded = [weight.bfloat16().float() for weight, _ in expected]
    assert not any(torch.equal(w, r) for (w, _), r in zip(expected, rounded, strict=True))
    for rank in found:
        for layout in ("routers", "routers without ep"):
            for (weight, dtype), (right, _) in zip(rank[layout], expected, strict=True):
                assert torch.equal(weight, right) and dtype == torch.float32


def texts(root: Root, world: World) -> list[list[str]]:
    """Continuations of three prompts, of one prompt alone, and of one longer than the others."""
    prompts = [GenerationPrompt((n, 7, 2), "", (), 6) for n in range(1, 4)]
    uneven = [
        GenerationPrompt((1, 2, 3), "", (), 9),
        GenerationPrompt((4, 5), "", (), 1),
        GenerationPrompt((6, 5), "", (), 1),
    ]
    model = OwnModel(
        root,
        LETTERS,
        seq_len=64,
        device=CPU,
        batch_tokens=64,
        autocast=nullcontext,
        data_rank=world.rank,
        data_size=world.size,
    )
    return [model.generate(part) for part in (prompts, prompts[:1], uneven)]


def test_texts_are_those_of_one_process(found: Found) -> None:
    expected = texts(spread(World(0, 1, 0, CPU), {}), World(0, 1, 0, CPU))
    assert found[0]["texts"] == found[1]["texts"] == expected


def shared_row(kind: str, rank: int | None) -> dict[str, Tensor]:
    """Losses of a router over rows whose tokens two processes share, and its gradient.

    `rank` has the first six tokens of each row, or the other ten less three of padding; None: all.
    """
    torch.manual_seed(1)
    layer = MoE(make_config(ffn_config=FFN))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(2, LENGTH, layer.experts.d)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, 13:] = False
    part = slice(None) if rank is None else (slice(0, 6), slice(6, LENGTH))[rank]
    if rank is not None:
        group = dist.group.WORLD
        layer.statistics_groups = StatisticsGroups(**{kind: group})
    places = real[:, part].flatten().nonzero()[:, 0]
    _, routed = layer.train()(x[:, part], places)
    assert routed is not None
    (routed.balance + 3 * routed.z).backward()
    grad = layer.router.weight.grad
    assert grad is not None
    fields = routed._asdict().items()
    reported = {key: value.detach() for key, value in fields if value is not None}
    return reported | {"grad": grad}


@pytest.mark.parametrize("kind", ["summed", "tensor"])
def test_a_router_counts_the_tokens_of_all_that_share_a_row(found: Found, kind: str) -> None:
    """Added up later over the processes: a row then counts twice, and so does its loss."""
    expected = shared_row(kind, None)
    first, second = (rank["balance"][kind] for rank in found)
    times = 2 if kind == "summed" else 1
    torch.testing.assert_close(first["grad"] + second["grad"], times * expected["grad"])
    for name in ("balance", "z"):
        torch.testing.assert_close(first[name], expected[name])
        torch.testing.assert_close(second[name], expected[name])
    for name in ("load", "probability", "tokens"):
        summed = first[name] + second[name] if kind == "summed" else first[name]
        torch.testing.assert_close(summed, expected[name])

"""Processes that share matrices: logits, losses and gradients of every option of the decoder.

What they are compared with is the plain decoder of `tests/models`, in float64, on rows of 13
tokens, which no degree divides, with documents and padding. Training by them is in
`test_matrix.py`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.distributed.tensor import apply_tensor_parallel
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.tensor_parallel import stacked_rows
from llmfoundry.ops.packed_layout import IGNORE
from llmfoundry.ops.shard_layout import assign, block_view, local_blocks
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.parallel import Degrees, ParallelConfig, limits
from llmfoundry.recipe.train import TrainRecipe
from tests.distributed.test_context import LENGTHS, make_batch
from tests.models.test_decoder import (
    SETTINGS,
    cached,
    make_config,
    make_model,
    plain_logits,
    plain_weights,
)
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
UNEVEN = {"vocab_size": 67, "tie_word_embeddings": False}  # rows of the head: 34 and 33
OPTIONS = SETTINGS | {"uneven": UNEVEN, "uneven-tied": {"vocab_size": 67}}
ROUTINE = (
    "learned",
    "alibi-gqa-window",
    "latent-q",
    "qk-gn",
    "sinks",
    "glu-silu",
    "dmoe-dbrx",
    "rmsnorm",
    "logit-scale-root",
    "embedding-fraction",
    "overrides-unlike",
    "uneven-tied",
)
Z_LOSS = 0.01
PARTS = [5, 1, 4, 1, 1, 1]  # of a row, as generation with a cache has them
CONFIG = ParallelConfig(data_parallel_replicate_degree=1, tensor_parallel_degree=2)


def served(name: str) -> bool:
    return not list(limits(make_config(**OPTIONS[name]), CONFIG, Degrees(tensor=2)))


NAMES = [name for name in OPTIONS if served(name)]


def work(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    meshes = build_mesh(CONFIG, World(rank, 2, rank, CPU))
    found = {}
    for name in names:
        model = make_model(make_config(**OPTIONS[name])).double()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        apply_tensor_parallel(Root(model), meshes)
        for n, parameter in model.named_parameters():
            assign(parameter, weights[n], stacked_rows(n, model.config))
        found[name] = {kind: value.tolist() for kind, value in measured(model).items()}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(model: Decoder) -> dict[str, Tensor]:
    batch = make_batch(weights=True)
    hidden = model(batch.tokens, batch.layout)
    loss, z_loss = model.losses(hidden, batch.labels, batch.weights, z_loss_weight=Z_LOSS)
    loss.backward()
    grads = [gathered(p, stacked_rows(n, model.config)) for n, p in model.named_parameters()]
    model.zero_grad()
    hidden = model(batch.tokens, batch.layout)
    found = model.log_probs(hidden, batch.labels)
    (found * torch.arange(1.0, 1 + found.numel()).view_as(found)).sum().backward()
    others = [gathered(p, stacked_rows(n, model.config)) for n, p in model.named_parameters()]
    with torch.no_grad():
        model.eval()
        parts = cached(model, batch.tokens.split(PARTS, dim=1), 13)
        return {
            "loss": loss,
            "z_loss": z_loss,
            "logits": model.head(model(batch.tokens, batch.layout)),
            "cached": torch.cat(parts, 1),
            "log_probs": found,
            "grads": torch.cat([grad.flatten() for grad in grads]),
            "others": torch.cat([grad.flatten() for grad in others]),
        }


def gathered(parameter: nn.Parameter, stacked: tuple[int, ...]) -> Tensor:
    """The whole gradient: of what is whole on both processes, both have a part of it."""
    grad, whole = parameter.grad, torch.zeros(parameter.shape, dtype=parameter.dtype)
    if grad is None:
        return whole
    share = 1.0
    if isinstance(grad, DTensor):
        assert isinstance(parameter.data, DTensor)
        if not grad.placements[0].is_partial():
            assert grad.placements == parameter.data.placements, (
                "no gradient is whole but of what is"
            )
        share = float(not grad.placements[0].is_replicate() or dist.get_rank() == 0)
        grad = grad.to_local()
    for block in local_blocks(parameter, stacked):
        block_view(whole, block.full).copy_(block_view(grad, block.local) * share)
    dist.all_reduce(whole)
    return whole


@cache
def of_ranks(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    with TemporaryDirectory() as folder:
        on_ranks(work, (Path(folder), names), 2)
        return json.loads((Path(folder) / "found.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ROUTINE else pytest.mark.slow) for n in NAMES]
)
def test_shared_matrices_give_what_the_plain_decoder_gives(name: str) -> None:
    config, batch = make_config(**OPTIONS[name]), make_batch(weights=True)
    found = of_ranks(ROUTINE if name in ROUTINE else tuple(n for n in NAMES if n not in ROUTINE))
    leaves = plain_weights(make_model(config).double())
    logits = plain_logits(leaves, config, batch.tokens, LENGTHS)
    targets, weights = batch.labels.flatten(), batch.weights
    assert weights is not None
    nats = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="none")
    factors = torch.arange(1.0, 1 + nats.numel())
    squares = torch.where(targets == IGNORE, 0, logits.flatten(0, 1).logsumexp(-1).square())
    z_loss = Z_LOSS * (squares * weights.flatten()).sum()
    sums = [(nats * weights.flatten()).sum() + z_loss, -(nats * factors).sum()]
    grads = [
        torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for g, p in zip(of_sum, leaves.values(), strict=True)
            ]
        )
        for of_sum in (
            torch.autograd.grad(s, list(leaves.values()), allow_unused=True, retain_graph=True)
            for s in sums
        )
    ]
    with torch.no_grad():
        alone = make_model(config).double().eval()
        parts = cached(alone, batch.tokens.split(PARTS, dim=1), 13)
    real = torch.arange(13) < 13 - torch.tensor([0, 0, 2, 2])[:, None]  # experts leave out others
    expected = {
        "loss": sums[0],
        "z_loss": z_loss,
        "logits": logits,
        "cached": torch.cat(parts, 1),
        "log_probs": -nats.view(4, 13),
        "grads": grads[0],
        "others": grads[1],
    }
    for kind, value in expected.items():
        got = torch.tensor(found[name][kind], dtype=torch.float64)
        if kind == "logits":
            got, value = got[real], value[real]
        torch.testing.assert_close(
            got, value.detach(), rtol=1e-5, atol=2e-5, msg=lambda m, k=kind: f"{k}: {m}"
        )


def trained(model: Decoder) -> Tensor:
    """The loss of a batch; its gradients are left on the parameters."""
    batch = make_batch(weights=True)
    loss = model.loss(model(batch.tokens, batch.layout), batch.labels, batch.weights)
    loss.backward()
    return loss.detach().double()[None]


def work_in_bf16(rank: int, folder: Path, residual: torch.dtype) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    model = make_model(make_config(**OPTIONS["learned"]))
    model.use_residual_dtype(residual)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    apply_tensor_parallel(Root(model), build_mesh(CONFIG, World(rank, 2, rank, CPU)))
    for n, parameter in model.named_parameters():
        assign(parameter, weights[n], stacked_rows(n, model.config))
    with torch.autocast("cpu", torch.bfloat16):
        loss = trained(model)
    grads = [gathered(p, stacked_rows(n, model.config)) for n, p in model.named_parameters()]
    if rank == 0:
        torch.save(torch.cat([loss, *(grad.flatten() for grad in grads)]), folder / "found.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_tokens_that_travel_in_bf16_are_about_as_exact_as_one_process(
    residual: torch.dtype, tmp_path: Path
) -> None:
    """Beside float64: what a norm gives is rounded where one process would round it."""
    on_ranks(work_in_bf16, (tmp_path, residual), 2)
    alone = {}
    for dtype in (torch.float64, torch.float32):
        model = make_model(make_config(**OPTIONS["learned"])).to(dtype)
        model.use_residual_dtype(residual)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = trained(model)
        grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        alone[dtype] = torch.cat([loss, *grads])
    exact = alone[torch.float64]
    shared, one = (
        (x - exact).norm() for x in (torch.load(tmp_path / "found.pt"), alone[torch.float32])
    )
    assert 0 < shared < 1.6 * one  # gradients are rounded once more, before they are added


@pytest.mark.parametrize(
    ("recipe", "words", "line"),
    [
        (
            TrainRecipe,
            ["model.d_model=48", "model.n_heads=6", "parallel.tensor_parallel_degree=4"],
            "parallel.tensor_parallel_degree: 4 does not divide model.n_heads (6); the nearest that"
            " does is 3",
        ),
        (
            TrainRecipe,
            [
                *("model.d_model=48", "model.n_heads=4", "parallel.tensor_parallel_degree=4"),
                "model.attn_config={attn_type: grouped_query_attention, kv_n_heads: 2}",
            ],
            "parallel.tensor_parallel_degree: 4 does not divide model.attn_config.kv_n_heads (2);"
            " the nearest that does is 2",
        ),
        (
            TrainRecipe,
            ["model.attn_config.qk_ln=true", "parallel.tensor_parallel_degree=2"],
            "parallel.tensor_parallel_degree: 2, but model.attn_config.qk_ln normalizes queries and"
            " keys over all heads, which lie on several processes; write 1, or qk_gn in its place",
        ),
        (
            FinetuneRecipe,
            [
                *("adapter.name=lora", "model.quantize=nf4", "model.pretrained=runs/none"),
                "parallel.tensor_parallel_degree=2",
            ],
            "parallel.tensor_parallel_degree: 2, but an adapter's layers are not sharded; write 1,"
            " and data_parallel_shard_degree: -1",
        ),
    ],
)
def test_what_cannot_be_shared_is_one_line(recipe: Any, words: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        checked(recipe, None, ["parallel.data_parallel_replicate_degree=1", *words])
    assert line in str(error.value).splitlines()


def test_every_option_but_norms_over_all_heads_and_one_key_head_is_served() -> None:
    refused = {name for name in OPTIONS if name not in NAMES}
    assert refused == {
        *("mqa", "qk-ln", "qk-ln-of-its-own", "low-rmsnorm", "no-bias", "overrides"),
        "latent-window",  # it has three heads
    }

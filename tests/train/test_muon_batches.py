"""Muon's turns: launches by shape and not by matrix, bounded stacks, and what each matrix gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.optimizer import OptimizerConfig
from llmfoundry.train.optim import muon
from llmfoundry.train.optim.muon import NEWTON_SCHULZ, RMS, ROUNDS, Muon
from llmfoundry.train.optim.optimizers import build_optimizer
from tests.models.test_decoder import make_config
from tests.warm_scripts import on_ranks

SETTINGS = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
PER_SHAPE = 22  # 15 in the rounds; stack, 3 of the norm, a copy if tall, and 2 of the scale
PER_TURN = 12
NONE = ("view", "unsafe_view", "split", "slice", "unbind", "transpose", "expand", "scalar_tensor")


class Launches(TorchDispatchMode):
    """Counts operators that launch kernels; one on a list of tensors counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.largest = 0  # values of a batched matmul

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator."""
        name = func.name().removeprefix("aten::").partition(".")[0]
        self.n += not name.lstrip("_").startswith((*NONE, "new_empty"))
        if name == "baddbmm":
            self.largest = max(self.largest, args[2].numel())
        return func(*args, **(kwargs or {}))


def make_optimizer(
    parameters: list[Tensor], rows: tuple[int, ...] = (), **settings: Any
) -> tuple[Muon, dict[str, Any]]:
    """Muon for these parameters, and its group."""
    group = {"params": parameters, "orthogonal": True, "rows": rows}
    optimizer = Muon([group], **(SETTINGS | settings))
    optimizer.found_inf = torch.zeros((), device=parameters[0].device)
    return optimizer, optimizer.param_groups[0]


def launches(model: Decoder) -> Launches:
    """Count the operators of Muon's part of a step on the meta device."""
    config = OptimizerConfig("muon", lr=0.01)
    config.fill()
    optimizer = build_optimizer(model, config, matmul_dtype=torch.bfloat16)
    optimizer.found_inf = torch.zeros((), device="meta")  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    assert isinstance(optimizer, Muon)
    for parameter in model.parameters():
        optimizer._momentum(parameter)  # which the first step makes
    with torch.no_grad(), Launches() as counted:
        for group in optimizer.param_groups:
            if group["orthogonal"]:
                optimizer._step_matrices(group)
    return counted


EXPERTS = {"ffn_type": "dmoe", "mlp_type": "glu", "moe_num_experts": 16, "moe_top_k": 4}
ATTENTION = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True}


@pytest.mark.parametrize(
    ("ffn", "n_shapes", "n_turns"),
    [
        # queries, keys and values in a turn; out_proj, up_proj and down_proj in another
        ({"ffn_type": "mptmlp"}, 5, 2),
        # also a turn of experts; out_proj and the router in one
        (EXPERTS, 5, 3),
    ],
)
def test_launches_depend_on_shapes_and_not_on_matrices(
    ffn: dict[str, Any], n_shapes: int, n_turns: int
) -> None:
    for n_layers in (2, 12):
        config = make_config(n_layers=n_layers, attn_config=ATTENTION, ffn_config=ffn)
        with torch.device("meta"):
            counted = launches(Decoder(config))
        assert 15 * n_shapes < counted.n <= PER_SHAPE * n_shapes + PER_TURN * n_turns


def test_the_636_matrices_of_dbrx_mini_need_less_than_400_launches() -> None:
    """One by one they needed 22,782."""
    attention = ATTENTION | {"kv_n_heads": 4}
    config = make_config(
        d_model=512,
        n_heads=8,
        n_layers=12,
        attn_config=attention,
        ffn_config=EXPERTS | {"ffn_hidden_size": 896},
    )
    with torch.device("meta"):
        counted = launches(Decoder(config))
    assert counted.n < 400
    assert counted.largest <= muon.TURN_VALUES


def newton_schulz(matrix: Tensor) -> Tensor:
    """Plain iteration of one matrix in float64."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.double()
    x = x / x.norm()
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def make_matrices() -> tuple[list[nn.Parameter], list[int]]:
    """Parameters of several shapes with gradients, and heights of the matrices that one stacks."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(24, 40), (40, 24), (24, 40), (30, 30), (32, 30), (24, 40), (40, 24)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters, [rows for rows, _ in shapes]


@pytest.mark.parametrize("values", [1, 2000, 1 << 25])
def test_every_turn_size_gives_each_matrix_its_float64_update(
    values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "TURN_VALUES", values)
    parameters, _ = make_matrices()
    before = [parameter.detach().double() for parameter in parameters]
    optimizer, _ = make_optimizer([*parameters])
    with Launches() as counted:
        optimizer.step()
    assert counted.largest <= max(values, 40 * 24)
    for old, parameter in zip(before, parameters, strict=True):
        assert parameter.grad is not None
        momentum = 0.05 * parameter.grad.double()
        direction = newton_schulz(0.05 * parameter.grad.double() + 0.95 * momentum)
        step = 0.01 * RMS * max(parameter.shape) ** 0.5 * direction
        expected = old * (1 - 0.01 * 0.1) - step
        moved, should = parameter.detach().double() - old, expected - old
        assert (moved - should).norm() < 1e-4 * should.norm()
        torch.testing.assert_close(
            optimizer.state[parameter]["momentum_buffer"].double(), momentum, rtol=1e-6, atol=1e-8
        )


def test_a_cancelled_step_with_infinite_gradients_changes_nothing() -> None:
    parameters, _ = make_matrices()
    optimizer, _ = make_optimizer([*parameters])
    optimizer.step()
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    before = [tensor.detach().clone() for tensor in (*parameters, *momenta)]
    for parameter, value in zip(parameters, [float("nan"), float("inf")] * 4, strict=False):
        assert parameter.grad is not None
        parameter.grad[0, 0] = value
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for old, new in zip(before, (*parameters, *momenta), strict=True):
        assert torch.equal(old, new)


def shard(rank: int, size: int, folder: str, with_fsdp: bool) -> None:
    """Two steps on 2 tensor ranks, by rows or columns, with turns of several matrices.

    With FSDP over 2 ranks: it shards the rows of the tensor ranks' parts.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tensor_parallel"))
    for dim in (0, 1):
        parameters, _ = make_matrices()
        module = nn.ParameterList()
        for parameter in parameters:
            axis = mesh["tensor_parallel"]
            local = distribute_tensor(parameter.detach(), axis, [Shard(dim)], src_data_rank=None)
            module.append(nn.Parameter(local))
        if with_fsdp:
            fully_shard(module, mesh=mesh["shard"])
        sharded = [*module.parameters()]
        for parameter, part in zip(parameters, sharded, strict=True):
            assert parameter.grad is not None and isinstance(part, DTensor)
            part.grad = distribute_tensor(
                parameter.grad, part.device_mesh, part.placements, src_data_rank=None
            )
        for optimizer, _ in (make_optimizer([*parameters]), make_optimizer([*sharded])):
            optimizer.step()
            optimizer.step()
        for full, part in zip(parameters, sharded, strict=True):
            torch.testing.assert_close(full_tensor(part.detach()), full, rtol=1e-6, atol=1e-7)
    Path(folder, str(rank)).touch()
    dist.destroy_process_group()


@pytest.mark.parametrize("with_fsdp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tensor_ranks_get_the_updates_of_one_process(with_fsdp: bool, tmp_path: Path) -> None:
    size = 4 if with_fsdp else 2
    on_ranks(shard, (size, str(tmp_path), with_fsdp), size)
    assert {str(rank) for rank in range(size)} <= {path.name for path in tmp_path.iterdir()}

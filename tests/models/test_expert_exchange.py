"""Experts on other ranks, by shapes alone: what waits for what, what is sent, and what is saved.

Results are those of one process in tests/distributed/. Here one rank of four runs on fake tensors
that stand for a GPU's, and whatever asks for a value raises.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from llmfoundry.models.moe import MoE
from llmfoundry.ops.devices import PlannedDevice, planned_for
from llmfoundry.ops.torch_private import imagined_meshes
from tests.models.test_decoder import make_config

ROWS, LENGTH, D, K, RANKS = 2, 32, 24, 2, 4
N = ROWS * LENGTH * K
NAMES = {
    "_c10d_functional.all_to_all_single": "send",
    "_c10d_functional.wait_tensor": "wait",
    "llmfoundry.moe_forward": "experts",
    "llmfoundry.moe_backward": "experts",
}


class Log(TorchDispatchMode):
    """Exchanges of rows and numbers with their sizes, waits for them, and experts, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, Any]] = []
        self._number: dict[int, int] = {}  # of each exchange, by the storage that it fills

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        event = NAMES.get(str(func.overloadpacket))
        if event == "send":
            storage = result.untyped_storage()._cdata
            self._number[storage] = sum(name == "send" for name, _ in self.events)
            self.events.append((event, tuple(args[0].shape)))
        elif event == "wait":
            self.events.append((event, self._number[args[0].untyped_storage()._cdata]))
        elif event is not None:
            self.events.append((event, None))
        return result

    def take(self) -> list[tuple[str, Any]]:
        events, self.events = self.events, []
        return events


def passes(
    *, capacity: float | None, n_parts: int
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]], list[tuple[int, ...]]]:
    """Events of a forward and of a backward pass, and shapes of the tensors saved in between."""
    ffn = {
        "ffn_type": "dmoe",
        "ffn_act_fn": "silu",
        "ffn_hidden_size": 16,
        "moe_num_experts": 8,
        "moe_top_k": K,
    }
    saved: dict[int, tuple[int, ...]] = {}  # by storage

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tuple(tensor.shape)
        return tensor

    device = PlannedDevice("cuda", lambda function: function)
    with imagined_meshes({"expert": RANKS}) as meshes, FakeTensorMode():
        layer = MoE(make_config(ffn_config=ffn, no_bias=True)).train()
        layer.group, layer.capacity = meshes["expert"].get_group(), capacity
        layer.n_parts = n_parts
        for module, ranks in ((layer.experts, RANKS), (layer.router, 1)):
            for name, weight in list(module.named_parameters()):
                local = weight.detach().chunk(ranks)[0].bfloat16()
                setattr(module, name, torch.nn.Parameter(local))
        x = torch.randn(ROWS, LENGTH, D, dtype=torch.bfloat16, requires_grad=True)
        with planned_for(device), Log() as log:
            with saved_tensors_hooks(save, lambda tensor: tensor):
                y, _ = layer(x)
            forward = log.take()
            y.sum().backward()
            return forward, log.take(), list(saved.values())


def sent(events: list[tuple[str, Any]]) -> list[tuple[int, ...]]:
    return [shape for name, shape in events if name == "send"]


def test_rows_travel_with_their_weights_and_numbers_of_rows_before_them() -> None:
    forward, backward, _ = passes(capacity=None, n_parts=1)
    assert sent(forward) == [(8,), (N, 2), (N, D), (N, D)]
    assert sorted(sent(backward)) == [(N, 2), (N, D), (N, D)]


@pytest.mark.parametrize(("capacity", "rows"), [(1.0, N), (1.5, 3 * N // 2), (9.0, RANKS * N)])
def test_with_a_capacity_as_many_rows_travel_and_no_numbers_of_rows(
    capacity: float, rows: int
) -> None:
    forward, backward, _ = passes(capacity=capacity, n_parts=1)
    assert sent(forward) == [(rows, 2), (rows, D), (rows, D)]
    assert sorted(sent(backward)) == [(rows, 2), (rows, D), (rows, D)]


def test_returned_rows_are_not_saved() -> None:
    """Only those that the experts of this rank received, and their pre-activations."""
    _, _, saved = passes(capacity=None, n_parts=1)
    assert saved.count((N, D)) == 1


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_exchanges_of_one_half_overlap_with_the_experts_of_the_other(
    capacity: float | None,
) -> None:
    """Between the experts of the halves nothing waits for the first half's rows to return."""
    forward, backward, _ = passes(capacity=capacity, n_parts=2)
    for events in (forward, backward):
        first, second = (i for i, event in enumerate(events) if event[0] == "experts")
        numbers = [i for i, event in enumerate(events) if event[0] == "send"]
        waited = {event[1]: i for i, event in enumerate(events) if event[0] == "wait"}
        # exchanges in flight while the first and while the second half is computed
        during = [
            [n for n, start in enumerate(numbers) if start < begin and waited[n] > begin]
            for begin in (first, second)
        ]
        shapes = sent(events)
        assert [any(shapes[n][1:] == (D,) for n in flying) for flying in during] == [True, True]

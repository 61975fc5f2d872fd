"""The mixture-of-experts layer beside a dense one of equal active FLOPs, as ratios.

    python -m benchmarks.moe [--tokens 4096] [--d 512] [--f 1024] [--experts 16] [--top-k 4]

Forward and backward of the experts alone, without the router. On a CPU by two clocks, the wall's
on all threads and the process's, which neighbours disturb least; on a GPU by the device's.
Contenders alternate, the fastest of the rounds count, and every ratio is of one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.matmul import linear, mm
from llmfoundry.ops.moe.backends import mixture, refusal
from llmfoundry.ops.moe.experts import Experts
from llmfoundry.ops.moe.routing import route

ZIPF = 1.0  # exponent of the skewed load: expert e is wanted in proportion to 1 / (e + 1)
CEILING = 8192  # a square product of this size on a GPU is what it can reach


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer.

    Attributes:
        tokens: T.
        d: width of a token.
        f: inner width of an expert.
        experts: how many.
        top_k: experts a token visits.
    """

    tokens: int
    d: int
    f: int
    experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """Of a forward and backward pass: 2 a multiply-add, 3 products of 3 matrices."""
        return 18 * self.tokens * self.top_k * self.d * self.f


Layer = Callable[[Tensor], Tensor]
Times = dict[str, float]  # clock -> seconds


def contenders(
    shape: LayerShape, dtype: torch.dtype, device: str
) -> dict[str, tuple[Layer, list[Tensor]]]:
    """What is timed: a function of x (T, d), and the weights whose gradients it is to give."""

    def random(*size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter((torch.randn(*size, device=device) * 0.02).to(dtype))

    d, f, n, k = shape.d, shape.f, shape.experts, shape.top_k
    dense: list[Tensor] = [random(k * f, d), random(k * f, d), random(d, k * f)]
    stacked: list[Tensor] = [random(n, f, d) for _ in range(3)]
    even, skewed = _choices(shape, device, 0.0), _choices(shape, device, ZIPF)
    ours = partial(_ours, stacked=stacked)
    layers: dict[str, tuple[Layer, list[Tensor]]] = {
        "dense": (lambda x: linear(F.silu(linear(x, dense[0])) * linear(x, dense[1]), dense[2]),
                  dense),
        "grouped_mm": (ours(*even, impl="grouped_mm"), stacked),
        "grouped_mm, Zipf load": (ours(*skewed, impl="grouped_mm"), stacked),
        "grouped_mm, 8-bit storage": (ours(*even, impl="grouped_mm", compress=True), stacked),
        "torch": (ours(*even, impl="torch"), stacked),
    }  # fmt: skip
    if refusal("grouped_mm", device, dtype, d, f) is None:
        layers["F.grouped_mm by autograd"] = (_by_autograd(*even, stacked), stacked)
    if device == "cpu":
        layers["transformers' DBRX"] = _transformers(shape, *even, stacked)
    if refusal("megablocks", device, dtype, d, f) is None:
        layers["megablocks"] = (ours(*even, impl="megablocks"), stacked)
    return layers


def _ours(
    weights: Tensor, experts: Tensor, *, stacked: list[Tensor], impl: str, compress: bool = False
) -> Layer:
    w = Experts(stacked[0], stacked[1], stacked[2])
    return lambda x: mixture(x, weights, experts, w, impl=impl, compress=compress)


def _by_autograd(weights: Tensor, experts: Tensor, stacked: list[Tensor]) -> Layer:
    """What one writes first: three grouped products, each saved with all it touches."""
    order, inverse, ends = route(experts, stacked[0].shape[0])

    def layer(x: Tensor) -> Tensor:
        rows = x[order // experts.shape[1]]
        both = torch.cat(stacked[:2], dim=1).transpose(1, 2)
        gate, up = F.grouped_mm(rows, both, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, stacked[2], offs=ends)
        return (y[inverse].view(*experts.shape, -1) * weights[..., None].to(x.dtype)).sum(1)

    return layer


def _transformers(
    shape: LayerShape, weights: Tensor, experts: Tensor, stacked: list[Tensor]
) -> tuple[Layer, list[Tensor]]:
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    config = SimpleNamespace(
        hidden_size=shape.d,
        ffn_hidden_size=shape.f,
        moe_num_experts=shape.experts,
        ffn_act_fn={"name": "silu"},
    )
    module = DbrxExperts(config).to(stacked[0].dtype)
    weights = weights.to(stacked[0].dtype)
    return lambda x: module(x[None], experts, weights).view_as(x), list(module.parameters())


def _choices(shape: LayerShape, device: str, exponent: float) -> tuple[Tensor, Tensor]:
    """Random weights (T, k) and experts (T, k), expert e drawn with (e + 1) ** -exponent."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(shape.tokens, shape.experts, generator=generator)
    gumbel = -torch.log(-torch.log(uniform))
    gumbel -= exponent * torch.log(torch.arange(1, shape.experts + 1))
    weights = torch.rand(shape.tokens, shape.top_k, generator=generator).to(device)
    return weights.requires_grad_(), gumbel.topk(shape.top_k).indices.to(device)


def saved_bytes(layer: Layer, x: Tensor) -> int:
    """Bytes that wait for the backward pass, each memory once, without weights."""
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        if not isinstance(saved._base if saved._base is not None else saved, torch.nn.Parameter):
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = layer(x)  # held: what is freed could be counted twice
    del y
    return sum(kept.values())


def seconds(
    layers: dict[str, tuple[Layer, list[Tensor]]], x: Tensor, rounds: int
) -> dict[str, Times]:
    """Time of each layer's fastest pass forward and backward, of `rounds` by turns."""
    grad = torch.randn_like(x)
    taken: dict[str, list[Times]] = {name: [] for name in layers}
    for turn in range(rounds + 1):
        for name, (layer, parameters) in layers.items():
            times = _timed(partial(_step, layer, x, parameters, grad), x.device)
            if turn > 0:  # the first warms up
                taken[name].append(times)
    return {name: _fastest(times) for name, times in taken.items()}


def _step(layer: Layer, x: Tensor, parameters: list[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(layer(x), [x, *parameters], grad)


def _timed(step: Callable[[], object], device: torch.device) -> Times:
    if device.type == "cpu":
        wall, process = time.perf_counter(), time.process_time()
        step()
        return {"wall": time.perf_counter() - wall, "CPU": time.process_time() - process}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    step()
    events[1].record()
    events[1].synchronize()
    return {"GPU": events[0].elapsed_time(events[1]) / 1000}


def _fastest(times: list[Times]) -> Times:
    """By each clock for itself."""
    return {clock: min(t[clock] for t in times) for clock in times[0]}


def _ceiling(dtype: torch.dtype, device: torch.device) -> Times:
    """Seconds a FLOP of one large product: on a CPU of a size that takes a moment."""
    n = CEILING if device.type == "cuda" else CEILING // 8
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    fastest = _fastest([_timed(partial(mm, a, b), device) for _ in range(10)])
    return {clock: taken / (2 * n**3) for clock, taken in fastest.items()}


def table(shape: LayerShape, dtype: torch.dtype, device: str, rounds: int) -> str:
    """A line a contender: by each clock time over dense and share of the matmul ceiling; bytes."""
    x = torch.randn(shape.tokens, shape.d, device=device).to(dtype).requires_grad_()
    layers = contenders(shape, dtype, device)
    times, ceiling = seconds(layers, x, rounds), _ceiling(dtype, x.device)
    head = "".join(f"{clock + ' ms':>10}{'x dense':>9}{'of matmul':>11}" for clock in ceiling)
    lines = [f"{str(dtype)[6:]:28}{head}{'saved B/token':>15}"]
    for name, taken in times.items():
        line = f"{name:28}"
        for clock, least in ceiling.items():
            line += f"{taken[clock] * 1e3:10.1f}{taken[clock] / times['dense'][clock]:9.2f}"
            line += f"{shape.flops * least / taken[clock]:11.0%}"
        saved = saved_bytes(layers[name][0], x) / shape.tokens / shape.d
        lines.append(f"{line}{saved:13.1f} d")
    return "\n".join(lines)


def main() -> None:
    """Print the tables of both precisions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"tokens": 4096, "d": 512, "f": 1024, "experts": 16, "top-k": 4, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    shape = LayerShape(given.tokens, given.d, given.f, given.experts, given.top_k)
    where = f"{torch.get_num_threads()} CPU threads" if given.device == "cpu" else given.device
    print(f"{shape}; {where}; fastest of {given.rounds} rounds")
    for dtype in (torch.float32, torch.bfloat16):
        print(table(shape, dtype, given.device, given.rounds))


if __name__ == "__main__":
    main()

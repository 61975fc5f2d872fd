"""Mixtures of experts: the layer next to a dense one, and a model next to transformers' DBRX.

    python -m benchmarks.moe layer [--tokens 4096] [--d 512] [--f 1024] [--experts 16] [--top-k 4]
    python -m benchmarks.moe model [--rounds 3] [--steps 24] [--sizes large small]

`layer`: forward and backward of the experts alone, without the router, next to a dense layer of as
many active FLOPs: on a GPU where there is one, by its clock; on a CPU by two clocks, wall time on
all threads and CPU time of the process. `model`: whole training steps. Both interleaved, as ratios.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import SIZES
from benchmarks.harness import (
    Measured,
    contender,
    interleaved,
    measure,
    ours,
    over_rounds,
    prepare,
    ratio,
    shown,
    speeds,
    table,
    write,
)  # fmt: skip
from llmfoundry.ops.moe.experts import Experts, route
from llmfoundry.ops.moe.mixture import mixture, refusal

DENSE = "dense"
ZIPF = 1.0  # exponent of the skewed load: expert e is chosen in proportion to 1 / (e + 1)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer.

    Attributes:
        tokens: T.
        d: width of a token.
        f: inner width of an expert.
        experts: how many.
        top_k: experts of a token.
    """

    tokens: int
    d: int
    f: int
    experts: int
    top_k: int


Layer = Callable[[Tensor], Tensor]
Times = dict[str, float]  # clock -> seconds


def contenders(
    shape: LayerShape, dtype: torch.dtype, device: str
) -> dict[str, tuple[Layer, list[Tensor]]]:
    """What is timed: a function of x (T, d), and the weights that need gradients."""

    def random(*size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter((torch.randn(*size, device=device) * 0.02).to(dtype))

    d, f, n, k = shape.d, shape.f, shape.experts, shape.top_k
    dense: list[Tensor] = [random(k * f, d), random(k * f, d), random(d, k * f)]
    stacked: list[Tensor] = [random(n, f, d) for _ in range(3)]
    even, skewed = _choices(shape, device, 0.0), _choices(shape, device, ZIPF)
    mine = partial(_ours, stacked=stacked)
    layers: dict[str, tuple[Layer, list[Tensor]]] = {
        DENSE: (lambda x: _dense(x, *dense), dense),
        "grouped_mm": (mine(*even, impl="grouped_mm"), stacked),
        "grouped_mm, Zipf load": (mine(*skewed, impl="grouped_mm"), stacked),
        "torch": (mine(*even, impl="torch"), stacked),
    }  # fmt: skip
    if refusal("grouped_mm", device, dtype, d, f) is None:
        layers["F.grouped_mm by autograd"] = (_by_autograd(*even, stacked), stacked)
    if device == "cpu" and find_spec("transformers") is not None:
        layers["transformers' DBRX"] = _transformers(shape, *even, stacked)
    if refusal("megablocks", device, dtype, d, f) is None:
        layers["megablocks"] = (mine(*even, impl="megablocks"), stacked)
    return layers


def _dense(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _ours(weights: Tensor, experts: Tensor, *, stacked: list[Tensor], impl: str) -> Layer:
    w = Experts(stacked[0], stacked[1], stacked[2])
    return lambda x: mixture(x, weights, experts, w, impl=impl)


def _by_autograd(weights: Tensor, experts: Tensor, stacked: list[Tensor]) -> Layer:
    """The straightforward way: three grouped products, each saving all of its inputs."""
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
    """Bytes saved for the backward pass, each storage once, without weights."""
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        if not isinstance(saved._base if saved._base is not None else saved, torch.nn.Parameter):
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = layer(x)  # kept alive: freed memory could be counted twice
    del y
    return sum(kept.values())


def seconds(
    layers: dict[str, tuple[Layer, list[Tensor]]], x: Tensor, rounds: int
) -> dict[str, list[Times]]:
    """Times of each layer's forward and backward passes, interleaved; the first round warms up."""
    grad = torch.randn_like(x)
    passes: dict[str, Callable[[], Times]] = {
        name: partial(timed, partial(_step, layer, x, weights, grad), x.device)
        for name, (layer, weights) in layers.items()
    }
    taken = interleaved(lambda _: passes, rounds=rounds + 1)
    return {name: times[1:] for name, times in taken.items()}


def _step(layer: Layer, x: Tensor, parameters: list[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(layer(x), [x, *parameters], grad)


def timed(step: Callable[[], object], device: torch.device) -> Times:
    """Seconds that a call takes, by the clocks of its device."""
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


def layer_rows(
    shape: LayerShape, dtype: torch.dtype, device: str, rounds: int
) -> list[dict[str, Any]]:
    """A row for each contender: time by each clock, ratio to the dense layer, saved bytes."""
    x = torch.randn(shape.tokens, shape.d, device=device).to(dtype).requires_grad_()
    layers = contenders(shape, dtype, device)
    times = seconds(layers, x, rounds)
    rows = []
    for name, taken in times.items():
        row: dict[str, Any] = {"contender": name, "dtype": str(dtype)[6:]}
        for clock in taken[0]:
            row[f"ms, {clock}"] = over_rounds(t[clock] * 1e3 for t in taken)
            row[f"of dense, {clock}"] = ratio(taken, times[DENSE], lambda t, c=clock: t[c])  # type: ignore[misc]
        saved = saved_bytes(layers[name][0], x) / shape.tokens / shape.d
        rows.append({**row, "saved a token, d": round(saved, 1)})
    return rows


def layer(words: list[str]) -> None:
    """Print a table for each precision, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.moe layer")
    sizes = {"tokens": 4096, "d": 512, "f": 1024, "experts": 16, "top-k": 4, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(words)
    shape = LayerShape(given.tokens, given.d, given.f, given.experts, given.top_k)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        found = layer_rows(shape, dtype, given.device, given.rounds)
        numbers = [key for key in found[0] if key not in ("contender", "dtype")]
        columns = {"contender": "{}"} | {k: "{:.2f}" if "of" in k else "{:.1f}" for k in numbers}
        print("\n".join(["", str(dtype)[6:], *table(found, columns)]), flush=True)
        rows += found
    print(f"\nwritten to {write('moe-layer', rows, vars(given))}")


WARM_UP = 12  # steps until freed memory fits later requests, and hardly any is new
DBRX = "transformers' DBRX"
PRECISIONS = {
    "fp32": ["fp32"],
    "bf16": ["amp_bf16", "bf16"],
}  # theirs -> ours
COLUMNS = shown("DBRX") | {"parameters": "{:,}"}


def model(words: list[str]) -> None:
    """Print a table for each size and precision as it comes, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.moe model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="of each contender")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    given = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            recipe = prepare(SIZES[size].recipe, Path(folder) / "bench.yaml")
            for precision in PRECISIONS:
                models = partial(_models, recipe, size, precision, given.steps)
                found = speeds(interleaved(models, rounds=given.rounds), lambda _: DBRX, "DBRX")
                print("\n".join(["", f"{SIZES[size]}; {precision}", *table(found, COLUMNS)]))
                rows += [{"size": size, "theirs": precision} | row for row in found]
    sizes = {size: str(SIZES[size]) for size in given.sizes}
    print(f"\nwritten to {write('moe-model', rows, vars(given) | {'sizes': sizes})}")


def _models(
    recipe: Path, size: str, precision: str, steps: int, turn: int
) -> dict[str, Callable[[], Measured]]:
    commands = {f"ours, {p}": ours(recipe, p, steps, f"{p}-{turn}") for p in PRECISIONS[precision]}
    commands[DBRX] = contender("hf_dbrx", size=size, precision=precision, steps=steps)
    return {who: partial(_measure, recipe.parent, words) for who, words in commands.items()}


def _measure(folder: Path, command: Sequence[str]) -> Measured:
    found = measure(command, folder, warm_up=WARM_UP)
    shutil.rmtree(folder / "runs", ignore_errors=True)  # a checkpoint of 1 GiB
    assert found.parameters is not None, f"{command} did not print its size"
    return found


if __name__ == "__main__":
    {"layer": layer, "model": model}[sys.argv[1]](sys.argv[2:])

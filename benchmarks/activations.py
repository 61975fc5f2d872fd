"""Activation memory: what each way to keep less keeps, and what it costs in time and loss.

    python -m benchmarks.activations [--steps 100] [--only dense]

A dense model and a mixture learn the bytes of this project's documentation, each way from the same
weights on the same rows, one step of each in turn: so that a step's ratios are of the same minute.
Compiled ones come one after the other, for compiled graphs are shared in a process. `kept` is what
a step's rows have alive from the forward pass to the backward pass, `peak` the most at a time, both
by what more rows add: copies of weights, and gradients, cancel out. Takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import over_rounds, table, write
from llmfoundry.builders.model import build_autocast
from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.torch_private import storage_reference
from llmfoundry.plan.meter import LiveBytes
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.paths import ROOT
from llmfoundry.recipe.typed import build

LENGTH, ROWS, LAST = 128, 2, 10  # tokens of a row, rows of a step, steps whose losses are compared
BASE = {
    "d_model": 96, "n_heads": 3, "n_layers": 4, "no_bias": True, "vocab_size": 256,
    "max_seq_len": LENGTH, "attn_config": {"rope": True},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # quickstart's and dbrx-tiny's kinds
    "dense": BASE | {"ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": "silu"}},
    "mixture": BASE
    | {
        "ffn_config": {
            "ffn_type": "dmoe", "mlp_type": "glu", "ffn_act_fn": "silu", "ffn_hidden_size": 128,
            "moe_num_experts": 8, "moe_top_k": 2, "moe_normalize_expert_weights": 1,
        }
    },
}  # fmt: skip
NOTHING, COMPILED = "nothing", "nothing, compiled"


def ways(model: str) -> dict[str, dict[str, Any]]:
    """Settings of `parallel`, and compile, by name."""
    parts = ["attention", "feed_forward", "norm", *(["experts"] if model == "mixture" else [])]
    whole, int8 = {"activation_checkpointing": "whole"}, {"activation_compression": "int8"}
    return {
        NOTHING: {},
        "selective": {"activation_checkpointing": "selective"},
        "block": whole,
        **{part: whole | {"activation_checkpointing_target": part} for part in parts},
        "block, first half": whole | {"activation_checkpointing_target": {"block": "first-2"}},
        "int8": int8,
        "fp8": {"activation_compression": "fp8"},
        "selective and int8": {"activation_checkpointing": "selective"} | int8,
        "block and int8": whole | int8,
        COMPILED: {"compile": True},
        "budget 0.5": {"compile": True, "activation_memory_budget": 0.5},
    }


@dataclass
class Contender:
    """One way's model, and what was measured of it.

    Attributes:
        root: in training mode.
        optimizer: of it.
        compiled: its compilation mode.
        losses, seconds: of each step.
        kept, peak: bytes; peak is not known of compiled graphs.
    """

    root: Root
    optimizer: torch.optim.Optimizer
    compiled: bool
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kept: float = 0
    peak: float | None = None

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean of the next byte's cross-entropy, in nats."""
        with build_autocast("amp_bf16", torch.device("cpu"))():
            labels = tokens[:, 1:]
            total = self.root(tokens[:, :-1], None, lambda model, h: model.loss(h, labels))
        return total / labels.numel()

    def step(self, tokens: Tensor) -> None:
        """Take one, timed."""
        start = time.perf_counter()
        loss = self.loss(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.root.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def measure(self, tokens: Tensor) -> None:
        """What two steps' rows more than one's have alive, for one."""
        few, many = (self._alive(tokens.repeat(times, 1)) for times in (1, 3))
        self.kept = (many[0] - few[0]) / 2
        self.peak = None if self.compiled else (many[1] - few[1]) / 2

    def _alive(self, tokens: Tensor) -> tuple[int, int]:
        """Bytes after a forward pass, and at most until the end of a backward pass."""
        if self.compiled:  # operators cannot be watched, but saved tensors can
            held: dict[Any, int] = {}

            def note(tensor: Tensor) -> Tensor:
                held[storage_reference(tensor)] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                self.loss(tokens).backward()
            found = sum(held.values()), 0
        else:
            with LiveBytes() as live:
                loss = self.loss(tokens)
                kept = live.now()
                loss.backward()
                found = kept, live.most
        self.optimizer.zero_grad()
        return found


def make(model: str, settings: dict[str, Any]) -> Contender:
    """The same weights for all."""
    config = build(ModelConfig, MODELS[model], []).resolve()
    decoder = Decoder(config)
    decoder.init_weights(17)
    root, settings = Root(decoder).train(), dict(settings)
    compiled = settings.pop("compile", False)
    memory = ParallelConfig(**settings).activation_memory(config.n_layers)
    wrap_blocks(root, memory, compile_mode="default" if compiled else None)
    optimizer = torch.optim.AdamW(root.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return Contender(root, optimizer, compiled)


def batches(steps: int) -> Callable[[int], Tensor]:
    """Rows of this project's documentation, (ROWS, LENGTH + 1), by the step."""
    files = sorted([*ROOT.glob("*.md"), *(ROOT / "llmfoundry").rglob("*.md")])
    text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - LENGTH - 1, (steps, ROWS), generator=generator)
    places = torch.arange(LENGTH + 1)
    return lambda step: text[starts[step][:, None] + places].long()


def main() -> None:
    """Train all, print a table for each model, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--uncompiled", action="store_true", help="leave the compiled ways out")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in [given.only] if given.only else MODELS:
        rows += compare(model, given.steps, compiled=not given.uncompiled)
    path = write("activations", rows, {"steps": given.steps, "tokens": LENGTH * ROWS, **BASE})
    print(path)


def compare(model: str, steps: int, *, compiled: bool = True) -> list[dict[str, Any]]:
    """Rows of one model, which are printed."""
    data, found = batches(steps), dict[str, Contender]()
    plain = {name: how for name, how in ways(model).items() if "compile" not in how}
    rest = [{n: h} for n, h in ways(model).items() if n not in plain] if compiled else []
    for group in [plain, *rest]:
        torch._dynamo.reset()
        here = {name: make(model, settings) for name, settings in group.items()}
        for step in range(steps):
            for one in here.values():
                one.step(data(step))
        for one in here.values():
            one.measure(data(0))
        found |= here
    rows = []
    for name, one in found.items():
        base = found[COMPILED if one.compiled else NOTHING]
        ratios = [a / b for a, b in zip(one.seconds[2:], base.seconds[2:], strict=True)]
        last, right = (statistics.mean(each.losses[-LAST:]) for each in (one, base))
        rows.append(
            {
                "model": model,
                "way": name,
                "kept MiB": one.kept / 2**20,
                "of kept": one.kept / base.kept,
                "peak MiB": None if one.peak is None else one.peak / 2**20,
                "loss": last,
                "loss apart, %": 100 * (last / right - 1),
                "of time": over_rounds(ratios),
            }
        )
    shown = {"way": "{}", "kept MiB": "{:.2f}", "of kept": "{:.3f}", "peak MiB": "{:.2f}"}
    shown |= {"loss": "{:.4f}", "loss apart, %": "{:+.3f}", "of time": "{:.2f}"}
    print(model, *table(rows, shown), sep="\n")
    return rows


if __name__ == "__main__":
    main()

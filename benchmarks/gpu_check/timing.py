"""The plugin that times a run of `scripts/train.py` for a GPU check, and ends it before it saves.

It leaves a row in a file: time of a step by the device's own clock, memory next to its estimate,
losses, waits for data and, where it is asked for, what saving costs or which kernels a step runs.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.measure import GIB, mark, seconds_between, wait_for
from benchmarks.gpu_check.plan import append
from llmfoundry.builders.model import matmul_dtype
from llmfoundry.builders.run_context import RunContext
from llmfoundry.models.attention import attention_specs
from llmfoundry.models.counts import gpu_here, trained_flops_per_token
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.attention.select import choose
from llmfoundry.plan.memory import estimate
from llmfoundry.plan.microbatch_sizes import FRAMEWORK
from llmfoundry.plan.seconds import speeds, step_seconds
from llmfoundry.recipe.choice_table import REQUIRED
from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.callbacks import peak_memory
from llmfoundry.train.trainer import Callback, Trainer

LARGEST = 10  # kernels that are listed
KINDS = {  # the first that matches a kernel's name
    "attention": r"flash|fmha|attention|sdpa|flex",
    "grouped products": r"grouped|gather_kernel|glu_|combine_kernel",
    "collectives": r"nccl",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|addmm|\bmm\b|matmul|linear|mkldnn|onednn",
    "optimizer": r"adam|multi_tensor|foreach|lion|muon",
    "norms": r"norm",
    "softmax and loss": r"softmax|logsumexp|nll|cross_entropy|scatter|gather",
    "embedding": r"embedding|index",
    "copies and casts": r"memcpy|memset|copy|cast|\bto\b|_to_",
    "compiled": r"triton",
    "elementwise": r"elementwise|vectorized|reduce|add|mul|gelu|silu|fill|sum|cat",
}


class Timing(Callback):
    """Times steps; after the last of them the process ends at once."""

    may_lag = True  # or each logged step would wait for the GPU

    def __init__(
        self,
        job: RunContext,
        *,
        file: str,
        warm_up: int,
        steps: int,
        profile: bool,
        saves: bool,
        weights_of_cpu: bool,
    ) -> None:
        self._job, self._file = job, Path(file)
        self._warm_up, self._last = warm_up, warm_up + steps
        self._profiles, self._saves, self._weights_of_cpu = profile, saves, weights_of_cpu
        self._profiler: Any = None
        self._marks: list[Any] = []
        self._first_step = 0.0
        self._losses: list[float] = []
        self._waits: list[float] = []

    def on_start(self, trainer: Trainer) -> None:
        """Take the weights that a CPU draws: a GPU's generator gives other numbers of a seed."""
        if self._weights_of_cpu:
            model = self._job.root.model
            assert isinstance(model, Decoder)
            twin = Decoder(model.config)
            twin.init_weights(self._job.recipe.seed)
            model.load_state_dict(twin.state_dict())

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Keep the loss, and how long the loop waited for rows."""
        self._losses.append(metrics["loss/train/total"])
        self._waits.append(metrics["time/data_wait"])

    def on_step(self, trainer: Trainer) -> None:
        """Take the time; begin or end a profile; end the run."""
        device = trainer.world.device
        if not self._marks:
            wait_for(device)
            self._first_step = time.time() - psutil.Process().create_time()
        self._marks.append(mark(device))
        if self._profiles and len(self._marks) == self._last - 1:
            wait_for(device)
            on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.__enter__()
        if len(self._marks) == self._last:
            wait_for(device)
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        device = trainer.world.device
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
        with trainer.training_paused():
            pass  # the last step's values are read
        spans = [seconds_between(a, b) for a, b in itertools.pairwise(self._marks)]
        counted = spans[self._warm_up - 1 :]
        if self._profiler is not None:
            counted = counted[:-1] or counted  # the profiler slows its step down
        row = {**self._speed(trainer, counted), **self._memory(device)}
        row |= {"losses": self._losses, "first step, s": self._first_step}
        row["data wait, ms"] = 1e3 * statistics.median(self._waits) if self._waits else None
        row |= self._saving(trainer, spans) if self._saves else {}
        append(self._file, row)
        if self._profiler is not None:
            for kernel in kernel_rows(self._profiler, device.type, row["step ms"]):
                append(self._file, kernel)
        sys.stdout.flush()
        os._exit(0)  # the end of a run is saved, which is not needed here

    def _speed(self, trainer: Trainer, spans: list[float]) -> dict[str, Any]:
        recipe, job = self._job.recipe, self._job
        step, tokens = statistics.median(spans), trainer.clock.tokens_per_batch
        flops = trained_flops_per_token(job.root.model, recipe.max_seq_len)
        gpu = gpu_here(trainer.world.device)
        planned = gpu and step_seconds(recipe, 1, job.microbatch, speeds(gpu, recipe)).total
        return {
            "rows": recipe.global_train_batch_size,
            "row tokens": recipe.max_seq_len,
            "microbatch": job.microbatch,
            "precision": recipe.precision,
            "attention": self._attention(trainer.world.device),
            "checkpointing": str(recipe.parallel.activation_checkpointing),
            "step ms": 1e3 * step,
            "plan ms": planned and 1e3 * planned,
            "slowest ms": 1e3 * max(spans),
            "tokens/s": tokens / step,
            "TFLOP/s": tokens * flops / step / 1e12,
            "parameters": sum(p.numel() for p in job.root.parameters()),
        }

    def _attention(self, device: torch.device) -> str:
        """The backends of the layers."""
        recipe, model = self._job.recipe, self._job.recipe.model
        impl, packed = model.attn_config.attn_impl, not recipe.data.attend_across_documents
        if impl != "auto":
            return impl
        specs = attention_specs(model, model.layers(), device).values()
        dtype = matmul_dtype(recipe.precision)
        return ", ".join({choose(s, packed, device, dtype, model.head_dim) for s in specs})

    def _memory(self, device: torch.device) -> dict[str, Any]:
        need = estimate(self._job.recipe, 1, device=device).total(self._job.microbatch)
        found = {"peak GiB": peak_memory(device) / GIB, "estimate GiB": need / GIB}
        if device.type == "cuda":
            found["estimate GiB"] -= FRAMEWORK / GIB  # which is no tensor
            found["reserved GiB"] = torch.cuda.max_memory_reserved(device) / GIB
        return found

    def _saving(self, trainer: Trainer, spans: list[float]) -> dict[str, Any]:
        """What the steps after a save took more than others; the last save is waited for."""
        interval = trainer.clock.batches(self._job.recipe.save_interval)
        saved = [n for n in range(1, len(self._marks)) if n % interval == 0]
        others = [s for n, s in enumerate(spans, 1) if n not in saved and n >= self._warm_up]
        usual, began = statistics.median(others), time.perf_counter()
        trainer.checkpointer.wait()
        files = Path(self._job.recipe.save_folder, "checkpoints").rglob("*")
        written = sum(file.stat().st_size for file in files if file.is_file())
        return {
            "step ms": 1e3 * usual,
            "blocked s": [spans[n - 1] - usual for n in saved],
            "waited at the end, s": time.perf_counter() - began,
            "checkpoint GiB": written / GIB / max(len(saved), 1),
        }


def kernel_rows(profiler: Any, device: str, step_ms: float) -> Iterator[dict[str, Any]]:
    """The largest kernels of a profiled step, then all by kind, with shares of the step's time.

    On a CPU the rows are of operators, by their own time.
    """
    spent, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    calls = Counter[str]()
    if device == "cuda":
        for event in profiler.events():
            annotates = getattr(event, "is_user_annotation", False)  # of kernels that are there too
            if event.device_type == DeviceType.CUDA and not annotates:
                spent[event.name] += event.time_range.elapsed_us() / 1e3
                calls[event.name] += 1
    else:
        for event in profiler.key_averages():
            spent[event.key] += event.self_cpu_time_total / 1e3
            calls[event.key] += event.count
    for name, ms in spent.items():
        kinds[kind(name)] += ms
    total = max(step_ms, sum(spent.values()))
    kinds["no kernel"] = total - sum(spent.values())
    for name in sorted(spent, key=lambda name: -spent[name])[:LARGEST]:
        row = {"ms": spent[name], "share": spent[name] / total}
        yield {"kernel": name, "calls": calls[name], **row}
    for name in sorted(kinds, key=lambda name: -kinds[name]):
        yield {"kind": name, "ms": kinds[name], "share": kinds[name] / total}


def kind(name: str) -> str:
    """Of a kernel, by its name."""
    found = (key for key, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "other")


KEYS = {"file": REQUIRED, "warm_up": 4, "steps": 12, "profile": False, "saves": False}
KEYS |= {"weights_of_cpu": False}
CALLBACKS["gpu_check"] = CallbackType(
    Timing, keys=KEYS, meaning="Times steps for `make gpu-check` and ends the run."
)

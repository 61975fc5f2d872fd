"""Microbatch size of a run: the estimate, a measurement by probes, and limits after out of memory.

Entry points: `settle_microbatch`, which `builders/trainer.py` calls when a run begins, and
`build_limit` for the training loop. The size is that of the estimate (`plan/fit.py`) or of a probe,
but never more than what an earlier start of the run was left with after it ran out of memory.

With `auto_probe: on`, `probe_fit` measures the largest microbatch before the run, in separate
processes (`probe_child.py`). Each rank starts one, and these form a process group like the ranks
do, so that memory of a sharded model is measured correctly. They take real steps (forward,
backward, optimizer) of the recipe's model, first with the estimated size and then with larger ones
until one does not fit. If the estimate does not fit, new processes try smaller sizes. The measured
peaks, not the choice, are stored in the cache folder by recipe, code, PyTorch version and machine.
A later start compares them with its free memory. A probe that fails or hangs does not end the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmfoundry.builders.run_context import RunContext
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.preparation.prepared_folder import cache_key
from llmfoundry.distributed.collectives import (
    all_gather_object,
    all_reduce_min,
    on_each_machine,
    on_rank0,
)
from llmfoundry.distributed.process_group import World, own_host
from llmfoundry.exit_status import ENDS_FOLDER
from llmfoundry.files import read_json, write_json
from llmfoundry.ops.devices import total_host_memory
from llmfoundry.ops.torch_private import Replicas
from llmfoundry.plan.memory import GIB
from llmfoundry.plan.microbatch_sizes import USABLE, rows_per_process
from llmfoundry.plan.search import Fit
from llmfoundry.processes import start_module
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.parallel import EXPERT
from llmfoundry.recipe.plugins import imported
from llmfoundry.recipe.train import GRAPH_MODES, ResolvedTrainRecipe
from llmfoundry.telemetry import BEATS
from llmfoundry.train.out_of_memory import KEY, NAME, MicrobatchLimit, remembered

FOLDER = "probes"
"""Subfolder of data.cache_folder."""
SECONDS = 600.0
"""Timeout of one group of probe processes, which build the model and take steps."""
STDERR = "stderr"
"""File of a probe's standard error, next to its results."""
SHORT = 3
"""Exit status of a process that ran out of memory."""
_PAUSE = 0.2  # seconds between polls of the processes
_FAILED, _RUNNING, _DONE = 0, 1, 2
_OTHER = re.compile(  # recipe keys that do not affect the memory of a step
    r"run_name|seed|max_duration|pause_at|save_\w+|load_\w+|autoresume|\w+_interval|eval_\w+|auto_probe"
    r"|device_eval_batch_size|tokenizer|data|schedule|eval|logger|callbacks|profile|health_check"
    r"|hang|supervise|preference"
)


@dataclass(frozen=True)
class ProbeRequest:
    """Input of a probe process.

    Attributes:
        recipe: resolved recipe; activation checkpointing is decided.
        sizes: microbatch sizes to try, ascending.
        rows: sequences of a step on each rank.
        available: bytes that it may use; on a GPU the limit is the device.
        results: file to which it appends a line for each size that fits.
        plugins: result of `imported`.
    """

    recipe: ResolvedTrainRecipe
    sizes: Sequence[int]
    rows: int
    available: int
    results: Path
    plugins: Sequence[str]


@dataclass
class ProbeResults:
    """Measurements of probes, the maximum over ranks.

    Attributes:
        peaks: bytes that a step needs in addition to those used before, by microbatch size.
        seconds: seconds of a step per sequence.
        too_large: free bytes with which a microbatch size did not fit.
    """

    peaks: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    too_large: dict[int, int] = field(default_factory=dict)

    def fitting(self, sizes: Sequence[int], available: int) -> int | None:
        """Return the largest size that was measured and fits; None: no size does."""
        room = USABLE * available
        fits = [rows for rows in sizes if rows in self.peaks and self.peaks[rows] <= room]
        return max(fits, default=None)

    def next_sizes(self, sizes: Sequence[int], start: int, available: int) -> list[int]:
        """Return the sizes to try, ascending; empty if no measurement can change the choice.

        These are the sizes from `start` up to one that does not fit, or, if `start` does not fit,
        the next smaller size.
        """
        below = [n for n in sizes if n < self._least_too_large(available)]
        known = self.fitting(sizes, available) or 0
        up = [n for n in below if n > known and n >= start and n not in self.peaks]
        if up:
            return up
        return [] if known else below[-1:] if below and below[-1] not in self.peaks else []

    def _least_too_large(self, available: int) -> float:
        short = [n for n, free in self.too_large.items() if free >= USABLE * available]
        short += [n for n, peak in self.peaks.items() if peak > USABLE * available]
        return min(short, default=float("inf"))


def probe_fit(
    recipe: ResolvedTrainRecipe,
    fit: Fit,
    world: World,
    *,
    available: int,
    note: Callable[[str], None],
    most: int | None = None,
) -> Fit:
    """Return the fit with the largest microbatch that was measured to fit; all ranks call this.

    Args:
        recipe: resolved recipe; its activation checkpointing is that of `fit`.
        fit: the estimate, which is returned if the probe finds nothing.
        world: this process.
        available: bytes that each rank may use.
        note: reports the result.
        most: largest size to try. Default on a GPU: all. On a CPU, and with expert parallelism, the
            estimated size: larger ones are not faster on a CPU, and the expert load in the first
            steps is several times that of a probe.
    """
    rows = rows_per_process(recipe, recipe.parallel.degrees(world.size).data)
    shared = getattr(recipe.parallel, EXPERT) != 1
    if most is None:
        most = fit.microbatch if world.device.type == "cpu" or shared else rows
    sizes = [n for n in divisors(rows) if n <= most]
    path = _cache_path(recipe, world)
    measurements = on_rank0(world, lambda: _read(path))
    problem = ""
    while not problem and (tried := measurements.next_sizes(sizes, fit.microbatch, available)):
        note(f"auto_probe: measuring steps of {_listed(tried)} rows at a time ...")
        request = ProbeRequest(recipe, tried, rows, available, Path(), imported())
        problem = _measure(request, measurements, world, note)
        if world.is_main:
            with suppress(OSError):  # if it cannot be stored, the next start measures again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, dataclasses.asdict(measurements))
    chosen = measurements.fitting(sizes, available)
    if problem:
        note(f"auto_probe: the probe failed ({problem}); what it measured before counts")
    if chosen is None:
        note(f"auto_probe: it found no size that fits; the estimate's {fit.microbatch} is used")
        return fit
    note(
        f"device_train_microbatch_size: auto is {chosen}, measured"
        f" ({measurements.peaks[chosen] / GIB:.2f} of {available / GIB:.1f} GiB,"
        f" {measurements.seconds[chosen]:.3g} s a row); the estimate is {fit.microbatch}"
    )
    return dataclasses.replace(fit, microbatch=chosen)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _measure(
    request: ProbeRequest, measurements: ProbeResults, world: World, note: Callable[[str], None]
) -> str:
    """Try sizes in one group of processes, and add to `found`; return why it failed, or ""."""
    # run one probe process per rank
    port = on_rank0(world, _free_port)
    host = on_rank0(world, own_host)
    with tempfile.TemporaryDirectory(prefix="llmfoundry-probe-") as folder:
        request = dataclasses.replace(request, results=Path(folder) / "results")
        env = _environment(host, port) if world.size > 1 else _environment()
        process = _start(request, env)
        try:
            failed = _wait(process, world)
        finally:
            process.kill()
            process.wait()
        status = process.returncode
        words = " ".join(_read_text(Path(folder) / STDERR).split())[-200:]
        results = _results(request.results)

    # a size fits if it fits on all ranks
    every = all_gather_object(world, (results, status, words))
    fits = [n for n in request.sizes if all(n in theirs for theirs, _, _ in every)]
    for n in fits:
        measurements.peaks[n] = max(theirs[n][0] for theirs, _, _ in every)
        measurements.seconds[n] = max(theirs[n][1] for theirs, _, _ in every)

    # the first size that ran out of memory, or another failure
    short = [n for n in request.sizes if n not in fits]
    if short and any(status == SHORT for _, status, _ in every):
        measurements.too_large[short[0]] = request.available
        why = next(words for _, status, words in every if status == SHORT)
        note(f"auto_probe: {short[0]} rows do not fit{why and f' ({why})'}")
        return ""
    if not short and not failed:
        return ""
    bad = [(status, words) for _, status, words in every if status > 0]
    return f"status {bad[0][0]}: {bad[0][1]}" if bad else failed or "it was killed"


def _start(request: ProbeRequest, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (request.results.parent / STDERR).open("wb") as file:  # a pipe could fill up and block
        process: subprocess.Popen[bytes] = start_module(
            "llmfoundry.builders.probe_child",
            str(os.getpid()),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(request, pipe)
    return process


def _wait(process: subprocess.Popen[bytes], world: World) -> str:
    """Wait until all probes have ended or one has failed; return why it was killed, or ""."""
    deadline = time.monotonic() + SECONDS
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PAUSE)
        status = process.returncode
        state = _RUNNING if status is None else _DONE if status == 0 else _FAILED
        is_late = time.monotonic() > deadline
        worst = all_reduce_min(world, _FAILED if is_late else state)
        if worst == _FAILED:
            return f"it took more than {SECONDS:.0f} s" if is_late else "one of its processes ended"
        if worst == _DONE:
            return ""


def _results(path: Path) -> dict[int, tuple[int, float]]:
    """Return peak and seconds by size, from the complete lines."""
    results = dict[int, tuple[int, float]]()
    for line in _read_text(path).splitlines():
        with suppress(ValueError, KeyError):
            row = json.loads(line)
            results[int(row["rows"])] = int(row["peak"]), float(row["seconds"])
    return results


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _environment(host: str = "", port: int = 0) -> dict[str, str]:
    """Return the environment of a probe: this rank, a new rendezvous, no supervisor or torchrun."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    for name in (ENDS_FOLDER, BEATS):
        env.pop(name, None)
    return env | ({"MASTER_ADDR": host, "MASTER_PORT": str(port)} if port else {})


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def _cache_path(recipe: ResolvedTrainRecipe, world: World) -> Path:
    """Return the file of the measurements."""
    every = dataclasses.asdict(recipe)
    facts = {key: value for key, value in every.items() if not _OTHER.fullmatch(key)}
    where = {"size": world.size, "device": machine(world.device), "torch": torch.__version__}
    name = cache_key(recipe=json.dumps(facts, default=str), code=_code(), **where)
    return Path(recipe.data.cache_folder).expanduser() / FOLDER / f"{name}.json"


def machine(device: torch.device) -> str:
    """Return a description of the device and its memory, equal on all machines of a kind."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {round(properties.total_memory / GIB)} GiB"
    return ", ".join([f"CPU, {round(total_host_memory() / GIB)} GiB", *_own_limits()])


def _own_limits() -> Iterator[str]:
    """Yield the memory limits of this process (ulimit)."""
    with suppress(ImportError):  # not available on Windows
        import resource

        for name in ("RLIMIT_AS", "RLIMIT_DATA"):
            limit = resource.getrlimit(getattr(resource, name))[0]
            if limit != resource.RLIM_INFINITY:
                yield f"{name} {limit / GIB:.2f} GiB"


@cache
def _code() -> str:
    """Return a hash of this package's sources."""
    digest, package = hashlib.blake2b(digest_size=12), Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> ProbeResults:
    """Return the stored measurements; empty if the file is missing or damaged."""
    try:
        record = read_json(path)
        peaks = {int(n): int(peak) for n, peak in record["peaks"].items()}
        seconds = {int(n): float(s) for n, s in record["seconds"].items()}
        too_large = {int(n): int(free) for n, free in record["too_large"].items()}
        assert peaks.keys() == seconds.keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError):
        return ProbeResults()
    return ProbeResults(peaks, seconds, too_large)


_ANY = 2**31  # sequences: no known limit
_SPARING = (  # keys of the section parallel, other than degrees, that affect memory
    *("activation_checkpointing", "activation_checkpointing_target", "activation_compression"),
    *("activation_memory_budget", "reshard_after_forward", "reduce_scatter_each_microbatch"),
    *("expert_capacity", "expert_halves"),
)


def settle_microbatch(
    recipe: ResolvedTrainRecipe,
    fit: Fit,
    run: Storage,
    world: World,
    *,
    available: int,
    note: Callable[[str], None],
) -> Fit:
    """Return the fit with the microbatch size that the run begins with; all ranks call this.

    Args:
        recipe: resolved recipe; its activation checkpointing is that of `fit`.
        fit: the estimate.
        run: storage of the run, with the limit that an earlier start was left with.
        world: this process.
        available: bytes that each rank may use.
        note: reports a size that differs from the estimate.
    """
    if recipe.auto_probe == "on":
        fit = probe_fit(recipe, fit, world, available=available, note=note)
    if recipe.save_overwrite:  # the run begins again
        return fit
    facts = memory_facts(recipe, world)
    rows, changed = on_each_machine(world, lambda: remembered(run.folder, facts))
    least = all_reduce_min(world, rows or _ANY)
    if changed:
        note(f"{KEY}: {NAME} of an earlier start is not used, as {', '.join(changed)} changed")
    if least >= fit.microbatch:
        return fit
    note(f"{KEY}: {least} in place of {fit.microbatch}, as an earlier start ran out of memory")
    return dataclasses.replace(fit, microbatch=least)


def memory_facts(recipe: ResolvedTrainRecipe, world: World) -> dict[str, Any]:
    """Return what the memory of a step depends on, apart from microbatch size and model.

    If one of these changes, the limit of an earlier start no longer applies.
    """
    degrees = dataclasses.asdict(recipe.parallel.degrees(world.size))
    keys = (
        "global_train_batch_size",
        "max_seq_len",
        "precision",
        "fp8_recipe",
        "residual_dtype",
        "compile_mode",
        KEY,
    )
    facts = {key: getattr(recipe, key) for key in (*keys, "device_loss_chunk_tokens")}
    facts["optimizer.moments"] = recipe.optimizer.moments
    for key in _SPARING:
        facts[f"parallel.{key}"] = str(getattr(recipe.parallel, key))
    return {**facts, "parallel": degrees, "machine": machine(world.device)}


def build_limit(job: RunContext, module: nn.Module) -> MicrobatchLimit:
    """Return the loop's policy for out of memory; `module` is the model wrapped in DDP or FSDP."""
    recipe, world = job.recipe, job.world
    recomputes = recipe.parallel.activation_checkpointing == "whole"
    return MicrobatchLimit(
        folder=job.run.folder,
        facts=memory_facts(recipe, world),
        rank=world.rank,
        size=world.size,
        rows=rows_per_process(recipe, recipe.parallel.degrees(world.size).data),
        in_place=world.size == 1 or (isinstance(module, Replicas) and module.can_go_on),
        is_fixed=recipe.compile_mode in GRAPH_MODES,
        hint="" if recomputes else ", or parallel.activation_checkpointing=true",
    )

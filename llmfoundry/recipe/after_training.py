"""Recipes of scripts that use runs: eval, convert, average, generate, chat, serve, track and more.

All but average.py, track.py, compare.py and runs.py take a `checkpoint`: a run's folder (its newest
complete checkpoint), a checkpoint's folder, the URL of one, such as s3://bucket/runs/mine, or a
version in MLflow's registry, such as models:/NAME@best (`builders/registry.py`). All but convert.py
also take models from other sources (`builders/open_model.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.errors import UserError
from llmfoundry.loopback import is_loopback
from llmfoundry.recipe.checks import inert_change, nearest, set_defaults
from llmfoundry.recipe.eval import WEIGHTS, EvalConfig
from llmfoundry.recipe.launch import LaunchConfig
from llmfoundry.recipe.logger import DEFAULT_TOP_P, LoggerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.registry import ExportRegistry, RegistryPlace
from llmfoundry.recipe.schema import (
    AUTO_ROWS,
    CHAT_TEMPLATE,
    NEW_TOKENS,
    PATH,
    ROWS,
    TEMPERATURE,
    TOKENS,
    TOP_P,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)

LOADED_PRECISIONS = ("fp32", "bf16", "fp16", "amp_bf16")
FORMATS = ("hf",)
EXPORTS = ("hf", "gguf", "peft")
DTYPES = ("fp32", "bf16", "fp16", "q8_0")


def _needs_checkpoint(checkpoint: str | None) -> Iterator[str]:
    if checkpoint is None:
        yield "checkpoint: is required; write checkpoint=runs/NAME, a run's folder"


def _one_model(parallel: ParallelConfig) -> Iterator[str]:
    """Check the layout of a command whose ranks all serve the same requests."""
    yield from parallel.check()
    count = parallel.nproc_per_node or 1
    if count > 1 and parallel.keeps_whole:
        yield (
            f"parallel.nproc_per_node: each of {count} processes would hold the full model; write"
            " parallel=fsdp as well, or another degree"
        )


def _is_here(output: str | None) -> Iterator[str]:
    if output is not None and "://" in output:
        yield f"output: {output} is an address; write a folder of this machine"


@dataclass
class EvalRecipe:
    """Evaluation of checkpoints, as their runs would do it, and of other models."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, a checkpoint's folder, or the URL of either."""
    models: Annotated[list[str], PATH] = field(default_factory=list)
    """Models to evaluate in addition. Each is a run's or a checkpoint's folder or URL; an adapter's
    folder in peft's format; a folder that transformers saved, or hf:OWNER/NAME on the hub; or
    ADDRESS#MODEL, an OpenAI-compatible server, such as http://localhost:8000/v1#my-model, or
    chat:ADDRESS#MODEL, for generation tasks."""
    output: Annotated[str | None, PATH] = None
    """Folder of results.json, rows.jsonl and gauntlet.html; unset: eval/<batch>/ in the run's
    folder, for other models runs/<name>/eval/."""
    precision: Annotated[str | None, choice(LOADED_PRECISIONS)] = None
    """Precision of the loaded weights: fp32, bf16, fp16, or amp_bf16, which keeps weights in fp32
    and computes matrix multiplications in bfloat16. Unset: bf16 on a GPU; on a CPU the run's
    precision, and fp32 for other models. Write fp32 for exact comparisons."""
    device_eval_batch_size: Annotated[int | str, ROWS, AUTO_ROWS] = "auto"
    """Sequences evaluated at a time."""
    eval: EvalConfig | None = None
    """What is evaluated (group eval/); unset: what the run evaluated, also for additional
    models."""
    logger: LoggerConfig | None = None
    """Where metrics are also logged (group logger/), and linked with a registered version; unset:
    the MLflow store of the run, or of models:/NAME; for other models none."""
    registry: RegistryPlace = field(default_factory=RegistryPlace)
    """MLflow store for models:/NAME@alias."""
    launch: LaunchConfig | None = None
    """Where the evaluation runs (group launch/), as a job of one machine; unset: here. The record
    of the job is in runs/eval-NAME."""
    cache_folder: Annotated[str, PATH] = "~/.cache/llmfoundry"
    """Folder of tokenized prompts, for models without a run."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Distribution of the model over processes (group parallel/). Unset: each process holds the
    full model. Settings of activations and gradients have no effect."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that the model or its data needs. The plugins of its recipe are not
    imported."""

    def all_models(self) -> list[str]:
        """Return `checkpoint` and `models` as one list."""
        return [*([self.checkpoint] if self.checkpoint is not None else []), *self.models]

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        yield from _is_here(self.output)
        if not self.models:
            yield from _needs_checkpoint(self.checkpoint)
        for model in {m for m in self.all_models() if self.all_models().count(m) > 1}:
            yield f"models: {model} is there more than once; name each once"
        if self.logger is not None:
            yield from self.logger.check()
        if self.eval is not None and self.eval.icl_max_fraction is not None:
            yield "eval.icl_max_fraction: is of a training run's time; write eval.icl_rows here"
        if self.eval is not None:
            yield from self.eval.check()
        yield from self.parallel.check()
        yield from self._check_launch()

    def _check_launch(self) -> Iterator[str]:
        launch = self.launch
        if launch is None:
            return
        problems = [*launch.check()] or [*launch.check_launch()]
        yield from problems
        if (launch.nodes or 1) > 1 or len(launch.hosts) > 1:
            yield "launch.nodes: an evaluation runs on one machine; write 1, or one host"
        if launch.target == "skypilot":
            yield "launch.target: skypilot is only printed, for training; write another target"
        place = self.output or next(iter(self.all_models()), "")
        if launch.in_containers(place):
            yield (
                f"output: {place} is lost with the container that writes it; write a folder on a"
                " volume: launch.mounts=[runs:/runs] output=/runs/scores"
            )

    def fill(self) -> None:
        """Do nothing: the defaults depend on the checkpoint."""


@dataclass
class ConvertRecipe:
    """Conversion of a checkpoint to another format, or of a Hugging Face model to a checkpoint."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """The input: a run's folder, a checkpoint's folder, or the URL of either; with from=hf a hub id
    or a Hugging Face folder."""
    to: Annotated[str | None, choice(EXPORTS)] = None
    """Format to write. hf: a folder that transformers loads, with an adapter merged into its base.
    gguf: the same as a file for llama.cpp and the tools that build on it. peft: only the adapter,
    for the hf folder of its base."""
    from_: Annotated[str | None, choice(FORMATS)] = None
    """Format to read, written `from`: hf. The output is then a run's folder, or with to=gguf a GGUF
    file."""
    output: Annotated[str | None, PATH] = None
    """The folder to write, which must not exist or must be empty. With to=gguf a file,
    NAME.gguf."""
    weights: Annotated[str | None, choice(WEIGHTS), Only("to")] = None
    """Which weights of a run to export. trained: those that the optimizer updated. ema: their
    exponential moving average (ema.decay). Unset: those that the run evaluates (eval.weights)."""
    dtype: Annotated[str | None, choice(DTYPES), Only("to", ("hf", "gguf"))] = None
    """dtype of the written weights: fp32, bf16, fp16, or for gguf q8_0 (8 bits, with a scale for
    every 32 numbers). Unset: bf16 if the base is quantized, else fp32."""
    max_shard_gb: Annotated[float | None, Range(0.001), Only("to", "hf")] = None
    """Maximum size of a weight file in units of 1e9 bytes; tensors are not split. Unset: 5."""
    architecture: Annotated[str | None, Only("to")] = None
    """The transformers class to write (LlamaForCausalLM …), or llmfoundry, our own class, which
    fits any model. Unset: the first transformers class that expresses the model exactly."""
    adapter_experts: Annotated[str | None, choice(("stacked", "separate")), Only("to", "peft")] = (
        None
    )
    """stacked, as peft's target_parameters, or separate, an adapter for each expert, because
    engines disagree on the stacked layout. Default stacked."""
    registry: ExportRegistry = field(default_factory=ExportRegistry)
    """MLflow store for models:/NAME@alias, and the registered name of the export."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that the model or its data needs. The plugins of its recipe are not
    imported."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        yield from _needs_checkpoint(self.checkpoint)
        yield from _is_here(self.output)
        if self.dtype == "q8_0" and self.to == "hf":
            yield "dtype: q8_0 is a format of GGUF; write to=gguf, or dtype=bf16"
        if (self.to is None) == (self.from_ is None) and self.to != "gguf":
            yield "to: write either to=hf, to=gguf or to=peft (export), or from=hf (import)"
        if self.from_ is not None and self.to is not None and self.weights is not None:
            yield "weights: has no effect with from=hf, whose models have one set; remove it"
        yield from self.registry.check()
        if self.to is None and self.registry.name is not None:
            yield "registry.name: is of an export; write to=hf, to=gguf or to=peft, or remove it"
        if self.output is None:
            yield "output: is required; write output=DIR, the folder to write"
        elif self.to == "gguf" and not self.output.endswith(".gguf"):
            yield f"output: {self.output} is one file with to=gguf; write output=NAME.gguf"

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.to == "peft":
            self.adapter_experts = self.adapter_experts or "stacked"


@dataclass
class AverageRecipe:
    """Average of the weights of several checkpoints, as a checkpoint."""

    FOLDERS_KEY: ClassVar[str] = "checkpoints"

    checkpoints: Annotated[list[str], PATH] = field(default_factory=list)
    """Checkpoints of one model: runs' folders (their newest checkpoints), checkpoints' folders, or
    URLs of either; or with `last` one run."""
    last: Annotated[int | None, Range(1, 10_000)] = None
    """Average this many of the run's newest checkpoints; unset: those that are named."""
    proportions: list[float] | None = None
    """Weight of each checkpoint in the average, oldest first with `last`; they need not add up to
    1. Unset: all the same, which is the mean."""
    weights: Annotated[str, choice(WEIGHTS)] = WEIGHTS[0]
    """Which weights of each checkpoint to average. trained: those that the optimizer updated. ema:
    their exponential moving average (ema.decay)."""
    output: Annotated[str | None, PATH] = None
    """The folder to write, a run's with one checkpoint; it must not exist or must be empty."""
    registry: RegistryPlace = field(default_factory=RegistryPlace)
    """MLflow store for models:/NAME@alias."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that the model needs. The plugins of its recipe are not imported."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        yield from _is_here(self.output)
        if self.output is None:
            yield "output: is required; write output=runs/NAME, the folder to write"
        names = self.checkpoints
        if self.last is None and len(names) < 2:
            yield "checkpoints: write two or more, or one run and last=5, its five newest"
        elif self.last is not None and len(names) != 1:
            yield f"last: is of one run, and checkpoints has {len(names)}; write one run's folder"
        for name in {name for name in names if names.count(name) > 1}:
            yield f"checkpoints: {name} is there more than once; write proportions to weight it"
        yield from self._check_proportions()

    def _check_proportions(self) -> Iterator[str]:
        if self.proportions is None:
            return
        count = self.last or len(self.checkpoints)
        if len(self.proportions) != count:
            yield f"proportions: {len(self.proportions)} of {count} checkpoints; write one of each"
        finite = all(math.isfinite(value) and value >= 0 for value in self.proportions)
        if not finite or not sum(self.proportions) > 0:
            yield f"proportions: {self.proportions}; write numbers of 0 or more, not all 0"

    def fill(self) -> None:
        """Do nothing: every default is a constant."""


@dataclass
class SamplingRecipe:
    """Settings of text generation, for continuing a text and for answering."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, a checkpoint's folder, or the URL of either; an adapter's folder in peft's
    format; a folder that transformers saved, or hf:OWNER/NAME on the hub."""
    weights: Annotated[str | None, choice(WEIGHTS)] = None
    """Which weights of a run to load. trained: those that the optimizer updated. ema: their
    exponential moving average (ema.decay). Unset: those that the run evaluates (eval.weights)."""
    max_new_tokens: Annotated[int, NEW_TOKENS] = 128
    """Maximum length of the generated text in tokens."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """Sampling temperature. 0: always the most likely token."""
    top_k: Annotated[int | None, Range(1), Only("temperature")] = None
    """Sample from the k most likely tokens only."""
    top_p: Annotated[float | None, TOP_P, Only("temperature")] = None
    """Nucleus sampling: sample from the most likely tokens that together reach this probability; 1:
    from all. Default 0.9."""
    seed: Annotated[int, Range(0)] = 17
    """Seed of the random number generator."""
    precision: Annotated[str | None, choice(LOADED_PRECISIONS)] = None
    """Precision of the loaded weights: fp32, bf16, fp16, or amp_bf16, which keeps weights in fp32
    and computes matrix multiplications in bfloat16. Unset: bf16 on a GPU; on a CPU the run's
    precision, and fp32 for other models. Write fp32 for exact comparisons."""
    kv_cache: bool = True
    """Cache keys and values of earlier tokens. false: recompute them for every token, which is
    slow."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Distribution of the model over processes (group parallel/), such as parallel=fsdp with
    parallel.nproc_per_node=2. Unset: one process holds the full model. Settings of activations and
    gradients have no effect."""
    registry: RegistryPlace = field(default_factory=RegistryPlace)
    """MLflow store for models:/NAME@alias."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that the model or its data needs. The plugins of its recipe are not
    imported."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        yield from _needs_checkpoint(self.checkpoint)
        yield from _one_model(self.parallel)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.temperature > 0:
            set_defaults(self, top_p=DEFAULT_TOP_P)


@dataclass
class GenerateRecipe(SamplingRecipe):
    """Continuation of a prompt with a model, or the answer to a message."""

    prompt: Annotated[str, Unless("message")] = ""
    """Text to continue."""
    message: str | None = None
    """A user message, in place of a prompt. The model answers it with its chat template."""
    system: Annotated[str | None, Only("message")] = None
    """System message before the user message."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE, Only("message")] = None
    """chatml, llama3, zephyr, mpt or a Jinja file; unset: the tokenizer's template."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from super().check()
        if self.message is not None and not self.message.strip():
            yield "message: is empty; write the user's message"


@dataclass
class ChatRecipe(SamplingRecipe):
    """Conversation with a model on a terminal, or by lines of standard input."""

    max_new_tokens: Annotated[int, NEW_TOKENS] = 512
    """Maximum length of an answer in tokens."""
    system: str | None = None
    """The system message; the command /system changes it."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """chatml, llama3, zephyr, mpt or a Jinja file; unset: the tokenizer's template."""


_PORTS = Range(0, 65535, "there are no more ports")
_WAITING = Range(0, 2**20, "each holds its prompt in memory")
_SLOTS = Range(1, 2**14, "keys and values of each are kept in memory")
_SHORTEST_KEY = 16  # characters
_SECONDS = Range(above=0, most=86_400, why="it is a day")


@dataclass
class ServeRecipe:
    """HTTP server with OpenAI's API."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, a checkpoint's folder, or the URL of either; an adapter's folder in peft's
    format; a folder that transformers saved, or hf:OWNER/NAME on the hub."""
    weights: Annotated[str | None, choice(WEIGHTS)] = None
    """Which weights of a run to load. trained: those that the optimizer updated. ema: their
    exponential moving average (ema.decay). Unset: those that the run evaluates (eval.weights)."""
    host: str = "127.0.0.1"
    """Address to listen on. The default accepts requests of this machine only. 0.0.0.0, or any
    other address that is reachable from outside, requires api_key_env."""
    port: Annotated[int, _PORTS] = 8000
    """Port to listen on; 0: any free port, which is printed."""
    api_key_env: str | None = None
    """Name of the environment variable with the key that clients must send (Authorization: Bearer
    KEY), at least 16 characters; unset: no key is required."""
    model_name: str | None = None
    """Name of the model in the API; unset: the checkpoint as written."""
    slots: Annotated[int, _SLOTS] = 16
    """Number of answers generated at the same time. The KV cache holds slots x max_seq_len
    tokens."""
    max_seq_len: Annotated[int | None, TOKENS] = None
    """Maximum length of prompt and answer together, in tokens; unset: the model's."""
    max_new_tokens: Annotated[int | None, NEW_TOKENS] = None
    """Maximum length of an answer in tokens; unset: limited only by max_seq_len."""
    max_answers: Annotated[int, Range(1, 2**14, "each waits in the queue")] = 128
    """Maximum number of answers to one request: its prompts times n."""
    max_waiting: Annotated[int, _WAITING] = 256
    """Maximum number of answers that wait for a slot, over all clients; further requests are
    rejected (429)."""
    max_body_mib: Annotated[float, Range(above=0, most=1024, why="it is held in memory")] = 4.0
    """Maximum size of a request body in MiB; larger requests are rejected (413)."""
    timeout: Annotated[float, _SECONDS] = 600.0
    """Timeout of a request in seconds, including the time that it waits (504)."""
    drain_timeout: Annotated[float, _SECONDS] = 30.0
    """Seconds for requests in progress to finish after SIGTERM or Ctrl-C."""
    precision: Annotated[str | None, choice(LOADED_PRECISIONS)] = None
    """Precision of the loaded weights: fp32, bf16, fp16, or amp_bf16, which keeps weights in fp32
    and computes matrix multiplications in bfloat16. Unset: bf16 on a GPU; on a CPU the run's
    precision, and fp32 for other models. Write fp32 for exact comparisons."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """chatml, llama3, zephyr, mpt or a Jinja file; unset: the tokenizer's template."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Distribution of the model over processes (group parallel/), such as parallel=fsdp with
    parallel.nproc_per_node=2. Unset: one process holds the full model. Settings of activations and
    gradients have no effect."""
    access_log: bool = False
    """Log client, path and status of each request on stderr."""
    registry: RegistryPlace = field(default_factory=RegistryPlace)
    """MLflow store for models:/NAME@alias."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that the model or its data needs. The plugins of its recipe are not
    imported."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        if self.checkpoint is None:
            yield "checkpoint: is required; write checkpoint=runs/NAME, a run's folder"
        yield from _one_model(self.parallel)
        if not self.host or self.host != self.host.strip():
            yield "host: is no address; write 127.0.0.1 or 0.0.0.0"
        if self.model_name is not None and not self.model_name.strip():
            yield "model_name: is empty; write a name"
        if self.api_key_env is None and not self.is_local:
            yield (
                f"host: {self.host} can be reached from other machines; write"
                " api_key_env=VARIABLE, the environment variable with the key that clients must"
                " send, or host=127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    def read_key(self) -> str | None:
        """Return the key that clients must send; None if none is required.

        Raises:
            UserError: the variable is not set, or holds no key.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UserError(
                f"api_key_env: the variable {self.api_key_env} is not set; write"
                f" export {self.api_key_env}=$(openssl rand -hex 32)"
            )
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(
                f"api_key_env: what the variable {self.api_key_env} holds is no key of"
                f" {_SHORTEST_KEY} or more printable ASCII characters without spaces; openssl rand"
                " -hex 32 makes one"
            )
        return key

    def fill(self) -> None:
        """Do nothing: the defaults depend on the checkpoint."""


@dataclass
class TrackRecipe:
    """Backfill of MLflow and other stores from the metrics.jsonl of a run."""

    FOLDER_KEY: ClassVar[str] = "run"

    run: Annotated[str | None, PATH] = None
    """The run's folder or URL. The run must have ended, because a running one sends its values
    itself."""
    logger: LoggerConfig | None = None
    """The destination (group logger/); unset: the logger section of the run's recipe."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that the model or its data needs. The plugins of its recipe are not
    imported."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        if self.run is None:
            yield "run: is required; write run=runs/NAME, a run's folder"
        if self.logger is not None:
            yield from self.logger.check()

    def fill(self) -> None:
        """Do nothing: the defaults depend on the run's recipe."""


@dataclass
class CompareRecipe:
    """Comparison of runs on one page, with their last numbers."""

    FOLDERS_KEY: ClassVar[str] = "runs"

    runs: list[str] = field(default_factory=list)
    """Folders of runs, or folders that contain runs. The runs may be in progress."""
    output: Annotated[str | None, PATH] = None
    """The page; unset: index.html in the folder that contains the runs, else compare.html in the
    working folder."""
    follow: bool = False
    """Update the page every 15 seconds until no run is in progress; a browser reloads it."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        if not self.runs:
            yield "runs: is empty; write folders of runs, such as runs/a runs/b, or runs for all"
        if any(not name.strip() for name in self.runs):
            yield "runs: a name is empty; write folders of runs, such as runs/a runs/b"

    def fill(self) -> None:
        """Do nothing: every default is a constant."""


VERBS = ("list", "describe", "logs", "follow", "stop", "serve")


@dataclass
class RunsRecipe:
    """Status of runs, wherever they were launched, and actions on them."""

    FOLDERS_KEY: ClassVar[str] = "words"
    _OF: ClassVar[dict[str, tuple[str, ...]]] = {
        "format": ("list", "describe"),
        "now": ("stop",),
        "timeout": ("stop",),
        "port": ("serve",),
        "host": ("serve",),
    }

    words: list[str] = field(default_factory=list)
    """A verb, and runs: names below `folder`, or folders. list and serve take no runs."""
    folder: Annotated[str, PATH] = "runs"
    """The folder that contains the runs."""
    format: Annotated[str, choice(("text", "json"))] = "text"
    """Output format of list and describe."""
    now: bool = False
    """With stop: end at once, without saving. false: save and end."""
    timeout: Annotated[float, Range(0, 1e6)] = 600.0
    """With stop: seconds to wait for the end of the run."""
    port: Annotated[int, Range(1, 65_535)] = 9465
    """With serve: port of the Prometheus metrics; the port of a run is 9464."""
    host: str = "127.0.0.1"
    """With serve: address to listen on; 0.0.0.0: all addresses of this machine."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        verb, names = (self.words or [""])[0], self.words[1:]
        if verb not in VERBS:
            what = f"{verb!r} is no verb" if verb else "no verb"
            yield f"words: {what}{nearest(verb, VERBS)}; write one of {', '.join(VERBS)}"
        elif verb in ("list", "serve") and names:
            yield f"words: {verb} is of all runs; write folder=FOLDER for those of another"
        elif verb not in ("list", "serve") and not names:
            yield f"words: {verb} of which run? write its name; runs list names them"
        elif verb in ("logs", "follow", "describe") and len(names) > 1:
            yield f"words: {verb} is of one run; write one name"
        else:
            for key, verbs in self._OF.items():
                if verb not in verbs:
                    why = f"with {verb}: it is of {' and '.join(verbs)}"
                    yield from inert_change("", self, [key], why)

    def fill(self) -> None:
        """Do nothing: every default is a constant."""

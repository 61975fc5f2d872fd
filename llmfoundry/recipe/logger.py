"""The `logger`, `callbacks` and `profile` sections.

Where metrics are logged, which observers run, and traces of steps and memory snapshots in
save_folder/profile. `LOGGERS` and `CALLBACKS` are the tables that plugins extend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from llmfoundry.recipe.checks import check_duration, inert, set_defaults
from llmfoundry.recipe.choice_table import (
    SHIPPED,
    ChoiceRecord,
    ChoiceTable,
    check_plugins,
    settings_of,
)
from llmfoundry.recipe.resilience import ResolvedWatchConfig, WatchConfig
from llmfoundry.recipe.schema import (
    NEW_TOKENS,
    TEMPERATURE,
    TOP_P,
    Only,
    Range,
    check_fields,
    choice,
)
from llmfoundry.redaction import public

WANDB_MODES = ("online", "offline")
STOP_MODES = ("min", "max")
DEFAULT_TOP_P = 0.9  # the rest is thousands of unlikely tokens, which spoil samples of small models
Plugins = dict[str, dict[str, Any] | None]


@dataclass(frozen=True)
class LoggerType(ChoiceRecord):
    """A destination of metrics, a LogTarget.

    Its constructor is called as `make(config, run_folder)`, for a plugin with its settings. A
    logger of the project has a field of its name in the section, and `keys` next to it; a plugin's
    logger is under `plugins`.
    """


LOGGERS = ChoiceTable(
    "logger.plugins",
    LoggerType,
    {
        "mlflow": LoggerType(
            SHIPPED,
            keys={"tracking_uri": "sqlite:///runs/mlflow.db", "experiment_name": "llmfoundry"},
        ),
        "tensorboard": LoggerType(SHIPPED),
        "wandb": LoggerType(
            SHIPPED,
            keys={"wandb_mode": "online", "wandb_project": "llmfoundry", "wandb_entity": None},
        ),
        "trackio": LoggerType(
            SHIPPED,
            keys={"trackio_project": "llmfoundry"},
        ),
        "prometheus": LoggerType(
            SHIPPED,
            keys={
                "prometheus_port": 9464,  # of OpenTelemetry's exporter
                "prometheus_host": "127.0.0.1",
                "prometheus_textfile": None,
            },
        ),
    },
)
_SHIPPED_LOGGERS = set(LOGGERS)


@dataclass
class LoggerConfig:
    """Loggers in addition to the console, metrics.jsonl and report.html, which are always on."""

    mlflow: bool = True
    """Log parameters, metrics, tags and the recipe to MLflow."""
    tracking_uri: Annotated[str | None, Only("mlflow")] = None
    """Address of the MLflow server or store; default sqlite:///runs/mlflow.db."""
    experiment_name: Annotated[str | None, Only("mlflow")] = None
    """MLflow experiment; default llmfoundry."""
    tensorboard: bool = False
    """Write TensorBoard event files to save_folder/tensorboard (extra tensorboard)."""
    wandb: bool = False
    """Log to Weights & Biases (extra wandb)."""
    wandb_mode: Annotated[str | None, choice(WANDB_MODES), Only("wandb")] = None
    """online (the default; needs a login), or offline: in save_folder/wandb, for `wandb sync`."""
    wandb_project: Annotated[str | None, Only("wandb")] = None
    """Weights & Biases project; default llmfoundry."""
    wandb_entity: Annotated[str | None, Only("wandb")] = None
    """Weights & Biases team or user; unset: the default of the login."""
    trackio: bool = False
    """Log to trackio's database on this machine, in TRACKIO_DIR (extra trackio)."""
    trackio_project: Annotated[str | None, Only("trackio")] = None
    """trackio project; default llmfoundry."""
    prometheus: bool = False
    """Serve the latest metrics and the number of events for Prometheus to scrape."""
    prometheus_port: Annotated[int | None, Range(1, 65_535), Only("prometheus")] = None
    """Port of the main process, which serves /metrics; default 9464. Each run on a machine needs a
    different port."""
    prometheus_host: Annotated[str | None, Only("prometheus")] = None
    """Address to listen on. Default 127.0.0.1: only this machine can connect. 0.0.0.0: every
    machine that reaches this one can read run names and metrics, without a password."""
    prometheus_textfile: Annotated[str | None, Only("prometheus")] = None
    """A file NAME.prom in the folder of node-exporter's textfile collector, which is written during
    the run. No port is opened then unless prometheus_port is set."""
    in_memory: bool = False
    """Keep every metric in memory, for a Python program that calls the trainer."""
    plugins: Plugins = field(default_factory=dict)
    """Loggers that plugins add, each with its settings: {my_logger: {path: x}}."""

    def check(self, key: str = "logger.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self._has_no_port:
            yield from inert(key, self, ["prometheus_host"], f"without {key}prometheus_port")
        if not (self.prometheus_textfile or ".prom").endswith(".prom"):
            yield (
                f"{key}prometheus_textfile: '{public(str(self.prometheus_textfile))}' does not end"
                " in .prom, and node-exporter reads no other; write NAME.prom"
            )
        yield from check_plugins(key, self.plugins, LOGGERS, _SHIPPED_LOGGERS)

    @property
    def _has_no_port(self) -> bool:
        """Whether Prometheus only gets a text file."""
        return self.prometheus_textfile is not None and self.prometheus_port is None

    def fill(self) -> None:
        """Resolve defaults in place."""
        has_no_port = self._has_no_port
        for name in _SHIPPED_LOGGERS & {*self.chosen()}:
            for key, default in LOGGERS[name].keys.items():
                setattr(self, key, getattr(self, key) or default)
        if has_no_port:
            self.prometheus_port = self.prometheus_host = None
        self.plugins = {**settings_of(self.plugins, LOGGERS)}

    def chosen(self) -> list[str]:
        """Return the names of the loggers that are on."""
        return [name for name in LOGGERS if getattr(self, name, False)] + [*self.plugins]


class ResolvedLoggerConfig(LoggerConfig):
    """`LoggerConfig` with defaults resolved."""

    tracking_uri: str
    experiment_name: str
    wandb_mode: str
    wandb_project: str
    trackio_project: str


@dataclass
class GenerateConfig:
    """Text samples during training, on the console and in the report."""

    OFF: ClassVar[dict[str, Any]] = {}
    """The values for `generate: false` or null: no prompts."""

    prompts: list[str] = field(default_factory=list)
    """Prompts to continue; none: no samples."""
    from_validation: Annotated[int, Range(0, 1000, "each is written at every interval")] = 0
    """In fine-tuning runs: number of validation examples, from the first, whose prompts are
    answered and printed with the right answer."""
    interval: str = "0.25dur"
    """How often samples are generated."""
    max_new_tokens: Annotated[int, NEW_TOKENS] = 64
    """Maximum length of a sample in tokens."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """Sampling temperature. 0: always the most likely token."""
    top_p: Annotated[float | None, TOP_P, Only("temperature")] = None
    """Nucleus sampling: sample from the most likely tokens that together reach this probability; 1:
    from all. Default 0.9."""

    @property
    def is_on(self) -> bool:
        """Whether there is a prompt to continue or to answer."""
        return bool(self.prompts or self.from_validation)

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        yield from check_duration(f"{key}interval", self.interval)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.temperature > 0:
            set_defaults(self, top_p=DEFAULT_TOP_P)


class ResolvedGenerateConfig(GenerateConfig):
    """`GenerateConfig` with defaults resolved."""

    top_p: float


@dataclass
class EarlyStopperConfig:
    """Early stopping on a metric; the last state is saved as at any end of a run."""

    OFF: ClassVar[dict[str, Any]] = {}
    """The values for `early_stopper: false` or null: no metric."""

    metric: str | None = None
    """Name of a metric in metrics.jsonl, such as metrics/eval/LanguageCrossEntropy; unset: never
    stop."""
    mode: Annotated[str | None, choice(STOP_MODES), Only("metric")] = None
    """min: smaller is better; max: larger is better. Default min for losses, perplexity and bits
    per byte, max for all other metrics."""
    patience: Annotated[int | None, Range(1), Only("metric")] = None
    """Measurements without improvement after which the run ends; default 3."""
    min_delta: Annotated[float | None, Range(0), Only("metric")] = None
    """Smallest change that counts as improvement, in the unit of the metric; default 0."""

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.metric is not None:
            set_defaults(self, mode=better_way(self.metric), patience=3, min_delta=0.0)


class ResolvedEarlyStopperConfig(EarlyStopperConfig):
    """`EarlyStopperConfig` with defaults resolved."""

    mode: str
    patience: int
    min_delta: float


def better_way(metric: str) -> str:
    """Return min or max: whether smaller or larger values of a metric are better, by its name."""
    small = ("loss", "CrossEntropy", "Perplexity", "bits_per_byte")
    return "min" if any(word in metric for word in small) else "max"


@dataclass(frozen=True)
class CallbackType(ChoiceRecord):
    """An observer of the loop, a train.Callback: `make(job)`, for a plugin with its settings."""

    is_on: Callable[[CallbacksConfig], bool] | None = field(default=None, kw_only=True)
    """Whether the section enables the callback. Unset for a plugin's callback, which is on if
    `plugins` names it."""


def _callback(is_on: Callable[[CallbacksConfig], bool]) -> CallbackType:
    return CallbackType(SHIPPED, is_on=is_on)


CALLBACKS = ChoiceTable(
    "callbacks.plugins",
    CallbackType,
    {  # in calling order; the early stopper comes after all callbacks that measure something
        "watch": _callback(lambda config: config.watch.has_rounds),
        "speed_monitor": _callback(lambda config: config.speed_monitor),
        "step_times": _callback(lambda config: config.step_times),
        "lr_monitor": _callback(lambda config: config.lr_monitor),
        "optimizer_monitor": _callback(lambda c: c.optimizer_monitor),
        "memory_monitor": _callback(lambda config: config.memory_monitor),
        "runtime_estimator": _callback(lambda c: c.runtime_estimator),
        "generate": _callback(lambda config: config.generate.is_on),
        "early_stopper": _callback(lambda config: config.early_stopper.metric is not None),
        "gc_interval": _callback(lambda config: config.gc_interval > 0),
    },
)
_SHIPPED_CALLBACKS = set(CALLBACKS)


@dataclass
class CallbacksConfig:
    """Observers of the training loop; false or an empty list switches one off."""

    speed_monitor: bool = True
    """Log throughput, and model FLOPs utilization (MFU) if the peak of the device is known."""
    speed_window: Annotated[int, Range(1, 2**20, "each is kept in memory")] = 10
    """Number of logged steps over which throughput is averaged."""
    step_times: bool = True
    """Log how long the parts of a step take: data, forward, backward, communication, optimizer,
    logging. They are metrics time/step/* and a bar in the report. On a GPU this adds no
    synchronization."""
    memory_monitor: bool = True
    """Log the peak memory of the device (GPU) or the process (CPU)."""
    runtime_estimator: bool = True
    """Log the estimated remaining time."""
    lr_monitor: bool = True
    """Log the learning rate of every parameter group."""
    optimizer_monitor: bool = False
    """Log the norms of each parameter, its gradient and its optimizer state, and of all
    together."""
    gc_interval: Annotated[int, Range(0)] = 1000
    """Batches between garbage collections, at the same batch in all processes. Python's automatic
    garbage collection, which would delay the other processes at random, is disabled. 0: leave it
    enabled."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """Detection of loss spikes, slow processes and drops of speed."""
    early_stopper: EarlyStopperConfig = field(default_factory=EarlyStopperConfig)
    """End of a run that no longer improves."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Text samples during training."""
    plugins: Plugins = field(default_factory=dict)
    """Callbacks that plugins add, each with its settings: {my_callback: {every: 10}}."""

    def check(self, key: str = "callbacks.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)
        yield from self.watch.check(f"{key}watch.")
        yield from self.early_stopper.check(f"{key}early_stopper.")
        yield from self.generate.check(f"{key}generate.")
        yield from check_plugins(key, self.plugins, CALLBACKS, _SHIPPED_CALLBACKS)

    def fill(self) -> None:
        """Resolve defaults in place."""
        self.watch.fill()
        self.early_stopper.fill()
        self.generate.fill()
        self.plugins = {**settings_of(self.plugins, CALLBACKS)}

    def chosen(self) -> list[str]:
        """Return the names of the callbacks that are on, in calling order."""
        shipped = [name for name, kind in CALLBACKS.items() if kind.is_on and kind.is_on(self)]
        return [*shipped, *self.plugins]


class ResolvedCallbacksConfig(CallbacksConfig):
    """`CallbacksConfig` with defaults resolved."""

    watch: ResolvedWatchConfig
    early_stopper: ResolvedEarlyStopperConfig
    generate: ResolvedGenerateConfig


ALL_RANKS = "all"
_WINDOW = "each is held in memory until the trace is written"
_STEPS = Range(0, 2**31, "no run has as many steps")
_SCHEDULE: dict[str, Any] = {"skip_first": 10, "wait": 0, "warmup": 1, "active": 3, "repeat": 1}
_CONTENT: dict[str, Any] = dict.fromkeys(
    ("record_shapes", "profile_memory", "with_stack", "with_flops"), False
)
_MEMORY: dict[str, Any] = {"memory_snapshot_entries": 100_000}
_FILES: dict[str, Any] = {"max_gib": 4.0}


@dataclass
class ProfileConfig:
    """Profiling of steps and memory with PyTorch's tools; off by default.

    Steps of the schedule are counted from the first step of each process, which compiles and
    connects.
    """

    trace: bool = False
    """Trace steps with torch.profiler: trace-step-N-rank-R.json.gz for chrome://tracing, Perfetto
    and TensorBoard. The ten slowest operations are logged and saved next to it."""
    skip_first: Annotated[int | None, _STEPS, Only("trace")] = None
    """Steps before the first cycle; default 10."""
    wait: Annotated[int | None, _STEPS, Only("trace")] = None
    """Steps at the beginning of each cycle without tracing; default 0."""
    warmup: Annotated[int | None, Range(0, 100, _WINDOW), Only("trace")] = None
    """Steps that are traced and discarded, because the first steps of a tracer are slower; default
    1."""
    active: Annotated[int | None, Range(1, 100, _WINDOW), Only("trace")] = None
    """Steps of each cycle that are traced; default 3."""
    repeat: Annotated[int | None, Range(1, 1000, "each cycle is a file"), Only("trace")] = None
    """Number of cycles, each with a trace file; default 1."""
    ranks: Annotated[
        list[int] | str | None,
        choice((ALL_RANKS,), "a list of ranks"),
        Only(("trace", "memory_snapshot")),
    ] = None
    """Ranks that write traces and memory snapshots: a list such as [0, 8], or all; default [0]."""
    record_shapes: Annotated[bool | None, Only("trace")] = None
    """Record the input shapes of each operation; default false."""
    profile_memory: Annotated[bool | None, Only("trace")] = None
    """Record each allocation; default false."""
    with_stack: Annotated[bool | None, Only("trace")] = None
    """Record the Python source line of each operation, which is slow; default false."""
    with_flops: Annotated[bool | None, Only("trace")] = None
    """Record the FLOPs of matrix multiplications and convolutions; default false."""
    memory_snapshot: bool = False
    """Record the history of allocations, and write it as memory-*.pickle for pytorch.org/memory_viz
    when a process receives SIGUSR2 (kill -USR2) and when a GPU runs out of memory. On a CPU the
    snapshot covers the one step after the signal, as torch.profiler records it."""
    memory_snapshot_step: Annotated[int | None, Range(1, 2**31), Only("memory_snapshot")] = None
    """Step of this process after which a snapshot is written without a signal. On a CPU, a
    snapshot of a step that is traced, or right before a trace, is of the first step after it."""
    memory_snapshot_entries: Annotated[
        int | None, Range(1, 2**24, "each takes some kB"), Only("memory_snapshot")
    ] = None
    """Length of the history: most recent allocations and frees of a GPU; default 100,000."""
    max_gib: Annotated[
        float | None, Range(above=0, most=1e6), Only(("trace", "memory_snapshot"))
    ] = None
    """Limit of save_folder/profile on a machine, in GiB; files beyond it are not written, which is
    reported. Default 4."""

    def check(self, key: str = "profile.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if isinstance(self.ranks, list):
            if not self.ranks:
                yield f"{key}ranks: names no process; write [0], or all"
            if any(rank < 0 for rank in self.ranks):
                yield f"{key}ranks: {self.ranks} has a negative number; ranks begin at 0"

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.trace:
            set_defaults(self, **_SCHEDULE, **_CONTENT)
        if self.memory_snapshot:
            set_defaults(self, **_MEMORY)
        if self.is_on:
            set_defaults(self, ranks=[0], **_FILES)

    @property
    def is_on(self) -> bool:
        """Whether any profile is written."""
        return self.trace or self.memory_snapshot

    def has_rank(self, rank: int) -> bool:
        """Whether a rank is profiled; the defaults must be resolved."""
        return self.ranks == ALL_RANKS or (isinstance(self.ranks, list) and rank in self.ranks)


class ResolvedProfileConfig(ProfileConfig):
    """`ProfileConfig` with defaults resolved."""

    skip_first: int
    wait: int
    warmup: int
    active: int
    repeat: int
    ranks: list[int] | str
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    memory_snapshot_entries: int
    max_gib: float

"""The `health_check`, `hang`, `supervise` sections and `callbacks.watch`.

`health_check` tests GPUs, machines and links before a run. `hang` defines when a process counts as
hung. `callbacks.watch` detects anomalies during a run. `supervise` restarts a run that ends before
it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from llmfoundry.recipe.checks import nearest, set_defaults
from llmfoundry.recipe.data import n_bytes
from llmfoundry.recipe.schema import PATH, Only, Range, check_fields, choice
from llmfoundry.redaction import public

BEFORE_RUN = ("none", "quick", "full")
CHECKED_UNITS = ("auto", "processes", "nodes")
_SIZE = re.compile(
    r"[0-9]{0,9}\.?[0-9]{1,9} ?[kmgt]?b", re.IGNORECASE
)  # the form that n_bytes parses
_LARGEST = 64 * 10**9  # bytes of a payload; no device has more free memory


@dataclass
class HealthCheckConfig:
    """The checks of scripts/check.py, and whether a run performs them before it begins.

    Quick: GPU counters (NVML), the kernel log, every path of the recipe, clocks, limits, shared
    memory, versions. Full: in addition matrix multiplications, memory bandwidth, and all-reduces
    between all pairs.
    """

    before_run: Annotated[str, choice(BEFORE_RUN)] = "none"
    """none, quick (seconds) or full (burn_seconds, and the pairs). If the check finds a fault, the
    run does not begin and ends with status 3."""
    kernel_log: Annotated[str | None, PATH] = None
    """A file with the kernel's messages; unset: the first of /dev/kmsg, dmesg and journalctl that
    this user may read."""
    kernel_log_hours: Annotated[float, Range(above=0, most=1e6)] = 24.0
    """Age in hours up to which kernel messages count. Older messages may describe repaired
    faults."""
    min_free_disk: str = "10gb"
    """Free disk space that the run's folder requires."""
    max_clock_skew: Annotated[float, Range(above=0, most=1e6)] = 1.0
    """Largest difference in seconds between the clock of a machine and the clocks of the other
    machines."""
    burn_seconds: Annotated[float, Range(above=0, most=86_400, why="a day")] = 10.0
    """Seconds of matrix multiplications on all devices at the same time. 10 s find slow and faulty
    devices; overheating shows after 60 to 300 s."""
    pairs_of: Annotated[str, choice(CHECKED_UNITS)] = "auto"
    """Unit of the pairwise all-reduces: processes, or nodes with all their processes. auto: nodes
    if there are several, else processes."""
    pair_rounds: Annotated[int | None, Range(1, 2**20)] = None
    """Number of rounds of pairwise all-reduces; unset: all rounds, in which each unit meets every
    other unit (one fewer than there are units)."""
    payloads: list[str] = field(default_factory=list)
    """Sizes of the all-reduces; unset: [64kb, 64mb, 1gb] on GPUs, [4kb, 256kb, 4mb] on CPUs."""
    min_bus_bandwidth: Annotated[float | None, Range(above=0, most=1e6)] = None
    """Smallest bus bandwidth between nodes with the largest payload, in GB/s; unset: pairs are only
    compared with each other."""
    timeout: Annotated[float, Range(above=0, most=86_400, why="a day")] = 60.0
    """Timeout in seconds of a process, a path or a pair."""

    def check(self, key: str = "health_check.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)
        sizes = {"min_free_disk": self.min_free_disk}
        sizes |= {f"payloads[{n}]": size for n, size in enumerate(self.payloads)}
        for name, size in sizes.items():
            if _SIZE.fullmatch(size.strip()) is None:
                yield f"{key}{name}: {size!r} is not a size; write a number and kb, mb, gb or tb"
            elif name != "min_free_disk" and not 4 <= n_bytes(size) <= _LARGEST:
                yield f"{key}{name}: {size} cannot be sent at once; write 4b to 64gb"

    def fill(self) -> None:
        """Do nothing: the defaults depend on the devices."""


HANG_MONITORS = ("auto", "on", "off")
HANG_ACTIONS = ("end", "report")
HANG_SECONDS = Range(1, 31_536_000, "a year")


@dataclass
class HangConfig:
    """A monitor process on each machine that detects hung ranks.

    It reports the phase, saves stacks in the run's folder (hangs/), and kills the processes.
    Without it a hang ends the run after parallel.dist_timeout seconds.
    """

    monitor: Annotated[str, choice(HANG_MONITORS)] = "auto"
    """on, off, or auto: on if a run has several processes, or a supervisor."""
    action: Annotated[str | None, choice(HANG_ACTIONS), Only("monitor")] = None
    """end: kill the processes after their stacks are saved, so that torchrun or the supervisor
    restarts them (the default). report: only report."""
    step_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """Timeout of the forward and backward pass, and of the update; unset: five times the longest of
    the last hundred steps, at least 30 s (300 s with compile)."""
    first_step_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """Timeout of the first three steps, which compile and connect; default 1800."""
    stopped_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """How long a process may be stopped (SIGSTOP, a debugger) or a zombie, in any phase; default
    30."""
    data_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """Timeout of loading a batch; default 900, because a failing store is retried."""
    save_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """How long a save may block training; default 1800."""
    evaluation_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """Timeout of an evaluation; default 14400. Tokenizing, loading and the end of a run are limited
    only by stopped_seconds; processes join within parallel.rendezvous_timeout."""
    callback_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """Timeout of one call of a callback (text samples are one), also of a plugin's, in any phase of
    a step; default 1800. The report names the callback."""
    notice_seconds: Annotated[float | None, HANG_SECONDS, Only("monitor")] = None
    """Delay after which the log reports that processes wait for another one; default 60."""

    def check(self, key: str = "hang.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.monitor == "off":
            return
        self.action = self.action or "end"
        for name, default in _HANG_SECONDS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)


class ResolvedHangConfig(HangConfig):
    """`HangConfig` with defaults resolved."""

    action: str
    first_step_seconds: float
    stopped_seconds: float
    data_seconds: float
    save_seconds: float
    evaluation_seconds: float
    callback_seconds: float
    notice_seconds: float


_HANG_SECONDS: dict[str, float | None] = {
    "step_seconds": None,
    "first_step_seconds": 1800.0,
    "stopped_seconds": 30.0,
    "data_seconds": 900.0,
    "save_seconds": 1800.0,
    "evaluation_seconds": 14_400.0,
    "callback_seconds": 1800.0,
    "notice_seconds": 60.0,
}


SPIKE_ACTIONS = ("off", "log", "skip", "roll_back", "stop")
NOT_FINITE_ACTIONS = ("skip", "roll_back", "stop")
MACHINE_ACTIONS = ("off", "log", "stop")
LOG_ACTIONS = ("off", "log")
_SPIKES = ("loss_spike", "gradient_spike")
_ACTED_UPON = (*_SPIKES, "not_finite")
_ROUNDS = ("slow_rank", "mfu_drop", "data_wait", "gpu")  # events that must repeat in later rounds
_MOST = Range(0, 2**31, "no run has as many steps")


@dataclass
class WatchConfig:
    """Anomalies that a run detects, and the actions that it takes.

    By default it only logs: each event is a line on the console and in save_folder/events.jsonl.
    """

    OFF: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("loss_spike", "gradient_spike", "slow_rank", "mfu_drop", "data_wait", "stall", "gpu"),
        "off",
    )
    """The values for `watch: false` or null; a loss that is not finite always has an action."""

    loss_spike: Annotated[str, choice(SPIKE_ACTIONS)] = "log"
    """Action on a loss spike, a step whose loss is spike_deviations above the mean of the previous
    steps. log: report it. skip: skip the update. roll_back: go back to a checkpoint, and skip the
    batches since then. stop: end the run with exit status 93."""
    gradient_spike: Annotated[str, choice(SPIKE_ACTIONS)] = "log"
    """The same action on a spike of the gradient norm, measured on its logarithm. The norm must
    also be at least five times the mean, because smaller spikes are normal with small batches and
    are handled by clipping."""
    not_finite: Annotated[str, choice(NOT_FINITE_ACTIONS)] = "stop"
    """Action on a step whose loss or gradient is not finite. Its update is never applied."""
    spike_window: Annotated[int, Range(8, 2**16, "each is kept on the device"), Only(_SPIKES)] = 128
    """Number of steps for the mean and the deviation; no spike is detected before half of them are
    done. OLMo-core uses the same default."""
    spike_deviations: Annotated[float, Range(1, 1000), Only(_SPIKES)] = 6.0
    """Standard deviations above the mean that make a spike. OLMo-core uses the same default."""
    spikes_in_a_row: Annotated[int, Range(1, 2**31), Only(_ACTED_UPON, ("log", "skip"))] = 20
    """With log: after this many spikes in a row, the new level of the loss counts as normal. With
    skip: the run then ends, because it no longer learns."""
    roll_back_steps: Annotated[int | None, _MOST, Only(_ACTED_UPON, "roll_back")] = None
    """Smallest number of steps to go back, to the newest checkpoint that is at least as old;
    default 100 (PaLM). If there is none, the run goes back to the step before the spike, which is
    in memory."""
    roll_back_skip: Annotated[int | None, _MOST, Only(_ACTED_UPON, "roll_back")] = None
    """Batches to skip after the spike, in addition to those from the checkpoint to the spike;
    default 100. PaLM skipped 200 to 500 in all."""
    roll_back_most: Annotated[int | None, Range(1, 2**31), Only(_ACTED_UPON, "roll_back")] = None
    """How many times in a row the run may go back without passing the furthest spike; then it ends.
    Default 3."""
    slow_rank: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """Action on a process that computes, or waits for data, longer than the other processes. log:
    report the process and its machine. stop: save, and end the run with exit status 75."""
    slow_rank_above: Annotated[float, Range(above=1, most=1e6), Only("slow_rank")] = 1.2
    """Factor above the median of all processes. The process must also be an outlier (z-score above
    3.5) among at least four processes."""
    mfu_drop: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """Action on a model FLOPs utilization (MFU) below that of earlier intervals of the run on the
    same devices. Step time is compared, so the peak of the device need not be known. Evaluation,
    saving, compilation and waiting for data do not count."""
    mfu_drop_below: Annotated[float, Range(above=0, below=1), Only("mfu_drop")] = 0.85
    """Factor of the median of the earlier intervals."""
    data_wait: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """Action on steps that wait longer for their batch than in earlier intervals."""
    data_wait_above: Annotated[float, Range(above=0, below=1), Only("data_wait")] = 0.1
    """Share of a step. It must also be twice the share of the earlier intervals."""
    stall: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """Action on logged steps that take stall_above seconds longer than usual."""
    stall_above: Annotated[float, Range(above=0, most=1e6), Only("stall")] = 30.0
    """Seconds. The delay must also be at least ten usual steps."""
    gpu: Annotated[str, choice(LOG_ACTIONS)] = "log"
    """Action on XIDs, throttling and lost GPUs, reported by NVML (package nvidia-ml-py).
    Temperature, power, and the energy of all GPUs in kWh are then logged as metrics. No effect
    without a GPU. The energy of processors and memory is logged where Linux lets the process read
    it (/sys/class/powercap)."""
    interval: Annotated[int, Range(1, 2**31), Only((*_ROUNDS, "stall"))] = 100
    """Batches between two rounds in which all processes share their times, by one small
    asynchronous all-gather."""
    in_a_row: Annotated[int, Range(1, 1000), Only(_ROUNDS)] = 2
    """Rounds in a row that must show a slow process, a drop or a wait before it is an event,
    because single rounds vary by chance."""

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if "roll_back" in (self.loss_spike, self.gradient_spike, self.not_finite):
            set_defaults(self, roll_back_steps=100, roll_back_skip=100, roll_back_most=3)

    @property
    def sees_spikes(self) -> bool:
        """Whether losses and gradient norms are compared with those of previous steps."""
        return self.loss_spike != "off" or self.gradient_spike != "off"

    @property
    def has_rounds(self) -> bool:
        """Whether processes share their step times."""
        names = (self.slow_rank, self.mfu_drop, self.data_wait, self.stall, self.gpu)
        return any(name != "off" for name in names)


class ResolvedWatchConfig(WatchConfig):
    """`WatchConfig` with defaults resolved."""

    roll_back_steps: int
    roll_back_skip: int
    roll_back_most: int


RESTART_CHECKS = ("off", "quick", "full")
WEBHOOK_FORMS = ("slack", "discord", "teams", "json")
EXCLUDE = "{exclude}"
"""In `launch`: the excluded machines, separated by commas."""
NODES = "{nodes}"
"""In `launch`: the number of machines left in the Slurm job."""
_FIELD = re.compile(r"\{[^{}]*\}")


@dataclass
class SuperviseConfig:
    """A process that starts the run, finds out why it ended, and decides on a restart."""

    enabled: bool = False
    """Supervise a run of scripts/train.py or finetune.py; scripts/supervise.py always does."""
    no_progress: Annotated[int, Range(1, 1000)] = 3
    """Attempts in a row without a newer checkpoint, whatever the cause, after which the supervisor
    gives up (exit status 93)."""
    max_restarts: Annotated[int, Range(0, 1000)] = 3
    """Restarts after failures of one kind since the last new checkpoint. At most 1 if a loss was
    not finite, and at most 2 if the cause is unknown."""
    max_restarts_per_day: Annotated[int, Range(0, 100_000)] = 24
    """Restarts within 24 hours, whatever the cause and even if each attempt saves a newer
    checkpoint, after which the supervisor gives up (exit status 93). 16,384 GPUs had about 8 per
    day."""
    min_goodput: Annotated[float, Range(0, below=1)] = 0.25
    """Smallest goodput over the last 24 hours: the share of time spent in steps that a checkpoint
    has saved. Below it the supervisor gives up (exit status 93), after at least five attempts and
    an hour. 0: no limit."""
    vanished_seconds: Annotated[float, Range(0, 86_400, "a day")] = 60.0
    """How long a checkpoint of the last attempt may be missing before the next start, because file
    systems may be mounted late. After that the supervisor reports it and ends with exit status
    93."""
    store_seconds: Annotated[float, Range(0, 31_536_000, "a year")] = 3600.0
    """How long to wait before a start for a checkpoint store that does not answer, with pauses of
    up to 300 s. After that the supervisor ends with exit status 1."""
    prometheus_port: Annotated[int | None, Range(1, 65_535)] = None
    """Port that serves the state of the supervisor for Prometheus, at the address
    logger.prometheus_host. Unset: logger.prometheus_port plus 100, if that is set."""
    prometheus_textfile: str | None = None
    """A file NAME.prom with the same state for node-exporter. Unset: NAME-supervisor.prom in the
    folder of logger.prometheus_textfile, if that is set. The file remains after the end, with the
    exit status."""
    wait_seconds: Annotated[float, Range(0, 86_400, "a day")] = 2.0
    """Pause before a restart; it doubles after each attempt without progress, up to 300 s."""
    confirm: Annotated[str, choice(RESTART_CHECKS)] = "quick"
    """Check of suspected machines before the next start: off, quick or full, as in
    scripts/check.py."""
    act: Annotated[bool, Only("confirm")] = False
    """Whether machines that the check finds bad are drained (Slurm) or cordoned (Kubernetes), and
    left out of the next start. false: they are only reported, and the run restarts on the same
    machines."""
    launch: list[str] = field(default_factory=list)
    """Words before `scripts/train.py RECIPE ...`, such as [srun, -K, "--nodes={nodes}",
    "--exclude={exclude}", python]; unset: start on this machine. {nodes}: the number of machines
    left in the Slurm job, so that it continues with fewer; a fixed number leaves the other machines
    as spares. A word with {exclude} is omitted if no machine is excluded."""
    requeue: bool = False
    """Whether a Slurm job that ends with exit status 75 (resume later or elsewhere) requeues itself
    (scontrol requeue), with `act` without the machines found bad. It does not after SIGINT, which
    comes from a person. false: whatever started the job restarts it."""
    webhook: str | None = None
    """A URL to which every decision is posted as a line. It is a secret: write
    ${oc.env:SLACK_WEBHOOK}."""
    webhook_form: Annotated[str | None, choice(WEBHOOK_FORMS), Only("webhook")] = None
    """Format of the request. slack: {"text": ...}, as for Mattermost, Rocket.Chat and Google Chat;
    discord; teams: an adaptive card; json: the text and the whole event. Unset: by the host of the
    URL, else slack."""

    def check(self, key: str = "supervise.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)
        if self.webhook is not None and not _is_url(self.webhook):
            yield f"{key}webhook: is not a URL; write one that begins with https://"
        for number, word in enumerate(self.launch):
            for name in _FIELD.findall(word):
                if name != EXCLUDE and nearest(name, [EXCLUDE]):
                    yield f"{key}launch[{number}]: {name} stands for nothing; write {EXCLUDE}"
            if not word.strip():
                yield f"{key}launch[{number}]: is empty; remove it"
        if not (self.prometheus_textfile or ".prom").endswith(".prom"):
            yield (
                f"{key}prometheus_textfile: '{public(str(self.prometheus_textfile))}' does not end"
                " in .prom, and node-exporter reads no other; write NAME.prom"
            )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return False
    return is_http and bool(parts.hostname) and text.isascii() and not re.search(r"[\s\x7f]", text)

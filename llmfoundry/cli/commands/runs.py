"""Command of `scripts/runs.py`: print, follow, stop and export the runs of `launch/runs.py`."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.launch import runs as api
from llmfoundry.launch.runs import RunDetails, RunState
from llmfoundry.launch.states import STATES, UNDER_WAY
from llmfoundry.launch.stop import stop as stop_run
from llmfoundry.loggers.console import Console, duration, percent
from llmfoundry.recipe.after_training import RunsRecipe
from llmfoundry.redaction import public
from llmfoundry.terminal import columns, shown_on

_HEAD = ("run", "state", "step", "loss", "goodput", "logged", "on", "last event, or why")
_WIDEST = 70  # characters of the last column
_PREFIX = "llmfoundry_run_"


def runs(recipe: RunsRecipe) -> None:
    """Execute the verb, the first word of the command line.

    Raises:
        UserError: there is no such run, or its target cannot be queried or stop it.
    """
    _VERBS[recipe.words[0]](recipe)


def _list(recipe: RunsRecipe) -> None:
    states = api.list_runs(recipe.folder)
    if recipe.format == "json":
        return _print_json([asdict(run) for run in states])
    if not states:
        return print(f"no runs in {recipe.folder}")
    print("\n".join(columns(_HEAD, [_row(run) for run in states], left=(0, 1, 6, 7))))


def _row(run: RunState) -> tuple[str, ...]:
    """Return the cells of a run in the table."""
    of = f" of {run.total:,}" if run.total else ""
    why = run.event if run.event and run.state in UNDER_WAY else run.why or run.event
    return (
        _plain(run.name),
        run.state,
        "unknown here" if not run.is_seen else f"{run.step:,}{of}" if run.step or of else "",
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.goodput is None else percent(run.goodput),
        "" if run.logged_at is None else f"{duration(max(0.0, time.time() - run.logged_at))} ago",
        f"{run.target} {run.nodes}".strip() if run.target else "",
        _plain(why)[:_WIDEST],
    )


def _plain(text: str) -> str:
    """Escape control characters and mask secrets in a text of an untrusted folder."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in public(text))


def _describe(recipe: RunsRecipe) -> None:
    details = api.describe(recipe.words[1], recipe.folder)
    if recipe.format == "json":
        return _print_json(asdict(details))
    Console().banner([(label, public(text)) for label, text in _rows(details) if text])


def _rows(details: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about a run."""
    run = details.run
    yield "run", run.folder
    yield "run's folder", run.run_folder
    yield "state", f"{run.state}" + f": {run.why}" * bool(run.why)
    step, loss, goodput = _row(run)[2:5]
    yield "step", step
    yield "loss", loss
    yield "goodput", goodput
    yield "launched", " ".join(filter(None, (run.target, run.job, _clock(details.submitted_at))))
    yield "recipe", " ".join([details.recipe, *details.overrides]).strip()
    yield "git", ", ".join(f"{key} {value}" for key, value in details.git.items())
    for attempt in details.attempts:
        yield f"attempt {attempt['attempt']}", f"{attempt['cause']}: {attempt['why']}"
    yield "checkpoints", ", ".join(details.checkpoints)
    scores = (f"{name} {value}" for name, value in details.evaluation.items() if value is not None)
    yield "gauntlet", ", ".join(scores)
    yield "software", ", ".join(f"{name} {value}" for name, value in details.environment.items())
    for event in details.events[-5:]:
        yield str(event["kind"]), f"{_clock(event['time'])} {event['what']}"
    yield "logs", details.logs


def _clock(when: float | None) -> str:
    return "" if not when else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _print_json(values: Any) -> None:
    """Print JSON; NaN and infinities become null."""
    finite = json.loads(json.dumps(values, default=str), parse_constant=lambda _: None)
    print(public(json.dumps(finite, indent=1)))


def _logs(recipe: RunsRecipe) -> None:
    _print_lines(api.logs(recipe.words[1], recipe.folder))


def _follow(recipe: RunsRecipe) -> None:
    _print_lines(api.follow(recipe.words[1], recipe.folder))
    state = api.state_of(api.find(recipe.words[1], recipe.folder))
    print(_plain(f"{state.name}: {state.state}" + f": {state.why}" * bool(state.why)))


def _print_lines(lines: Iterator[tuple[str, str]]) -> None:
    for source, line in lines:
        print(shown_on(sys.stdout, public(f"{source}: {line}")), flush=True)


def _stop(recipe: RunsRecipe) -> None:
    """Stop runs concurrently; raise all errors at the end."""

    def stop(name: str) -> RunState | UserError:
        try:
            return stop_run(name, recipe.folder, now=recipe.now, timeout=recipe.timeout)
        except UserError as error:
            return error

    names = list(dict.fromkeys(recipe.words[1:]))
    problems: list[str] = []
    with ThreadPoolExecutor(len(names)) as pool:
        for outcome in pool.map(stop, names):
            if isinstance(outcome, UserError):
                problems += outcome.problems
            else:
                line = f"{outcome.name}: {outcome.state} at step {outcome.step:,}"
                print(_plain(line), flush=True)
    if problems:
        raise UserError(*problems)


def _serve(recipe: RunsRecipe) -> None:
    """Serve the states of all runs for Prometheus until the process is terminated."""
    from llmfoundry.loggers.metrics_server import serve
    from llmfoundry.loggers.prometheus_logger import need_client

    need_client("runs serve")
    api.list_runs(recipe.folder)  # raises an error if the folder does not exist
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(recipe.folder))
    try:
        server = serve(recipe.host, recipe.port, registry, key="port")
    except OSError as error:
        raise UserError(f"port: {error.strerror or error}; write another host or port") from error
    print(
        f"http://{recipe.host}:{recipe.port}/metrics has the states of {recipe.folder}", flush=True
    )
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        server.server_close()


_GAUGES: dict[str, tuple[str, Callable[[RunState], float | None]]] = {
    "step": ("The last step that was logged.", lambda run: run.step if run.is_seen else None),
    "total_steps": ("Steps of the whole run.", lambda run: run.total),
    "loss": ("Training loss at the last logged step, nats a token.", lambda run: run.loss),
    "goodput": ("Share of a supervised run's time that trained.", lambda run: run.goodput),
    "logged_timestamp_seconds": ("When a step was logged last.", lambda run: run.logged_at),
}


class Collector:
    """Custom collector of prometheus_client: reads every run of a folder at each scrape."""

    def __init__(self, folder: str) -> None:
        """Initialize without reading."""
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; a deleted folder has no runs."""
        from prometheus_client.core import GaugeMetricFamily

        run_states: list[RunState] = []
        with suppress(UserError):
            run_states = api.list_runs(self._folder)

        # one gauge per state
        states = GaugeMetricFamily(
            f"{_PREFIX}state", "1: the state that the run is in.", labels=["run", "state"]
        )
        for run in run_states:
            for state in STATES:
                states.add_metric([run.name, state], run.state == state)
        yield states

        # one gauge per number
        for name, (meaning, number_of) in _GAUGES.items():
            family = GaugeMetricFamily(f"{_PREFIX}{name}", meaning, labels=["run"])
            for run in run_states:
                value = number_of(run)
                if value is not None:
                    family.add_metric([run.name], value)
            yield family


_VERBS: dict[str, Callable[[RunsRecipe], None]] = {
    "list": _list,
    "describe": _describe,
    "logs": _logs,
    "follow": _follow,
    "stop": _stop,
    "serve": _serve,
}

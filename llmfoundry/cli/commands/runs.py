"""`scripts/runs.py`: prints what `launch/runs.py` finds, and serves it for Prometheus."""

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
from llmfoundry.loggers.console import Console, duration, percent
from llmfoundry.recipe.after_training import RunsRecipe
from llmfoundry.redaction import public
from llmfoundry.terminal import columns, shown_on

_HEAD = ("run", "state", "step", "loss", "goodput", "logged", "on", "last event, or why")
_WIDEST = 70  # characters of the last column
_PREFIX = "llmfoundry_run_"


def runs(recipe: RunsRecipe) -> None:
    """Do what the verb says.

    Raises:
        UserError: there is no such run, or it cannot be asked or stopped.
    """
    _VERBS[recipe.words[0]](recipe)


def _list(recipe: RunsRecipe) -> None:
    found = api.list_runs(recipe.folder)
    if recipe.format == "json":
        return _print_json([asdict(run) for run in found])
    if not found:
        return print(f"no runs in {recipe.folder}")
    print("\n".join(columns(_HEAD, [_row(run) for run in found], left=(0, 1, 6, 7))))


def _row(run: RunState) -> tuple[str, ...]:
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
    """Names and events are of a folder that anyone may have written."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in public(text))


def _describe(recipe: RunsRecipe) -> None:
    found = api.describe(recipe.words[1], recipe.folder)
    if recipe.format == "json":
        return _print_json(asdict(found))
    Console().banner([(label, public(text)) for label, text in _rows(found) if text])


def _rows(found: RunDetails) -> Iterator[tuple[str, str]]:
    run = found.run
    yield "run", run.folder
    yield "run's folder", run.run_folder
    yield "state", f"{run.state}" + f": {run.why}" * bool(run.why)
    step, loss, goodput = _row(run)[2:5]
    yield "step", step
    yield "loss", loss
    yield "goodput", goodput
    yield "launched", " ".join(filter(None, (run.target, run.job, _clock(found.submitted_at))))
    yield "recipe", " ".join([found.recipe, *found.overrides]).strip()
    yield "git", ", ".join(f"{key} {value}" for key, value in found.git.items())
    for attempt in found.attempts:
        yield f"attempt {attempt['attempt']}", f"{attempt['cause']}: {attempt['why']}"
    yield "checkpoints", ", ".join(found.checkpoints)
    scores = (f"{name} {value}" for name, value in found.evaluation.items() if value is not None)
    yield "gauntlet", ", ".join(scores)
    yield "software", ", ".join(f"{name} {value}" for name, value in found.environment.items())
    for event in found.events[-5:]:
        yield str(event["kind"]), f"{_clock(event['time'])} {event['what']}"
    yield "logs", found.logs


def _clock(when: float | None) -> str:
    return "" if not when else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _print_json(values: Any) -> None:
    """Numbers that JSON has not are null."""
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
    """All are asked side by side; what could not be stopped is said at the end."""

    def stop(name: str) -> RunState | UserError:
        try:
            return api.stop(name, recipe.folder, now=recipe.now, timeout=recipe.timeout)
        except UserError as error:
            return error

    names = list(dict.fromkeys(recipe.words[1:]))
    problems: list[str] = []
    with ThreadPoolExecutor(len(names)) as pool:
        for found in pool.map(stop, names):
            if isinstance(found, UserError):
                problems += found.problems
            else:
                print(_plain(f"{found.name}: {found.state} at step {found.step:,}"), flush=True)
    if problems:
        raise UserError(*problems)


def _serve(recipe: RunsRecipe) -> None:
    from llmfoundry.loggers.metrics_server import serve
    from llmfoundry.loggers.prometheus_logger import need_client

    need_client("runs serve")
    api.list_runs(recipe.folder)  # is there such a folder?
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
    """What a scrape gets (prometheus_client's custom collector): every run of a folder."""

    def __init__(self, folder: str) -> None:
        """Reads nothing yet."""
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """The metric families; a folder that is gone has no runs."""
        from prometheus_client.core import GaugeMetricFamily

        found: list[RunState] = []
        with suppress(UserError):
            found = api.list_runs(self._folder)
        states = GaugeMetricFamily(
            f"{_PREFIX}state", "1: the state that the run is in.", labels=["run", "state"]
        )
        for run in found:
            for state in STATES:
                states.add_metric([run.name, state], run.state == state)
        yield states
        for name, (meaning, of) in _GAUGES.items():
            family = GaugeMetricFamily(f"{_PREFIX}{name}", meaning, labels=["run"])
            for run in found:
                value = of(run)
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

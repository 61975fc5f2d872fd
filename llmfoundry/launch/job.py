"""Job: the composed recipe, its command, and the folder of its launch record.

`cli/commands/launch.py` makes a `Job` from a checked recipe. A target renders and submits it. The
composed recipe keeps `${oc.env:NAME}` as written, so it contains no secret value.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.errors import UserError
from llmfoundry.launch.git import git_state
from llmfoundry.launch.record import RUN, LaunchRecord
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.launch import LaunchConfig
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, dump
from llmfoundry.redaction import hide_variables, masked_keys, public, public_override

RECIPE = "launch.yaml"
"""File of the composed recipe in the run's folder."""
LOGS = "launch"
"""Subfolder of the run's folder for the job's output."""
SUPERVISE, EVAL = "supervise", "eval"
_END = "__llmfoundry_end_of_recipe__"
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")  # one with a default may be missing


@dataclass(frozen=True)
class Job:
    """A run to launch."""

    name: str
    config: LaunchConfig
    """Resolved launch configuration."""
    folder: Path
    """Folder of the launch record on this machine; `record.where` has the run's folder if it
    differs."""
    text: str
    """The composed recipe as YAML."""
    own_words: list[str]
    """Overrides of `supervise` from the command line; they come last."""
    launches_itself: bool
    """Whether the recipe sets the command that starts its processes (supervise.launch)."""
    acts: bool
    """supervise.act."""
    record: LaunchRecord
    """Launch record; its job id is empty until the job is submitted."""
    changes: str
    """Diff of the repository against its commit; empty: no changes."""
    program: str = SUPERVISE
    """The command of llmfoundry that the job runs: a training run under its supervisor, or eval."""

    @property
    def nodes(self) -> int:
        """Number of training machines."""
        return self.config.nodes or 1

    @property
    def processes(self) -> int:
        """Processes per machine; 1 if not configured."""
        return self.config.gpus_per_node or 1

    @property
    def python(self) -> str:
        """Python program on the target."""
        if self.config.environment is not None:
            return f"{self.config.environment}/bin/python"
        is_here = self.config.target in ("local", "slurm") and self.config.image is None
        return sys.executable if is_here else "python"

    @property
    def note(self) -> str:
        """Comment for the rendered object: the run, its recipe and its commit."""
        git = self.record.git
        of = f"; commit {git['commit']}{' and changes' * bool(git['dirty'])}" if git else ""
        return f"{self.name}: {self.record.recipe} by llmfoundry launch{of}"

    @property
    def is_supervised(self) -> bool:
        """Whether the job is a training run, which a supervisor restarts."""
        return self.program == SUPERVISE

    def command(self, recipe: str, *words: str) -> list[str]:
        """Return the command on the target.

        Args:
            recipe: path of the composed recipe on the target.
            words: overrides that the target needs.
        """
        return [self.python, "-m", "llmfoundry", self.program, recipe, *words, *self.own_words]

    def torchrun(self, host: str) -> list[str]:
        """Return the override with which each supervisor starts its machine's processes.

        The rendezvous is on the first machine. When one machine restarts its processes, those of
        the others have failed too, and all machines meet again.

        Args:
            host: name of the first machine, as the other machines resolve it.

        Returns:
            `supervise.launch=[…]`; nothing for one machine, or if the recipe sets it.
        """
        if self.launches_itself or self.nodes == 1:
            return []
        each = "gpu" if self.config.gpus_per_node is None else self.processes
        words = [self.python, "-m", "llmfoundry.distributed.rendezvous", f"--nnodes={self.nodes}"]
        words += [f"--nproc-per-node={each}", "--rdzv-backend=c10d"]
        words += [f"--rdzv-endpoint={host}:{self.config.port}", f"--rdzv-id={self.name}"]
        return [list_key("supervise.launch", words)]

    def enter(self, workdir: str) -> str:
        """Return a line of bash that creates a folder if it is missing, and enters it."""
        name = shlex.quote(workdir)
        line = f"launch.workdir: {workdir} cannot be made or entered there; write another"
        return f"mkdir -p {name} && cd {name} || {{ echo {shlex.quote(line)} >&2; exit 2; }}"

    def environment(self, came: str) -> list[str]:
        """Return lines of bash that set the environment and check that secrets are set.

        Args:
            came: where secrets come from, for a comment.
        """
        lines = []
        if self.config.environment is not None:
            lines.append(f'export PATH={shlex.quote(self.config.environment + "/bin")}:"$PATH"')
        lines += [f"export {k}={shlex.quote(value)}" for k, value in self.config.env.items()]
        return lines + [f': "${{{name}:?is not set}}"  # {came}' for name in self.config.secrets]

    def write_recipe(self, path: str) -> list[str]:
        """Return lines of bash that write the recipe to `path`."""
        return [f"cat > {shlex.quote(path)} <<'{_END}'", self.text.rstrip("\n"), _END]

    def own_processes(self) -> list[str]:
        """Return the override for the number of processes of a single-machine run."""
        if self.nodes > 1 or self.launches_itself or self.config.gpus_per_node is None:
            return []
        return [f"parallel.nproc_per_node={self.processes}"]


def make_job(recipe: TrainRecipe, *, given: str, overrides: Sequence[str]) -> Job:
    """Return the job of a checked recipe of `scripts/launch.py`.

    Args:
        recipe: checked; keys that a training recipe does not have are removed.
        given: path or name of the recipe, as the user wrote it.
        overrides: words of the command line.

    Raises:
        UserError: the recipe contains a secret, or reads a variable that is not set on the target.
    """
    # compose the recipe, without the keys of `launch`
    config = recipe.launch
    known = Schema.of(FinetuneRecipe if isinstance(recipe, FinetuneRecipe) else TrainRecipe).keys
    plain = {key: value for key, value in as_written(recipe).items() if key in known}
    text = _composed(config, plain)

    # the launch record
    folder = folder_here(recipe)
    supervise_words = [w for w in overrides if w.lstrip("+~").startswith("supervise.")]
    given = " ".join(given.split())  # used in comments of one line
    if not str(folder.absolute()).isprintable():
        raise UserError("save_folder: has characters that no line of a script can hold; rename it")
    nodes = config.nodes or 1
    record, changes = _new_record(config, folder, given=given, overrides=overrides, nodes=nodes)
    place = _run_place(recipe)
    if place != str(folder.absolute()):
        record = replace(record, where={RUN: place})
    return Job(
        name=folder.name,
        config=config,
        folder=folder,
        text=f"# {given} as scripts/launch.py composed it.\n{text}",
        own_words=supervise_words,
        launches_itself=bool(recipe.supervise.launch),
        acts=recipe.supervise.act,
        record=record,
        changes=changes,
    )


def make_eval_job(recipe: EvalRecipe, *, given: str, overrides: Sequence[str]) -> Job:
    """Return the job of a checked recipe of `scripts/eval.py` with a `launch` section.

    Args:
        recipe: checked.
        given: the model, as the user wrote it.
        overrides: words of the command line.

    Raises:
        UserError: the recipe contains a secret, or reads a variable that is not set on the target.
    """
    config = recipe.launch
    assert config is not None
    plain = {key: value for key, value in as_written(recipe).items() if key != "launch"}
    text = _composed(config, plain)
    models = recipe.all_models()
    model = re.sub(r"[^\w.-]+", "-", models[0].rstrip("/").rpartition("/")[2]).strip("-")
    folder = Path("runs") / f"eval-{model}"
    given = " ".join(given.split())
    record, changes = _new_record(config, folder, given=given, overrides=overrides, nodes=1)
    return Job(
        name=folder.name,
        config=config,
        folder=folder,
        text=f"# {public(given)} as scripts/eval.py composed it.\n{text}",
        own_words=[],
        launches_itself=False,
        acts=False,
        record=record,
        changes=changes,
        program=EVAL,
    )


def _new_record(
    config: LaunchConfig, folder: Path, *, given: str, overrides: Sequence[str], nodes: int
) -> tuple[LaunchRecord, str]:
    """Return the record of a job that is not submitted yet, and the repository's changes.

    Args:
        config: resolved.
        folder: the record's folder here.
        given: the recipe or model on the command line, without line breaks.
        overrides: words of the command line.
        nodes: number of machines.
    """
    git, changes = git_state()
    record = LaunchRecord(
        name=folder.name,
        target=config.target,
        job="",
        nodes=nodes,
        gpus_per_node=config.gpus_per_node or 0,
        recipe=given,
        overrides=[public_override(word) for word in overrides],
        git=git,
    )
    return record, changes


def _composed(config: LaunchConfig, plain: dict[str, Any]) -> str:
    """Return a recipe as YAML, and resolve the defaults of its launch section.

    Raises:
        UserError: the recipe contains a secret, or reads a variable that is not set on the target.
    """
    config.fill()
    text = dump(plain)
    problems = [*_secrets_in(plain), *_unset_on_target(config, text)]
    if problems:
        raise UserError(*problems)
    hide_variables(config.secrets)
    return text


def folder_here(recipe: TrainRecipe) -> Path:
    """Return the folder of a launch record on this machine.

    If the run's folder is a URL, or an absolute path on another machine, the record is in runs/.
    """
    folder = Path(recipe.save_folder).expanduser()
    is_here = recipe.launch.target in ("local", "slurm") or not folder.is_absolute()
    if "://" in recipe.save_folder or not is_here:
        return Path("runs") / folder.name
    return folder


def _run_place(recipe: TrainRecipe) -> str:
    """Return the run's folder on the training machines, or its URL.

    For a pod with a mounted host path, return the path on the host.
    """
    config, folder = recipe.launch, recipe.save_folder
    if "://" in folder:
        return public(folder)
    for mount in config.mounts:
        source, _, inside = mount.rpartition(":")
        below = f"{inside.rstrip('/')}/"
        if source.startswith("/") and folder.startswith(below):
            return f"{source.rstrip('/')}/{folder.removeprefix(below)}"
    if config.target in ("local", "slurm"):
        folder = os.path.expanduser(folder)
    return os.path.join(config.workdir or os.getcwd(), folder)


def _secrets_in(plain: dict[str, Any]) -> Iterator[str]:
    for key in masked_keys(plain):
        yield (
            f"{key}: has a secret, and the recipe is written into files; write ${{oc.env:NAME}}"
            " there, and launch.secrets: [NAME]"
        )


def _unset_on_target(config: LaunchConfig, text: str) -> Iterator[str]:
    """Yield an error line for each variable that the recipe reads and the target does not set."""
    if config.target in ("local", "slurm"):
        return
    for name in sorted({*_VARIABLE.findall(text)} - {*config.env, *config.secrets}):
        yield (
            f"launch.secrets: the recipe reads ${{oc.env:{name}}}, which {config.target} does not"
            f" set; write launch.secrets: [{name}], or launch.env where it is no secret"
        )


def dump_all(*objects: Any) -> str:
    """Return objects as YAML documents, with multi-line strings as literal blocks."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings as literal blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a string, with the style `|` if it has several lines."""
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def list_key(key: str, words: Sequence[str]) -> str:
    """Return the override `key=["a","b"]`, which needs no escapes in single quotes of a shell."""
    return f"{key}={json.dumps(list(words), ensure_ascii=False, separators=(',', ':'))}"

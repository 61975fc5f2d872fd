"""What is launched: a recipe in one piece, its command, and the folder that its record goes into.

`cli/commands/launch.py` makes a `Job` of a checked recipe, and a target renders and submits it.
What travels is the composed recipe, with `${oc.env:NAME}` as written: a secret's value is nowhere.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.errors import UserError
from llmfoundry.launch.git import git_state
from llmfoundry.launch.record import RUN, LaunchRecord
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.launch import LaunchConfig
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, dump
from llmfoundry.redaction import hide_variables, masked_keys, public, public_override

RECIPE = "launch.yaml"
"""In the run's folder: the composed recipe that was launched."""
LOGS = "launch"
"""Below the run's folder: what the job prints."""
_END = "__llmfoundry_end_of_recipe__"
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")  # one with a default may be missing


@dataclass(frozen=True)
class Job:
    """A run to launch."""

    name: str
    config: LaunchConfig
    """Filled."""
    folder: Path
    """Of its record on this machine; `record.where` names the run's own where that is another."""
    text: str
    """The composed recipe as YAML."""
    own_words: list[str]
    """The command line's settings of the supervisor, which come last."""
    launches_itself: bool
    """Whether the recipe says by what its processes are started (supervise.launch)."""
    acts: bool
    """supervise.act."""
    record: LaunchRecord
    """Without a job."""
    changes: str
    """Of the repository against its commit, for a file; empty: none."""

    @property
    def nodes(self) -> int:
        """Machines that train."""
        return self.config.nodes or 1

    @property
    def processes(self) -> int:
        """Of each machine, where that is known."""
        return self.config.gpus_per_node or 1

    @property
    def python(self) -> str:
        """The program that starts it there."""
        if self.config.environment is not None:
            return f"{self.config.environment}/bin/python"
        is_here = self.config.target in ("local", "slurm") and self.config.image is None
        return sys.executable if is_here else "python"

    @property
    def note(self) -> str:
        """A line for the rendered object: what was launched, and of which commit."""
        git = self.record.git
        of = f"; commit {git['commit']}{' and changes' * bool(git['dirty'])}" if git else ""
        return f"{self.name}: {self.record.recipe} by llmfoundry launch{of}"

    def command(self, recipe: str, *words: str) -> list[str]:
        """The supervisor's command on the target.

        Args:
            recipe: where the composed recipe is there.
            words: the target's settings of the supervisor.
        """
        return [self.python, "-m", "llmfoundry", "supervise", recipe, *words, *self.own_words]

    def torchrun(self, host: str) -> list[str]:
        """Words by which a supervisor on each of several machines starts that machine's processes.

        They meet at the first; one that comes later, after a restart of its own, finds the others
        starting again as well, for their processes end with its.

        Args:
            host: the first machine's name, for all of them.
        """
        if self.launches_itself or self.nodes == 1:
            return []
        each = "gpu" if self.config.gpus_per_node is None else self.processes
        words = [self.python, "-m", "llmfoundry.distributed.rendezvous", f"--nnodes={self.nodes}"]
        words += [f"--nproc-per-node={each}", "--rdzv-backend=c10d"]
        words += [f"--rdzv-endpoint={host}:{self.config.port}", f"--rdzv-id={self.name}"]
        return [list_key("supervise.launch", words)]

    def enter(self, workdir: str) -> str:
        """A line of bash that goes to a folder, which is made where it is missing."""
        name = shlex.quote(workdir)
        line = f"launch.workdir: {workdir} cannot be made or entered there; write another"
        return f"mkdir -p {name} && cd {name} || {{ echo {shlex.quote(line)} >&2; exit 2; }}"

    def environment(self, came: str) -> list[str]:
        """Lines of bash that set what the run's processes need; where a secret came from."""
        lines = []
        if self.config.environment is not None:
            lines.append(f'export PATH={shlex.quote(self.config.environment + "/bin")}:"$PATH"')
        lines += [f"export {k}={shlex.quote(value)}" for k, value in self.config.env.items()]
        return lines + [f': "${{{name}:?is not set}}"  # {came}' for name in self.config.secrets]

    def write_recipe(self, path: str) -> list[str]:
        """Lines of bash that write the recipe there."""
        return [f"cat > {shlex.quote(path)} <<'{_END}'", self.text.rstrip("\n"), _END]

    def own_processes(self) -> list[str]:
        """The setting by which one machine's run has as many processes as the launch says."""
        if self.nodes > 1 or self.launches_itself or self.config.gpus_per_node is None:
            return []
        return [f"parallel.nproc_per_node={self.processes}"]


def make_job(recipe: TrainRecipe, *, given: str, overrides: Sequence[str]) -> Job:
    """What a checked recipe of `scripts/launch.py` launches.

    Args:
        recipe: its keys beside a training recipe's are left out of what travels.
        given: its path or name, as the user wrote it.
        overrides: words of the command line.

    Raises:
        UserError: a secret stands in the recipe itself, or is read on a target that has it not.
    """
    config = recipe.launch
    config.fill()
    plain = as_written(recipe)
    known = Schema.of(FinetuneRecipe if isinstance(recipe, FinetuneRecipe) else TrainRecipe).keys
    plain = {key: value for key, value in plain.items() if key in known}
    text = dump(plain)
    problems = [*_secrets_in(plain), *_unset_on_target(config, text)]
    if problems:
        raise UserError(*problems)
    hide_variables(config.secrets)
    folder = folder_here(recipe)
    own = [w for w in overrides if w.lstrip("+~").startswith("supervise.")]
    given = " ".join(given.split())  # it stands in comments, of a line
    if not str(folder.absolute()).isprintable():
        raise UserError("save_folder: has characters that no line of a script can hold; rename it")
    git, changes = git_state()
    place = _run_place(recipe)
    record = LaunchRecord(
        name=folder.name,
        target=config.target,
        job="",
        where={} if place == str(folder.absolute()) else {RUN: place},
        nodes=config.nodes or 1,
        gpus_per_node=config.gpus_per_node or 0,
        recipe=given,
        overrides=[public_override(word) for word in overrides],
        git=git,
    )
    return Job(
        name=folder.name,
        config=config,
        folder=folder,
        text=f"# {given} as scripts/launch.py composed it.\n{text}",
        own_words=own,
        launches_itself=bool(recipe.supervise.launch),
        acts=recipe.supervise.act,
        record=record,
        changes=changes,
    )


def folder_here(recipe: TrainRecipe) -> Path:
    """Where this machine keeps a launched run's record.

    On other machines an absolute path, or a URL, is one of theirs: then runs/ here.
    """
    folder = Path(recipe.save_folder).expanduser()
    is_here = recipe.launch.target in ("local", "slurm") or not folder.is_absolute()
    if "://" in recipe.save_folder or not is_here:
        return Path("runs") / folder.name
    return folder


def _run_place(recipe: TrainRecipe) -> str:
    """The run's folder on the machines that train, or its URL.

    A pod's folder on a path of its node is named by the node's path.
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
    """A line for each variable that the recipe reads and another machine will not have."""
    if config.target in ("local", "slurm"):
        return
    for name in sorted({*_VARIABLE.findall(text)} - {*config.env, *config.secrets}):
        yield (
            f"launch.secrets: the recipe reads ${{oc.env:{name}}}, which {config.target} does not"
            f" set; write launch.secrets: [{name}], or launch.env where it is no secret"
        )


def dump_all(*objects: Any) -> str:
    """Objects as YAML documents; texts of several lines, such as a recipe, stay readable."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """A text; `|` keeps its lines."""
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def list_key(key: str, words: Sequence[str]) -> str:
    """A setting `key=["a","b"]`, whose quotes a shell's own do not touch."""
    return f"{key}={json.dumps(list(words), ensure_ascii=False, separators=(',', ':'))}"

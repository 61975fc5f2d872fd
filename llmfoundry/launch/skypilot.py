"""SkyPilot task as YAML for `sky launch` and `sky jobs launch`. Nothing is submitted.

Each machine runs a supervisor. The rendezvous is on the first address of SKYPILOT_NODE_IPS.
"""

from __future__ import annotations

import shlex
from typing import Any

from llmfoundry.launch.job import RECIPE, Job, dump_all

_HEAD = "LLMFOUNDRY.HEAD"


def render(job: Job) -> str:
    """Return the task as YAML."""
    config = job.config
    resources = dict(config.resources)
    kind = resources.get("accelerators")
    if isinstance(kind, str) and ":" not in kind:
        resources["accelerators"] = f"{kind}:{config.gpus_per_node}"
    if config.image is not None:
        resources["image_id"] = f"docker:{config.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": config.restarts}
    mounts = {path: source for source, _, path in (m.rpartition(":") for m in config.mounts)}
    task: dict[str, Any] = {
        "name": job.name.replace("/", "-"),
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": config.env,
        "secrets": dict.fromkeys(config.secrets),  # values come from the shell that runs sky
        "file_mounts": mounts,
        "setup": "\n".join(config.setup),
        "run": _script(job),
    }
    plain = {key: value for key, value in task.items() if value}
    return f"# {job.note}\n" + dump_all(plain)


def _script(job: Job) -> str:
    config = job.config
    command = job.command(RECIPE, *job.torchrun(_HEAD), *job.own_processes())
    words = shlex.join(command).replace(_HEAD, "'\"$head\"'")
    lines = [job.enter(config.workdir)] if config.workdir else []
    if config.environment is not None:
        lines.append(f'export PATH={shlex.quote(config.environment + "/bin")}:"$PATH"')
    lines += job.write_recipe(RECIPE)
    lines += ['head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'] if job.nodes > 1 else []
    return "\n".join([*lines, f"exec {words}", ""])

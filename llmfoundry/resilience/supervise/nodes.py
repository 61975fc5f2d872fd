"""Suspected nodes: check them, take them out of service (Slurm, Kubernetes), start without them.

`supervisor.py` calls it; nothing is decided here. A bad node of a Kubernetes cluster is cordoned,
so that no pod is started there any more: one PATCH of the API over HTTPS with what every pod has (a
token, the cluster's certificate), and no client library. The control plane makes a taint of
spec.unschedulable; an annotation gives the reason. Without the right to do so, the message names
the role to grant: examples/kubernetes.yaml has it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from llmfoundry.events import names_in
from llmfoundry.exit_status import BAD_MACHINE
from llmfoundry.files import parse_json, read_json
from llmfoundry.recipe.resilience.supervise import EXCLUDE, NODES
from llmfoundry.redaction import public
from llmfoundry.resilience.check import kernel_log
from llmfoundry.resilience.supervise import slurm
from llmfoundry.resilience.supervise.notify import print_stderr, send
from llmfoundry.retry import Late, within

_CHECK_SECONDS = 1800.0
_CORDON_SECONDS = 60.0  # for all nodes
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its service account: token (which is renewed), ca.crt, namespace."""
ANNOTATION = "llmfoundry/cordoned"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_EXAMPLE = "llmfoundry/resilience/examples/kubernetes.yaml"


def kernel_events(
    path: str | None, node: str, *, seconds: float, start: int
) -> list[tuple[str, str, bool]]:
    """Machine, why, and whether it takes the machine out, of the kernel's latest lines.

    Those of the last `seconds`, or of the file at `path` (health_check.kernel_log) from byte
    `start`.
    """
    lines, _ = kernel_log.read_log(path, hours=max(1.0, seconds) / 3600, start=start)
    return [(node, f"{e.code} {e.why}".strip(), e.is_bad) for e in kernel_log.log_events(lines)]


def run_check_script(command: Sequence[str], output: Path) -> tuple[tuple[str, ...], str]:
    """Run scripts/check.py; the machines that it finds bad, and its verdict in words.

    `output`: where the words of its command have it write check.json.
    """
    try:
        done = subprocess.run(
            list(command),
            timeout=_CHECK_SECONDS,
            stdout=subprocess.PIPE,  # a log that cannot be written must not end the check
            env=slurm.step_environment(),
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"the check itself failed: {error}"
    print_stderr(done.stdout.rstrip())
    if done.returncode == 0:
        return (), "nothing is bad"
    if done.returncode != BAD_MACHINE:
        return (), f"the check itself ended with status {done.returncode}"
    try:
        found = names_in(read_json(output / "check.json"), "bad_nodes")
    except (OSError, ValueError, AttributeError) as error:
        return (), f"the check's report cannot be read: {error}"
    return found, f"bad: {', '.join(found) or 'no machine alone is to blame'}"


def find_bad(
    suspected: Iterable[str], command: Sequence[str], output: Path
) -> tuple[tuple[str, ...], set[str], str]:
    """Machines of a Slurm job that are bad, those of them that do not answer, and why.

    `command`: the words of scripts/check.py; empty: Slurm alone is queried.
    """
    lost = slurm.lost_nodes()
    silent = {node: lost[node] for node in suspected if node in lost}
    reasons = list(silent.values())
    rest = [node for node in suspected if node not in silent]
    if not command or not rest:
        return tuple(silent), set(silent), "; ".join(reasons) or "not checked"
    problems = {node: why for node in rest if (why := slurm.step_problem(node))}
    reasons += [f"{node}: {why}" for node, why in problems.items()]
    silent |= problems
    rest = [node for node in rest if node not in silent]
    found: tuple[str, ...] = ()
    if rest:
        tasks = [f"--ntasks={len(rest)}", f"--nodes={len(rest)}", "--ntasks-per-node=1"]
        srun = ["srun", *tasks, f"--nodelist={','.join(rest)}", sys.executable]
        found, verdict = run_check_script([*srun, *command], output)
        reasons.append(verdict)
    return (*silent, *found), set(silent), "; ".join(reasons)


def launch_words(launch: Sequence[str], excluded: Iterable[str], nodes: int = 0) -> list[str]:
    """The words of `supervise.launch` for a start without the excluded machines, on `nodes`."""
    names = ",".join(sorted(excluded))
    words = [word for word in launch if names or EXCLUDE not in word]
    return [word.replace(EXCLUDE, names).replace(NODES, str(nodes)) for word in words]


def take_out_of_service(
    nodes: Iterable[str], why: str, *, silent: Collection[str]
) -> tuple[str, set[str]]:
    """Have the scheduler start nothing on machines any more; `silent`: those that do not answer.

    Returns:
        What came of it, in words, and which of them Slurm may still use.
    """
    if "SLURM_JOB_ID" not in os.environ and in_pod():
        return cordon(nodes, why), set()
    if not slurm.in_job():
        return "", set()
    found, names, kept = [], set(nodes), set[str]()
    for state, some in (("down", names & {*silent}), ("drain", names - {*silent})):
        if some:
            problem = slurm.set_state(sorted(some), why, state=state)
            found.append(f"not set to {state}: {problem}" if problem else f"set to {state}")
            kept |= some if problem else set()
    return ", ".join(found), kept


def in_pod() -> bool:
    """Whether this is a Kubernetes pod that has access to its cluster's API."""
    return bool(os.environ.get(_HOST)) and (ACCOUNT / "token").is_file()


def cordon(nodes: Iterable[str], why: str) -> str:
    """Let no pod be started on these nodes any more; what came of it, in a line."""
    done = list[str]()
    names = sorted(nodes)

    def patch_all() -> None:
        for name in names:
            _patch(name, why)
            done.append(name)

    try:
        within(_CORDON_SECONDS, patch_all)
    except (OSError, ValueError, http.client.HTTPException, Late) as error:
        left = ", ".join(name for name in names if name not in done)
        cordoned = f"cordoned {', '.join(done)}; " if done else ""
        return f"{cordoned}not cordoned {left}: {_reason(error, names[len(done)])}"
    return f"cordoned {', '.join(done)}"


def _patch(node: str, why: str) -> None:
    """Cordon a node; one that is cordoned already stays so.

    Raises:
        OSError: the API cannot be reached, or refuses.
    """
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    note = {ANNOTATION: f"{stamp} {public(why)[:500]}"}
    patch = {"metadata": {"annotations": note}, "spec": {"unschedulable": True}}
    host, port = os.environ[_HOST], os.environ.get(_PORT) or "443"
    host = f"[{host}]" if ":" in host else host
    token = (ACCOUNT / "token").read_text(encoding="ascii").strip()
    request = urllib.request.Request(
        f"https://{host}:{port}/api/v1/nodes/{quote(node, safe='')}",
        data=json.dumps(patch).encode(),
        method="PATCH",
        headers={
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/merge-patch+json",
            "Accept": "application/json",
            "User-Agent": "llmfoundry",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    no_proxy = urllib.request.ProxyHandler({})  # the API is inside of the cluster
    send(request, no_proxy, urllib.request.HTTPSHandler(context=context))


def _reason(error: Exception, node: str) -> str:
    """Why a node was not cordoned, and what to do about it."""
    if isinstance(error, urllib.error.HTTPError):
        message = _api_message(error)
        if error.code == 403:
            user = re.search(r'User "([^"]+)"', message)
            who = user[1] if user else "the pod's service account"
            return f"{who} may not patch nodes (403); grant the ClusterRole of {_EXAMPLE}"
        if error.code == 404:
            return (
                f"{node} is no node of the cluster (404); give pods their node's name as NODE_NAME,"
                f" as {_EXAMPLE} does"
            )
        if error.code == 401:
            return "the API does not know the pod's token (401)"
        return f"the API's status {error.code}: {message or error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"the API cannot be reached: {why or type(error).__name__}"


def _api_message(error: urllib.error.HTTPError) -> str:
    """The message of the API's Status object."""
    with error, suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
        return public(str(parse_json(error.read(100_000)).get("message", "")))[:300]
    return ""

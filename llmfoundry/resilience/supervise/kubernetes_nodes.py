"""Cordon bad nodes of a Kubernetes cluster, so that no new pods start on them.

Entry point: `cordon`, used by `nodes.py` in a pod. A node is cordoned by one PATCH request with the
pod's token and the cluster's certificate, without a client library. The request sets
spec.unschedulable and an annotation with the reason. If the permission is missing, the message
names the role to grant, which `launch/kubernetes.py` defines.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from llmfoundry.files import parse_json
from llmfoundry.redaction import public
from llmfoundry.resilience.supervise.notify import send
from llmfoundry.retry import DeadlineExceeded, within

_CORDON_SECONDS = 60.0  # for all nodes
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Files of the pod's service account: token (renewed by Kubernetes), ca.crt, namespace."""
ANNOTATION = "llmfoundry/cordoned"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_EXAMPLE = "scripts/launch.py with launch=kubernetes supervise.act=true"


def in_pod() -> bool:
    """Return whether this process runs in a Kubernetes pod with access to the cluster's API."""
    return bool(os.environ.get(_HOST)) and (ACCOUNT / "token").is_file()


def cordon(nodes: Iterable[str], why: str) -> str:
    """Cordon nodes; return a description of the result in one line."""
    done = list[str]()
    names = sorted(nodes)

    def patch_all() -> None:
        for name in names:
            _patch(name, why)
            done.append(name)

    try:
        within(_CORDON_SECONDS, patch_all)
    except (OSError, ValueError, http.client.HTTPException, DeadlineExceeded) as error:
        left = ", ".join(name for name in names if name not in done)
        cordoned = f"cordoned {', '.join(done)}; " if done else ""
        return f"{cordoned}not cordoned {left}: {_reason(error, names[len(done)])}"
    return f"cordoned {', '.join(done)}"


def _patch(node: str, why: str) -> None:
    """Cordon a node. Does nothing to a node that is cordoned already.

    Raises:
        OSError: the API cannot be reached, or rejects the request.
    """
    # the change: unschedulable, with the time and the reason as an annotation
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    note = {ANNOTATION: f"{stamp} {public(why)[:500]}"}
    patch = {"metadata": {"annotations": note}, "spec": {"unschedulable": True}}

    # the request to the cluster's API, authorized by the pod's token
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
    no_proxy = urllib.request.ProxyHandler({})  # the API is inside the cluster
    send(request, no_proxy, urllib.request.HTTPSHandler(context=context))


def _reason(error: Exception, node: str) -> str:
    """Return why a node was not cordoned, and what to do."""
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
    """Return the message of the API's Status object; empty: there is none."""
    with error, suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
        return public(str(parse_json(error.read(100_000)).get("message", "")))[:300]
    return ""

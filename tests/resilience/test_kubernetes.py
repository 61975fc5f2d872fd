"""Bad nodes are cordoned through an API server with TLS, tokens and RBAC's refusals, as a pod is.

The server keeps nodes and applies merge patches (RFC 7386); its answers are Kubernetes' own.
"""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.resilience.supervise import kubernetes_nodes, notify
from tests.resilience.test_supervisor import Place

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl, to make a certificate"
)
TOKEN = "kanarie.token.of-the-pod"
USER = "system:serviceaccount:training:default"


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    made, key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run(
        ["openssl", *words, *names, "-keyout", str(key), "-out", str(made)],
        check=True,
        capture_output=True,
    )
    return made, key


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class Cluster:
    """An API server on loopback, and the account of a pod."""

    def __init__(self, folder: Path, certificates: tuple[Path, Path]) -> None:
        self.nodes = {
            name: {"metadata": {"name": name, "annotations": {"a": "b"}}, "spec": {"podCIDR": "x"}}
            for name in ("n1", "n2")
        }
        self.may_patch, self.busy, self.asked = True, 0, list[str]()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                cluster.asked.append(self.path)
                self._answer(*cluster.answer(self.path, self.headers, json.loads(body)))

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status == 307:
                    self.send_header("Location", "https://127.0.0.1:1/")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificates)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.account = folder / "account"
        self.account.mkdir()
        (self.account / "token").write_text(f"{TOKEN}\n")
        (self.account / "ca.crt").write_bytes(certificates[0].read_bytes())

    def answer(self, path: str, headers: Any, patch: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        def status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
            about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            return code, {**about, "message": message, "reason": reason, "code": code}

        name = path.removeprefix("/api/v1/nodes/")
        if headers["Authorization"] != f"Bearer {TOKEN}":
            return status(401, "Unauthorized", "Unauthorized")
        if not self.may_patch:
            why = (
                f'User "{USER}" cannot patch resource "nodes" in API group "" at the cluster scope'
            )
            return status(403, "Forbidden", f'nodes "{name}" is forbidden: {why}')
        if self.busy:
            self.busy -= 1
            return status(429, "TooManyRequests", "please try again later")
        if headers["Content-Type"] != "application/merge-patch+json":
            return status(415, "UnsupportedMediaType", "the body of the request was in an unknown")
        if name not in self.nodes:
            return status(404, "NotFound", f'nodes "{name}" not found')
        self.nodes[name] = merged(self.nodes[name], patch)
        return 200, self.nodes[name]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), "kubernetes")


@pytest.fixture
def cluster(
    tmp_path: Path, certificates: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    made = Cluster(tmp_path, certificates)
    monkeypatch.setattr(kubernetes_nodes, "ACCOUNT", made.account)
    monkeypatch.setattr(notify, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(made.port))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # which is not for the cluster
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_bad_node_is_cordoned_and_says_why(cluster: Cluster) -> None:
    assert kubernetes_nodes.in_pod()
    cluster.busy = 1
    assert kubernetes_nodes.cordon(["n1"], "XID 79 at http://me:pass@host") == "cordoned n1"
    node = cluster.nodes["n1"]
    assert node["spec"] == {"podCIDR": "x", "unschedulable": True}
    note = node["metadata"]["annotations"].pop("llmfoundry/cordoned")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ XID 79 at http://me:\*\*\*@host", note)
    assert node["metadata"]["annotations"] == {"a": "b"}
    assert "unschedulable" not in cluster.nodes["n2"]["spec"]
    assert kubernetes_nodes.cordon(["n2", "n1"], "again") == "cordoned n1, n2"


def test_a_refusal_names_the_role_to_grant(cluster: Cluster) -> None:
    cluster.may_patch = False
    said = kubernetes_nodes.cordon(["n1"], "x")
    what = "scripts/launch.py with launch=kubernetes supervise.act=true"
    assert said == (
        f"not cordoned n1: {USER} may not patch nodes (403); grant the ClusterRole of {what}"
    )


def test_what_else_fails_is_reported_without_the_token(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [kubernetes_nodes.cordon(["n1", "pod-7", "zz"], "x")]
    monkeypatch.setattr(cluster, "answer", lambda *_: (307, {}))
    said.append(kubernetes_nodes.cordon(["n1"], "x"))
    monkeypatch.undo()
    monkeypatch.setattr(kubernetes_nodes, "ACCOUNT", cluster.account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
    (cluster.account / "token").write_text("an old one")
    said.append(kubernetes_nodes.cordon(["n1"], "x"))
    other, _ = certificate(tmp_path, "another")
    (cluster.account / "ca.crt").write_bytes(other.read_bytes())
    said.append(kubernetes_nodes.cordon(["n1"], "x"))
    (cluster.account / "ca.crt").unlink()
    said.append(kubernetes_nodes.cordon(["n1"], "x"))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    (cluster.account / "ca.crt").write_bytes(other.read_bytes())
    said.append(kubernetes_nodes.cordon(["n1"], "x"))
    assert said[0].startswith(
        "cordoned n1; not cordoned pod-7, zz: pod-7 is no node of the cluster (404); give pods"
        " their node's name as NODE_NAME"
    )
    assert said[1].startswith("not cordoned n1: the API's status 307: ")
    assert said[2] == "not cordoned n1: the API does not know the pod's token (401)"
    assert "certificate verify failed" in said[3]
    assert said[4] == "not cordoned n1: the API cannot be reached: No such file or directory"
    assert said[5] == "not cordoned n1: the API cannot be reached: Connection refused"
    assert "kanarie" not in "".join(said)


def test_elsewhere_nobody_is_asked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster.account / "token").unlink()
    assert not kubernetes_nodes.in_pod()
    (cluster.account / "token").write_text(TOKEN)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert not kubernetes_nodes.in_pod()


@pytest.mark.parametrize("may_patch", [True, False])
def test_a_supervised_run_in_a_pod_cordons_its_node_and_ends_with_75(
    cluster: Cluster, tmp_path: Path, may_patch: bool
) -> None:
    place = Place(tmp_path)
    cluster.may_patch = may_patch
    where = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(cluster.port),
        "NODE_NAME": "n1",
    }
    assert place.supervise(["xid"], act=True, env=where, account=cluster.account) == 75
    (decision,) = place.events("decision")
    assert (decision["cause"], decision["bad_nodes"]) == ("machine", ["n1"])
    assert cluster.asked == ["/api/v1/nodes/n1"]
    if may_patch:
        assert decision["done"] == "stop (cordoned n1)"
        note = cluster.nodes["n1"]["metadata"]["annotations"]["llmfoundry/cordoned"]
        assert "79" in note and cluster.nodes["n1"]["spec"]["unschedulable"] is True
    else:
        assert f"not cordoned n1: {USER} may not patch nodes (403)" in decision["done"]
        assert decision["done"] in place.said
    assert TOKEN not in place.said + json.dumps(decision)


def test_without_act_nobody_is_asked(cluster: Cluster, tmp_path: Path) -> None:
    where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "NODE_NAME": "n1"}
    place = Place(tmp_path)
    assert place.supervise(["xid"], env=where, account=cluster.account) == 0
    assert cluster.asked == []

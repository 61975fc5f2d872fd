"""A small server of W&B's protocol, as far as a run needs it; keeps what it is sent."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Listens on loopback until `stop`. `rows`: history in the order of arrival."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []  # variables of each start of a run
        self.exit_codes: list[int] = []
        self.requests = 0
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                kept.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = json.dumps(kept._answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Like a server that is killed: its port is closed."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.startswith("/upload/"):
            self.files[path.removeprefix("/upload/")] = body.decode()
            return {}
        if path.endswith("/file_stream"):
            return self._stream(json.loads(body))
        if not path.endswith("/graphql"):
            return {}
        request = json.loads(body)
        query, variables = request["query"], request.get("variables", {})
        if "mutation UpsertBucket" in query:
            return {"data": {"upsertBucket": self._begin(variables)}}
        if "RunResumeStatus" in query:
            return {"data": {"model": self._resume_status()}}
        if "viewer" in query:
            viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}"}
            return {"data": {"viewer": viewer | {"teams": {"edges": []}}}}
        if "mutation CreateRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.address}/upload/{name}"}
                for name in variables["files"]
            ]
            made = {"runID": "run", "uploadHeaders": [], "files": files}
            return {"data": {"createRunFiles": made}}
        return {"data": {}}

    def _stream(self, sent: dict[str, Any]) -> dict[str, Any]:
        history = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.rows += [json.loads(line) for line in history]
        if sent.get("complete"):
            self.exit_codes.append(sent["exitcode"])
        return {}

    def _begin(self, variables: dict[str, Any]) -> dict[str, Any]:
        inserted = not self.runs
        self.runs.append(variables)
        project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "run", "name": variables["name"], "displayName": "", "config": "{}"}
        more = {"historyLineCount": len(self.rows), "project": project}
        return {"inserted": inserted, "bucket": bucket | more}

    def _resume_status(self) -> dict[str, Any] | None:
        if not self.runs:
            return None
        tail = json.dumps([json.dumps(row) for row in self.rows[-1:]])
        bucket = {
            "id": "run",
            "name": self.runs[0]["name"],
            "displayName": "",
            "summaryMetrics": json.dumps(self.rows[-1] if self.rows else {}),
            "config": "{}",
            "tags": [],
            "historyLineCount": len(self.rows),
            "historyTail": tail,
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "wandbConfig": '{"t": 1}',
        }
        return {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}

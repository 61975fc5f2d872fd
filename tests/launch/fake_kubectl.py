"""Stands for kubectl: keeps objects as files of a folder, and writes down how it was asked.

KUBE_FOLDER: where. An object's status is what the test has written into NAME.status.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import yaml


def main() -> None:
    """Do what the words say, as kubectl 1.32 says it."""
    folder = Path(os.environ["KUBE_FOLDER"])
    with (folder / "asked").open("a") as asked:
        asked.write(json.dumps(sys.argv[1:]) + "\n")
    verb, *words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if verb == "apply":
        for found in yaml.safe_load_all(sys.stdin.read()):
            named = f"{found['kind'].lower()}/{found['metadata']['name']}"
            (folder / named.replace("/", "_")).write_text(json.dumps(found))
            print(f"{named} created")
    elif verb == "get" and words == ["pods"]:
        pods = folder / "pods"
        print(pods.read_text() if pods.exists() else '{"items": []}')
    elif verb == "logs":
        time.sleep(float(os.environ.get("KUBE_SLEEP", "0")))
        times = ("2026-01-01T10:00:00.5Z ", "2026-01-01T10:00:00.49Z ")
        later, first = times if "--timestamps" in sys.argv else ("", "")
        print(f"[pod/tiny-node-0-1-x7k2f/node] {later}hello")
        print(f"[pod/tiny-node-0-0-abcde/node] {first}world")
    else:
        path = folder / words[0].replace("/", "_")
        if words != ["pods"] and not path.exists():
            kind, _, name = words[0].partition("/")
            sys.exit(f'Error from server (NotFound): {kind}s "{name}" not found')
        if verb == "delete" and path.exists():
            path.unlink()
        elif verb == "get":
            status = path.with_name(f"{path.name}.status")
            found = json.loads(path.read_text())
            print(
                json.dumps(
                    found | {"status": json.loads(status.read_text())} if status.exists() else found
                )
            )


if __name__ == "__main__":
    main()

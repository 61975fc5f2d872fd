"""`scripts/serve.py` as a process: what it prints, a signal in the middle of a stream, mistakes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.half_open import half_sent
from tests.tiny import ENV, command, run, write_recipe
from tests.warm_scripts import run_script

KEY = "a-key-of-twenty-characters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    write_recipe(made)
    run("train.py", "tiny.yaml", "max_duration=1ba", "run_name=t", "eval=off", cwd=made)
    return made


@pytest.fixture
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    line = command("serve.py", "runs/t", "port=0", "api_key_env=OUR_KEY", "access_log=true")
    started = subprocess.Popen(
        line,
        cwd=folder,
        env=ENV | {"OUR_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if sys.platform == "linux":
        resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    yield started
    started.kill()
    started.wait()


def test_a_signal_lets_a_stream_end_beside_half_sent_requests_and_the_key_is_never_shown(
    process: subprocess.Popen[str],
) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving runs/t at (http://127.0.0.1:\d+/v1);", line):
            break
    else:
        raise AssertionError("it did not begin")
    body = {"prompt": "line", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{found[1]}/completions", data, headers)
    port = int(found[1].split(":")[2].partition("/")[0])
    with half_sent(port, 1100), urllib.request.urlopen(request, timeout=60) as response:
        first = response.readline()
        assert first.startswith(b"data: {")
        os.kill(process.pid, signal.SIGTERM)
        rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"completion_tokens":40' in rest
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and stdout == ""
    assert "POST /v1/completions" in stderr and KEY not in stderr
    assert "Error" not in stderr


@pytest.mark.parametrize(
    "words, key, said",
    [
        (["host=0.0.0.0"], None, "host: 0.0.0.0 can be reached from other machines"),
        (["host=example"], None, "host: example can be reached"),
        (["api_key_env=OUR_KEY"], None, "the variable OUR_KEY is not set"),
        (["api_key_env=OUR_KEY"], "short", "holds is no key of 16 or more"),
        (["port=70000"], None, "port: 70000 is too large"),
        (["slots=16384", "max_seq_len=16777216"], None, "slots: keys and values of 16384 x"),
        (["slots=0"], None, "slots: 0 is too small"),
        (["chat_template=none.jinja"], None, "chat_template: cannot read none.jinja"),
    ],
)
def test_mistakes_are_one_line(folder: Path, words: list[str], key: str | None, said: str) -> None:
    given = {} if key is None else {"OUR_KEY": key}
    done = run_script("serve.py", ["runs/t", "port=0", *words], cwd=folder, variables=given)
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert key is None or key not in done.stderr


def test_a_port_that_is_taken_is_said_before_the_model_is_read(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve.py", "runs/nothing", f"port={port}", cwd=folder, status=2)
    assert f"port: {port} of 127.0.0.1: " in done.stderr

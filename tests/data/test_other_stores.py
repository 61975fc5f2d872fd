"""Azure and Google's store, each a server on loopback behind the proxy that fails.

Skipped without them; to run: npm install -g azurite; pip install adlfs gcsfs gcp-storage-emulator.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from llmfoundry.data.fetch.shard_files import FetchOptions, FileSpec, ShardFolder
from llmfoundry.errors import UserError
from tests.data.s3_server import BUCKET, FaultyS3

DATA = os.urandom(70_001)
SPEC = FileSpec("a", len(DATA), (("sha1", hashlib.sha1(DATA).hexdigest()),))
_AZURITE = "devstoreaccount1"  # its account; the key is public, too
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def azure(port: int) -> dict[str, Any]:
    endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{_AZURITE};"
    account = f"AccountName={_AZURITE};AccountKey={_AZURITE_KEY};"
    return {"connection_string": f"DefaultEndpointsProtocol=http;{account}{endpoint}"}


def google(port: int) -> dict[str, Any]:
    return {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}


SETTINGS = {"az": azure, "gs": google}


@contextmanager
def azurite(port: int, folder: Path) -> Iterator[None]:
    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("no azurite-blob: npm install -g azurite")
    options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(folder)]
    process = subprocess.Popen([command, "--blobPort", str(port), *options])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def google_emulator(port: int, folder: Path) -> Iterator[None]:
    emulator = pytest.importorskip(
        "gcp_storage_emulator.server", reason="pip install gcp-storage-emulator"
    )
    server = emulator.create_server("127.0.0.1", port, in_memory=True)
    server.start()
    try:
        yield
    finally:
        server.stop()


@pytest.fixture(scope="module", params=["az", "gs"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, FaultyS3]]:
    """Its protocol, and the proxy before it; it holds data/a and the empty data/empty."""
    kind = request.param
    package, serve = {"az": ("adlfs", azurite), "gs": ("gcsfs", google_emulator)}[kind]
    with pytest.MonkeyPatch.context() as patch:
        # Or gcsfs asks by gRPC, which the emulator does not speak, of which kind a bucket is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip(package, reason=f"pip install {package}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve(port, tmp_path_factory.mktemp(kind)):
        _wait_for(port)
        files = fsspec.filesystem(kind, skip_instance_cache=True, **SETTINGS[kind](port))
        files.mkdir(BUCKET)
        files.pipe_file(f"{BUCKET}/data/a", DATA)
        files.pipe_file(f"{BUCKET}/data/empty", b"")
        faulty = FaultyS3(port)
        yield kind, faulty
        faulty.stop()


@pytest.fixture
def folder(
    store: tuple[str, FaultyS3], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ShardFolder:
    kind, faulty = store
    faulty.reset()
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)
    settings = {kind: SETTINGS[kind](faulty.server.server_port)}
    options = FetchOptions(str(tmp_path), retry=3, timeout=20.0, storage_options=settings)
    return ShardFolder.open(f"{kind}://{BUCKET}/data", None, options)


def test_a_file_is_one_request(store: tuple[str, FaultyS3], folder: ShardFolder) -> None:
    assert folder.get(SPEC).read_bytes() == DATA
    assert folder.read("a") == DATA and folder.read("empty") == b""
    assert store[1].requests["data/a"] == 2


@pytest.mark.parametrize("fault", ["slow down", "internal", "too many", "truncated", "damaged"])
def test_what_passes_is_tried_again_by_us_alone(
    fault: str, store: tuple[str, FaultyS3], folder: ShardFolder
) -> None:
    store[1].faults["data/a"] = (fault, 1)
    began = time.monotonic()
    assert folder.get(SPEC).read_bytes() == DATA
    assert store[1].requests["data/a"] == 2
    assert time.monotonic() - began < 10  # Azure's library alone would wait for 15 s


def test_a_cut_connection_is_tried_again(store: tuple[str, FaultyS3], folder: ShardFolder) -> None:
    store[1].faults["data/a"] = ("cut", 2)
    assert folder.get(SPEC).read_bytes() == DATA


@pytest.mark.parametrize(
    ("fault", "requests", "line"),
    [
        ("missing", 1, r"is not there; check data\.remote"),
        ("forbidden", 1, r"access is refused .*; check the credentials"),
        ("slow down", 4, r"asks for fewer requests .* after 4 attempts"),
        ("damaged", 2, r"its sha1 is [0-9a-f]{40}, its index specifies .*fetched again"),
    ],
)
def test_what_lasts_is_one_line(
    fault: str, requests: int, line: str, store: tuple[str, FaultyS3], folder: ShardFolder
) -> None:
    kind, faulty = store
    faulty.faults["data/a"] = (fault, -1)
    with pytest.raises(UserError, match=f"^{kind}://{BUCKET}/data/a: .*{line}") as caught:
        folder.get(SPEC)
    assert "\n" not in str(caught.value)
    assert faulty.requests["data/a"] == requests


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError("the server did not come up")

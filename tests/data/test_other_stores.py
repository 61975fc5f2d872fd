"""Azure and Google's store, each a server on loopback behind the proxy that fails."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.data.preparation.input_files import list_url
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, FileSpec, ShardFolder
from llmfoundry.data.store import ExistsError, MissingError, Store
from llmfoundry.errors import UserError
from tests.data.memory_server import ACCOUNT, MemoryStore, memory_server
from tests.data.s3_server import BUCKET, FaultyS3

pytest.importorskip("obstore")

DATA = os.urandom(70_001)
SPEC = FileSpec("a", len(DATA), (("sha1", hashlib.sha1(DATA).hexdigest()),))
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azure(port: int) -> dict[str, Any]:
    endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    account = f"AccountName={ACCOUNT};AccountKey={_KEY};"
    return {"connection_string": f"DefaultEndpointsProtocol=http;{account}{endpoint}"}


def google(port: int) -> dict[str, Any]:
    return {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}


SETTINGS = {"az": azure, "gs": google}


@pytest.fixture(scope="module")
def server() -> Iterator[MemoryStore]:
    with memory_server(BUCKET) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: MemoryStore) -> Iterator[FaultyS3]:
    faulty = FaultyS3(server.server_port)
    yield faulty
    faulty.stop()


@pytest.fixture(params=["az", "gs"])
def store(
    request: pytest.FixtureRequest,
    server: MemoryStore,
    proxy: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, FaultyS3]:
    """Its protocol, and the proxy before it; it holds data/a and the empty data/empty."""
    server.objects.clear()
    server.objects.update({"data/a": DATA, "data/empty": b""})
    proxy.reset()
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)
    pause = timedelta(milliseconds=1)
    monkeypatch.setattr("llmfoundry.data.store_clients._FIRST_PAUSE", pause)
    return request.param, proxy


def options(store: tuple[str, FaultyS3], **how: Any) -> FetchOptions:
    kind, faulty = store
    settings = {kind: SETTINGS[kind](faulty.server.server_port)}
    return FetchOptions(retry=3, timeout=20.0, storage_options=settings, **how)


@pytest.fixture
def folder(store: tuple[str, FaultyS3], tmp_path: Path) -> ShardFolder:
    how = options(store, cache_folder=str(tmp_path))
    return ShardFolder.open(f"{store[0]}://{BUCKET}/data", None, how)


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
    assert time.monotonic() - began < 10


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


def test_a_container_that_is_not_there_is_named(store: tuple[str, FaultyS3]) -> None:
    nobody = Store(f"{store[0]}://nobody/x", options(store), key="save_folder")
    for ask in (nobody.files, lambda: nobody.read("a")):
        with pytest.raises(UserError, match=r"there is no bucket nobody; check its name in save_"):
            ask()


def test_a_runs_files_are_written_listed_and_removed(
    store: tuple[str, FaultyS3], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, faulty = store
    run = Store(f"{kind}://{BUCKET}/run", options(store), key="save_folder")
    assert run.files() == {} and run.size("run.lock") is None
    run.write("run.lock", b"first", new=True)
    with pytest.raises(ExistsError):
        run.write("run.lock", b"second", new=True)
    monkeypatch.setattr("llmfoundry.data.store._PART", 5 << 20)
    (tmp_path / "large").write_bytes(os.urandom(11 << 20))
    faulty.faults["PUT *"] = ("internal", 2)
    run.upload("checkpoints/ba1/x y%", tmp_path / "large")
    run.download("checkpoints/ba1/x y%", tmp_path / "down", 11 << 20)
    assert (tmp_path / "down").read_bytes() == (tmp_path / "large").read_bytes()
    assert run.files() == {"run.lock": 5, "checkpoints/ba1/x y%": 11 << 20}
    assert run.folders("checkpoints") == ["ba1"] and run.names() == ["checkpoints", "run.lock"]
    run.delete(["never there", "checkpoints/ba1/x y%"])
    assert run.files() == {"run.lock": 5}


def test_globs_and_folders_of_a_corpus(store: tuple[str, FaultyS3], server: MemoryStore) -> None:
    server.objects.update({"c/a.txt": b"1", "c/b.txt": b"22", "c/d/a.txt": b"", "c/x": b""})

    def found(path: str) -> tuple[bool, list[str]]:
        single, files = Store(f"{store[0]}://{BUCKET}/{path}", options(store)).find()
        return single, [name.removeprefix(f"{BUCKET}/") for name in files]

    assert found("c/*.txt") == (False, ["c/a.txt", "c/b.txt"])
    assert found("c/**/a.txt") == (False, ["c/a.txt", "c/d/a.txt"])
    assert found("c") == (False, ["c/a.txt", "c/b.txt", "c/d/a.txt", "c/x"])
    assert found("c/a.txt") == (True, ["c/a.txt"])


def test_hidden_objects_are_left_out_unless_they_are_named(
    store: tuple[str, FaultyS3], server: MemoryStore
) -> None:
    names = ("h/a.txt", "h/.b.txt", "h/.c/a.txt", "h/__d/a.txt", "h/__e.txt", "h/f/.c/__d/a.txt")
    server.objects.update({name: b"1" for name in names})

    def found(path: str) -> tuple[list[str], list[str]]:
        base = f"{store[0]}://{BUCKET}/"
        listing = list_url(base + path, options(store))
        files = [file.name.removeprefix(base) for file in listing.files]
        return files, [name.removeprefix(base) for name in listing.hidden]

    assert found("h") == (["h/__e.txt", "h/a.txt"], ["h/.b.txt", "h/.c", "h/__d", "h/f/.c"])
    assert found("h/*.txt") == (["h/__e.txt", "h/a.txt"], ["h/.b.txt"])
    assert found("h/.*") == (["h/.b.txt"], [])
    assert found("h/.c") == (["h/.c/a.txt"], []) and found("h/.b.txt") == (["h/.b.txt"], [])
    assert found("h/f/.c") == ([], ["h/f/.c/__d"])


def test_azure_is_asked_with_the_accounts_key(server: MemoryStore, proxy: FaultyS3) -> None:
    server.logins.clear()
    assert Store(f"az://{BUCKET}/data", options(("az", proxy))).size("empty") == 0
    assert [login.partition(":")[0] for login in server.logins] == [f"SharedKey {ACCOUNT}"]


def test_google_is_asked_with_what_a_service_accounts_key_signs(
    server: MemoryStore, proxy: FaultyS3, tmp_path: Path
) -> None:
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization as form

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    account = {
        "type": "service_account",
        "private_key": pem.decode(),
        "private_key_id": "1",
        "client_email": "me@here",
        "client_id": "2",
    }
    (tmp_path / "key.json").write_text(json.dumps(account))
    server.logins.clear()
    for token in (str(tmp_path / "key.json"), account):
        settings = {"endpoint_url": f"http://127.0.0.1:{proxy.server.server_port}", "token": token}
        how = FetchOptions(retry=0, storage_options={"gs": settings})
        assert Store(f"gs://{BUCKET}/data", how).size("empty") == 0
    assert server.logins and all(login.startswith("Bearer ey") for login in server.logins)


def test_a_login_that_obstore_does_not_know_is_googles_librarys(
    server: MemoryStore, proxy: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = pytest.importorskip("google.auth")

    class Login:
        token, expiry = "", datetime.max

        def refresh(self, _: object) -> None:
            self.token, self.expiry = "mine", datetime.now() + timedelta(days=2)

    monkeypatch.setattr(auth, "load_credentials_from_file", lambda path, scopes: (Login(), "p"))
    (tmp_path / "login.json").write_text('{"type": "external_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "login.json"))
    server.logins.clear()
    settings = {"endpoint_url": f"http://127.0.0.1:{proxy.server.server_port}"}
    how = FetchOptions(retry=0, storage_options={"gs": settings})
    assert Store(f"gs://{BUCKET}/data", how).size("empty") == 0
    assert server.logins == {"Bearer mine"}


@pytest.mark.parametrize(
    ("content", "line"), [(None, "cannot be read: No such file"), ("[]", "is no login of Google's")]
)
def test_a_login_that_is_none_is_not_a_missing_file(
    content: str | None, line: str, tmp_path: Path
) -> None:
    path = tmp_path / "login.json"
    if content is not None:
        path.write_text(content)
    how = FetchOptions(retry=0, storage_options={"gs": {"token": str(path)}})
    with pytest.raises(UserError, match=f"^{path}: {line}") as caught:
        Store(f"gs://{BUCKET}/data", how).read("a")
    assert not isinstance(caught.value, MissingError)

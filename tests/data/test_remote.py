"""Files fetched from a real S3 server through a proxy that fails, and what users are shown."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.data import store_errors
from llmfoundry.data.bucket_settings import _azure, _s3
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.readers import suffix_of
from llmfoundry.data.shard_cache.limits import take_turn
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, FileSpec, ShardFolder
from llmfoundry.data.store import Store
from llmfoundry.data.store_address import Address, address_of, without_signature
from llmfoundry.data.store_clients import client_of
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig
from tests.data.s3_server import ANSWERS, BUCKET, FaultyS3, s3_server

DATA = os.urandom(70_001)
OCI = "https://n.compat.objectstorage.r.oraclecloud.com"
SPEC = FileSpec("a", len(DATA), (("sha1", hashlib.sha1(DATA).hexdigest()),))


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with s3_server() as (faulty, put):
        put("data/a", DATA)
        put("data/empty", b"")
        yield faulty


@pytest.fixture
def s3(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    server.reset()
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)
    monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return server


@pytest.fixture
def folder(s3: FaultyS3, tmp_path: Path) -> ShardFolder:
    options = FetchOptions(cache_folder=str(tmp_path), retry=3, timeout=10.0)
    return ShardFolder.open(f"s3://{BUCKET}/data", None, options)


def test_a_file_is_one_request(s3: FaultyS3, folder: ShardFolder) -> None:
    assert folder.get(SPEC).read_bytes() == DATA
    assert folder.get(SPEC).read_bytes() == DATA
    assert s3.requests == {"data/a": 1}


def test_an_index_is_read_whole_in_parts_of_any_size(
    s3: FaultyS3, folder: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.read("a") == DATA and s3.requests["data/a"] == 1
    assert folder.read("empty") == b""
    for size in (20_000, len(DATA), len(DATA) - 1):
        monkeypatch.setattr("llmfoundry.data.store._PART", size)
        folder.close()
        assert folder.read("a") == DATA
        assert folder.get(FileSpec("empty", 0)).read_bytes() == b""
        folder.get(SPEC).unlink()
    # Parts of 20000: three whole ones and one that ends the file.
    assert s3.requests["data/a"] >= 4


@pytest.mark.parametrize(
    ("fault", "times", "requests"),
    [
        ("slow down", 3, 4),
        ("internal", 2, 3),
        ("too many", 1, 2),
        ("cut", 2, 3),
        ("truncated", 2, 3),  # each resumes where the last one ended
        ("damaged", 1, 2),
        ("silent sender", 2, 3),
    ],
)
def test_what_passes_is_tried_again(
    fault: str, times: int, requests: int, s3: FaultyS3, folder: ShardFolder
) -> None:
    s3.faults["data/a"] = (fault, times)
    assert folder.get(SPEC).read_bytes() == DATA
    assert s3.requests["data/a"] == requests


@pytest.mark.parametrize(
    ("fault", "requests", "line"),
    [
        ("missing", 1, r"is not there; check data\.remote"),
        ("forbidden", 1, r"refused .*, to GetObject; without .* a store .* AWS_ACCESS.*anon: true"),
        (
            "late clock",
            1,
            r"RequestTimeTooSkewed; this machine's clock is wrong by more than 15 min",
        ),
        ("archived", 1, r"InvalidObjectState; it is archived; restore it first"),
        ("expired", 1, r"ExpiredToken; the login has expired; log in again, .* AWS_ACCESS_KEY_ID"),
        ("key off", 1, r"KMS\.Dis.*; its key of AWS KMS cannot be used: ask for .* kms:Decrypt"),
        ("no such key", 1, r"InvalidAccessKeyId; no account of this store has the access key"),
        ("moved", 1, r"the bucket shards is in another region .*\{client_kwargs: \{region_name: …"),
        ("other region", 1, r"the bucket shards is in another region .* AWS_DEFAULT_REGION"),
        (
            "slow down",
            4,
            r"asks for fewer requests .* after 4 attempts; write a data\.requests_per",
        ),
        ("cut", 4, r"body error.* after 4 attempts; .*data\.download_retry"),
        (
            "damaged",
            2,
            r"its sha1 is [0-9a-f]{40}, its index specifies .*fetched again; the file there",
        ),
    ],
)
def test_what_lasts_is_one_line_with_url_cause_and_remedy(
    fault: str, requests: int, line: str, s3: FaultyS3, folder: ShardFolder, tmp_path: Path
) -> None:
    s3.faults["data/a"] = (fault, -1)
    with pytest.raises(UserError, match=f"^s3://{BUCKET}/data/a: .*{line}") as caught:
        folder.get(SPEC)
    assert "\n" not in str(caught.value)
    assert s3.requests["data/a"] == requests
    assert not list(tmp_path.rglob("a*"))


@pytest.mark.parametrize("fault", ["late clock", "expired", "archived", "key off"])
def test_a_refused_head_is_explained_too(fault: str, s3: FaultyS3) -> None:
    """An answer to HEAD has no body; that to a folder's first request decides the message."""
    s3.faults["*"] = (fault, -1)
    with pytest.raises(UserError) as caught:
        Store(f"s3://{BUCKET}/data/a", FetchOptions(retry=1)).find()
    code = ANSWERS[fault][1]
    assert store_errors._ADVICE.get(code, "kms:Decrypt").partition(" {")[0] in str(caught.value)


def test_a_signed_address_is_read_and_its_signature_is_shown_nowhere(
    s3: FaultyS3, tmp_path: Path
) -> None:
    """Each signing makes another address of the same file, and the same text of it."""
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "AKIACANARY", "aws_secret_access_key": "canary"}
    client = boto3.client("s3", endpoint_url=s3.url, region_name="us-east-1", **keys)
    rows = b"".join(json.dumps({"text": f"row {n}"}).encode() + b"\n" for n in range(5))
    client.put_object(Bucket=BUCKET, Key="set/x y.jsonl.gz", Body=gzip.compress(rows))

    def corpus(seconds: int) -> Corpus:
        asked = {"Bucket": BUCKET, "Key": "set/x y.jsonl.gz"}
        url = client.generate_presigned_url("get_object", Params=asked, ExpiresIn=seconds)
        assert "Signature=" in url
        return Corpus(DataConfig(name="files", paths=[url], download_retry=0))

    first, second = corpus(100), corpus(200)
    documents = list(first)
    assert [document.text for document in documents] == [f"row {n}" for n in range(5)]
    assert first.fingerprint() == second.fingerprint()
    assert documents[1].where == f"{s3.url}/{BUCKET}/set/x%20y.jsonl.gz:2"
    assert "?" not in first.files[0].name
    s3.faults["GET *"] = ("forbidden", -1)
    for ask in (lambda: list(second), lambda: corpus(300)):
        with pytest.raises(UserError, match=r"x%20y\.jsonl\.gz: access is refused") as caught:
            ask()
        assert "ignature" not in str(caught.value) and "AKIA" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/a.csv?X-Amz-Credential=a/b&X-Amz-Signature=c", "https://h/a.csv"),
        ("https://h/a.csv?id=7&Expires=1&Signature=c&Key-Pair-Id=k", "https://h/a.csv?id=7"),
        ("https://x.blob.core.windows.net/c/a.csv?sv=1&se=2&sr=b&sp=r&sig=e%3D", None),
        ("https://h/get?se=cond&file=a.csv", "https://h/get?se=cond&file=a.csv"),
        ("s3://b/a?sig=1.csv", "s3://b/a?sig=1.csv"),
    ],
)
def test_what_signs_an_address_is_no_part_of_its_name(url: str, name: str | None) -> None:
    found = without_signature(url)
    assert found == (url.partition("?")[0] if name is None else name)
    assert suffix_of(url) == ".csv"


def test_a_bucket_that_is_not_there_is_named(s3: FaultyS3, tmp_path: Path) -> None:
    folder = ShardFolder.open("s3://nobody/data", None, FetchOptions(cache_folder=str(tmp_path)))
    with pytest.raises(UserError, match=r"/index\.json: there is no bucket nobody; check its name"):
        folder.read("index.json")


def test_a_refused_list_is_called_so(s3: FaultyS3) -> None:
    s3.faults[""] = ("forbidden", -1)
    with pytest.raises(UserError, match="to ListObjectsV2: listing is a permission of its own"):
        Store(f"s3://{BUCKET}/data", FetchOptions(retry=1)).files()


@pytest.mark.parametrize(
    ("n_bytes", "line"),
    [
        (len(DATA) + 1, "ends after 70001 bytes, its index specifies 70002"),
        (len(DATA) - 1, "is longer than the 70000 bytes that its index specifies"),
    ],
)
def test_a_file_of_another_size_is_damaged(n_bytes: int, line: str, folder: ShardFolder) -> None:
    with pytest.raises(UserError, match=line):
        folder.get(FileSpec("a", n_bytes))


def test_a_trickle_is_a_failure_after_the_timeout(s3: FaultyS3, tmp_path: Path) -> None:
    options = FetchOptions(cache_folder=str(tmp_path), retry=1, timeout=0.3)
    folder = ShardFolder.open(f"s3://{BUCKET}/data", None, options)
    s3.faults["data/a"] = ("trickle", -1)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"less than 256 kB of it, within 0\.3 s, after 2 attempts"):
        folder.get(SPEC)
    assert time.monotonic() - began < 5
    s3.faults["data/a"] = ("trickle", 1)
    assert folder.get(SPEC).read_bytes() == DATA


def test_a_signal_is_handled_while_a_store_is_silent(s3: FaultyS3) -> None:
    s3.faults["data/a"] = ("trickle", 1)  # of an hour
    store = Store(f"s3://{BUCKET}/data", FetchOptions(timeout=60.0))

    def end() -> None:
        assert s3.started.wait(240)
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    threading.Thread(target=end, daemon=True).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.read("a")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < 10


def test_a_store_that_is_not_there_is_reported(tmp_path: Path, s3: FaultyS3) -> None:
    nowhere = {"s3": {"endpoint_url": "http://127.0.0.1:9", "key": "id", "secret": "secret"}}
    options = FetchOptions(cache_folder=str(tmp_path), retry=1, storage_options=nowhere)
    folder = ShardFolder.open(f"s3://{BUCKET}/data", None, options)
    with pytest.raises(UserError, match=r"Connection refused.* after 2 attempts"):
        folder.get(SPEC)


def test_a_failed_prefetch_is_raised_by_the_next_get(s3: FaultyS3, folder: ShardFolder) -> None:
    s3.faults["data/a"] = ("missing", 1)
    folder.prefetch(iter([SPEC]))
    threads = folder._this_process().prefetcher
    with threads._changed:
        assert threads._changed.wait_for(lambda: threads._failures, timeout=10)
    with pytest.raises(UserError, match="is not there"):
        folder.get(SPEC)
    assert folder.get(SPEC).read_bytes() == DATA
    folder.close()


class Plain(http.server.SimpleHTTPRequestHandler):
    """Python's web server, which knows no ranges."""

    def log_message(self, *_: object) -> None:
        pass


def test_a_web_server_without_ranges_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/a").write_bytes(DATA)
    handler = partial(Plain, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
        options = FetchOptions(cache_folder=str(tmp_path / "cache"), retry=0)
        url = f"http://127.0.0.1:{web.server_port}"
        assert ShardFolder.open(url, None, options).get(SPEC).read_bytes() == DATA
        monkeypatch.setattr("llmfoundry.data.store._PART", 30_000)
        assert ShardFolder.open(url, None, options).read("a") == DATA
        with pytest.raises(UserError, match=f"^{url}/b: is not there"):
            ShardFolder.open(url, None, options).read("b")
        web.shutdown()


def test_pages_of_a_web_server_are_its_folders(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "deep er").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "deep er/c d.txt", "empty.txt", "x.md"):
        (site / name).write_text("" if "empty" in name else name)
    handler = partial(Plain, directory=str(site.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{web.server_port}/site"

        def found(path: str) -> dict[str, int | None]:
            store = Store(f"{url}{path}", FetchOptions(retry=0))
            return {name.removeprefix(url): e.size for name, e in store.find()[1].items()}

        assert found("/*.txt") == {"/a.txt": 5, "/b.txt": 5, "/empty.txt": 0}
        assert found("/a.txt") == {"/a.txt": 5}
        assert found("").keys() == {
            "/a.txt",
            "/b.txt",
            "/deep%20er/c%20d.txt",
            "/empty.txt",
            "/x.md",
        }
        assert Store(f"{url}/deep er", FetchOptions()).read("c d.txt") == b"deep er/c d.txt"
        with pytest.raises(UserError, match=r"site/none: is not there"):
            found("/none")
        web.shutdown()


@pytest.mark.parametrize("same_host", [True, False])
def test_a_login_is_not_sent_on_to_another_host(same_host: bool, tmp_path: Path) -> None:
    seen: list[str | None] = []

    class Sends(Plain):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            if self.path == "/a":
                host = "127.0.0.1" if same_host else "localhost"
                self.send_response(302)
                self.send_header("Location", f"http://{host}:{web.server_port}/b")
                self.end_headers()
                return
            super().do_GET()

    (tmp_path / "b").write_bytes(b"1")
    handler = partial(Sends, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://user:pa%40ss@127.0.0.1:{web.server_port}"
        assert Store(url, FetchOptions(retry=0)).read("a") == b"1"
        web.shutdown()
    login = "Basic " + base64.b64encode(b"user:pa@ss").decode()
    assert seen == [login, login if same_host else None]


@pytest.mark.parametrize(
    ("url", "protocol", "root", "options"),
    [
        ("s3://b/p", "s3", "b/p", {"endpoint_url": "http://s3"}),
        ("oci://b@n/p", "s3", "b/p", {"endpoint_url": OCI}),
        ("gs://b/p", "s3", "b/p", {"endpoint_url": "https://storage.googleapis.com", "key": "k"}),
        ("hf://datasets/o/d/p", "hf", "datasets/o/d/p", {}),
        ("https://h/p", "https", "https://h/p", {}),
    ],
)
def test_urls_and_llm_foundrys_variables_decide_the_file_system(
    url: str,
    protocol: str,
    root: str,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://s3")
    monkeypatch.setenv("OCI_REGION", "r")
    monkeypatch.setenv("GCS_KEY", "k")
    found = address(url)
    assert (found.protocol, found.root) == (protocol, root)
    assert options.items() <= dict(found.options).items()


def address(url: str, **options: Any) -> Address:
    return address_of(url, FetchOptions(storage_options=options))


def test_storage_options_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a")
    assert address("s3://b").endpoint == "http://a"
    given = {"s3": {"endpoint_url": "http://g"}, "oci": {"namespace": "n", "region": "r"}}
    assert address("s3a://b", **given).endpoint == "http://g"
    assert "//n.compat.objectstorage.r." in address("oci://b", **given).endpoint
    with pytest.raises(UserError, match=r"region is not known; .*oci: \{region: …\}.*OCI_REGION"):
        address("oci://b", oci={"namespace": "n"})


def test_azures_account_is_in_the_environment_or_in_the_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = address("azure://name.blob.core.windows.net/container/p")
    assert (found.protocol, found.root) == ("az", "container/p")
    assert found.options == {"account_name": "name"}
    found = address("abfss://container@name.dfs.core.windows.net/p")
    assert (found.root, found.options) == ("container/p", {"account_name": "name"})
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "other")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "key")
    assert address("az://c/p").options == {"account_name": "other", "account_key": "key"}


def test_fsspecs_words_are_obstores_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    given = {
        "key": "id",
        "secret": "s",
        "endpoint_url": "https://far:9",
        "client_kwargs": {"region_name": "r"},
        "config_kwargs": {"s3": {"addressing_style": "virtual"}},
        "requester_pays": True,
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
        "default_block_size": 5,
    }
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    found = _s3(address("s3://b/p", s3=given))
    assert found.provider is not None
    keys = {"access_key_id": "id", "secret_access_key": "s", "token": None, "expires_at": None}
    assert found.provider() == keys
    assert found.config == {
        "endpoint": "https://b.far:9",
        "region": "r",
        "request_payer": True,
        "server_side_encryption": "AES256",
        "virtual_hosted_style_request": True,
    }
    anonymous = _s3(address("s3://b", s3={"anon": True, "endpoint_url": "http://x"})).config
    assert anonymous["skip_signature"] and "access_key_id" not in anonymous
    text = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=k==;BlobEndpoint=http://h/a;"
    keys = {"account_name": "a", "account_key": "k==", "endpoint": "http://h/a"}
    assert _azure(address("az://c", az={"connection_string": text})).config == keys
    with pytest.raises(UserError, match=r"Configuration key.*nonsense.*storage_options"):
        Store("s3://b", FetchOptions(storage_options={"s3": {**given, "nonsense": 1}})).files()


NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "options", "line"),
    [
        (
            "s3://b",
            {"s3": {"anon": True, "endpoint_url": "u:pw@h:9"}},
            r"s3\.endpoint_url: must be",
        ),
        ("s3://b c", {"s3": {"anon": True, "endpoint_url": NOWHERE}}, "cannot ask this address"),
        ("gs://b", {"gs": {"token": "anon", "requester_pays": True}}, "the project that pays"),
        ("s3://b", {"s3": "anon"}, r"storage_options\.s3: must be a mapping"),
    ],
)
def test_settings_that_cannot_be_asked_with_are_one_line(
    url: str, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as raised:
        Store(url, FetchOptions(storage_options=options, retry=2, timeout=5.0)).files()
    assert "pw" not in str(raised.value)


def test_a_key_of_digits_is_a_key(s3: FaultyS3) -> None:
    login = {"key": 123, "secret": 456, "endpoint_url": s3.url}
    assert Store(f"s3://{BUCKET}/data", FetchOptions(storage_options={"s3": login})).read("a")


def test_keys_of_a_profile_are_those_of_the_aws_library(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = "aws_access_key_id = id\naws_secret_access_key = secret\n"
    (tmp_path / "keys").write_text(f"[mine]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = FetchOptions(storage_options={"s3": {"profile": "mine", "endpoint_url": s3.url}})
    assert Store(f"s3://{BUCKET}/data", options).read("a") == DATA


def test_a_missing_package_is_reported_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UserError, match=r"gs:// needs the package obstore; write: pip .*\[gcs\]"):
        address("gs://b/p")
    with pytest.raises(UserError, match="Protocol not known: nosuch"):
        address("nosuch://b/p")


class HttpError(Exception):
    """As gcsfs' own: its status is `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"error {code}")
        self.code = code


class ReadTimeout(Exception):
    """By its name httpx', which is no TimeoutError."""


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (HttpError(503), True),
        (HttpError(429), True),
        (HttpError(400), False),
        (HttpError(401), False),
        (ReadTimeout(), True),
        (ConnectionResetError(), True),
        (BrokenPipeError(), True),
        (PermissionError(), False),
        (FileNotFoundError(), False),
        (ValueError("what a defect raises"), False),
    ],
)
def test_which_errors_pass(error: Exception, passing: bool) -> None:
    assert store_errors.is_passing(error) == passing
    outer = RuntimeError("a library's own")
    outer.__cause__ = error
    assert store_errors.is_passing(outer) == passing


def test_missing_credentials_are_reported_with_how_to_give_them() -> None:
    botocore = pytest.importorskip("botocore.exceptions")
    line = store_errors.remote_problem(
        botocore.NoCredentialsError(), kind="s3", attempts=1, timeout=1
    )
    assert "Unable to locate credentials; give credentials, AWS_ACCESS_KEY_ID" in line


def test_a_file_system_that_hangs_is_left_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    store = Store("memory://hangs", FetchOptions(retry=0, timeout=0.01))
    files = client_of(store._address)._files
    monkeypatch.setattr(files, "cat_file", lambda *_, **__: release.wait(10) and b"")
    with pytest.raises(UserError, match=r"no answer, or less .* within 0\.01 s"):
        store.part("a", 0, 1)
    release.set()


def test_turns_are_a_share_of_a_second_apart_for_all_who_share_the_file(tmp_path: Path) -> None:
    waits = [take_turn(tmp_path / "rate", per_second=10, mode=0o600) for _ in range(30)]
    # All within moments: the n-th has to wait for n tenths of a second.
    assert all(abs(wait - n / 10) < 0.09 for n, wait in enumerate(waits))


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), 1e300, -1e300, -float("inf")])
def test_a_turn_that_is_no_time_is_now(tmp_path: Path, moment: float) -> None:
    (tmp_path / "rate").write_bytes(struct.pack("<d", moment))
    waits = [take_turn(tmp_path / "rate", per_second=1, mode=0o600) for _ in range(4)]
    assert waits[0] == 0 and 1 < waits[-1] <= 3

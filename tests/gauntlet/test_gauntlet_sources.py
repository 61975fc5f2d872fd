"""Where rows may be: files, globs, gzip, addresses, data sets; and what is said without them."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskConfig
from llmfoundry.gauntlet.task_rows import RowsNotFound, load_rows, read_source
from tests.data.s3_server import BUCKET, s3_server

KIND = "language_modeling"


def lines(*contexts: str) -> str:
    rows = ({"context": text, "continuation": "x"} for text in contexts)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def contexts(folder: Path, uri: str, **keys: Any) -> list[str]:
    rows = load_rows(TaskConfig("t", uri, KIND, [0], **keys), gauntlet_path=folder / "g.yaml")
    return [row.contexts[0] for row in rows]


def problems_of(folder: Path, uri: str, **keys: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        contexts(folder, uri, **keys)
    return error.value.problems


def test_a_file_is_found_beside_the_gauntlet_file_before_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "t.jsonl").write_text(lines("working folder"))
    assert contexts(tmp_path, "t.jsonl") == ["working folder"]
    (tmp_path / "t.jsonl").write_text(lines("beside"))
    assert contexts(tmp_path, "t.jsonl") == ["beside"]
    assert contexts(tmp_path / "nowhere", str(tmp_path / "t.jsonl")) == ["beside"]


def test_llm_foundrys_paths_are_found_below_working_folder_project_and_its_own_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "eval/local_data/world_knowledge/t.jsonl"
    for place in ("scripts", "project", "work"):
        file = tmp_path / place / uri
        file.parent.mkdir(parents=True)
        file.write_text(lines(place))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    gauntlet_folder = tmp_path / "scripts" / "eval" / "yamls"  # as in a clone of LLM Foundry
    assert contexts(gauntlet_folder, uri) == ["scripts"]
    monkeypatch.setattr("llmfoundry.gauntlet.task_rows.ROOT", tmp_path / "project")
    assert contexts(gauntlet_folder, uri) == ["project"]
    monkeypatch.chdir(tmp_path / "work")
    assert contexts(gauntlet_folder, uri) == ["work"]


def test_a_glob_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        (tmp_path / f"{name}.jsonl").write_text(lines(f"{name}1", f"{name}2"))
    (tmp_path / "d.jsonl").mkdir()
    (tmp_path / "e.txt").write_text("no row")
    assert contexts(tmp_path, "*.jsonl") == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert contexts(tmp_path, "[ab].jsonl") == ["a1", "a2", "b1", "b2"]


def test_places_are_file_and_line_with_blank_lines_counted(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n" + lines("a") + "\n" + lines("b") + "\n\n")
    task = TaskConfig("t", "t.jsonl", KIND, [0])
    places = [place for place, _ in read_source(task, gauntlet_path=tmp_path / "g.yaml")]
    assert places == [f"{tmp_path}/t.jsonl:2", f"{tmp_path}/t.jsonl:4"]


def test_gzip_byte_order_mark_and_carriage_returns_make_no_difference(tmp_path: Path) -> None:
    text = "\ufeff" + lines("a", "b").replace("\n", "\r\n")
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert contexts(tmp_path, "t.jsonl.gz") == ["a", "b"]


def test_line_separators_inside_a_text_do_not_end_a_row(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(lines("a\u2028b\x85c"), encoding="utf-8")
    assert contexts(tmp_path, "t.jsonl") == ["a\u2028b\x85c"]


def test_a_missing_file_is_reported_with_the_places_tried_and_how_to_get_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "copa.jsonl").write_text("")
    with pytest.raises(RowsNotFound) as error:
        contexts(tmp_path / "yamls", "coppa.jsonl")
    (reported,) = error.value.problems
    assert "g.yaml: icl_tasks: t: dataset_uri: nothing at coppa.jsonl" in reported
    assert "; did you mean copa.jsonl?" in reported
    assert f"(tried {tmp_path / 'yamls'}, ., " in reported
    assert reported.endswith("python scripts/fetch_eval_data.py")


def test_what_cannot_be_rows_is_reported(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (reported,) = problems_of(tmp_path, "folder")
    assert "folder is a folder; write a file, or a glob: folder/*.jsonl" in reported
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    (reported,) = problems_of(tmp_path, "t.parquet")
    assert f"is no text; write hf://{tmp_path}/t.parquet" in reported
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe{")
    (reported,) = problems_of(tmp_path, "t.jsonl")
    assert f"{tmp_path}/t.jsonl: is not UTF-8 text" in reported
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(lines("a").encode())[:-6])
    (reported,) = problems_of(tmp_path, "t.jsonl.gz")
    assert "t.jsonl.gz: is not complete gzip data" in reported


# ------------------------------------------------------------------ addresses


def test_an_object_store_is_read_like_files(tmp_path: Path) -> None:
    import fsspec

    for name, text in (("b", lines("b1")), ("a", lines("a1", "a2"))):
        fsspec.filesystem("memory").pipe(f"/bucket/{name}.jsonl", text.encode())
    gz = gzip.compress(lines("z").encode())
    fsspec.filesystem("memory").pipe("/bucket/z.jsonl.gz", gz)
    assert contexts(tmp_path, "memory://bucket/b.jsonl") == ["b1"]
    assert contexts(tmp_path, "memory://bucket/*.jsonl") == ["a1", "a2", "b1"]
    assert contexts(tmp_path, "memory://bucket/z.jsonl.gz") == ["z"]
    task = TaskConfig("t", "memory://bucket/b.jsonl", KIND, [0])
    ((place, _),) = read_source(task, gauntlet_path=tmp_path / "g.yaml")
    assert place == "memory://bucket/b.jsonl:1"
    for uri in ("memory://bucket/c.jsonl", "memory://bucket/*.json"):
        with pytest.raises(RowsNotFound, match="icl_tasks: t: dataset_uri: nothing at memory://"):
            contexts(tmp_path, uri)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_web_address_is_read_and_its_absence_is_reported(tmp_path: Path, web: str) -> None:
    (tmp_path / "t.jsonl").write_text(lines("a", "b"))
    assert contexts(tmp_path, f"{web}/t.jsonl") == ["a", "b"]
    with pytest.raises(RowsNotFound, match=r"nothing at http://127\.0\.0\.1:\d+/u\.jsonl"):
        contexts(tmp_path, f"{web}/u.jsonl")


def test_a_network_that_fails_is_reported_with_the_reason(tmp_path: Path) -> None:
    task = TaskConfig("t", "http://127.0.0.1:9/t.jsonl", KIND, [0])  # the discard port: no server
    with pytest.raises(UserError) as error:
        load_rows(task, gauntlet_path=tmp_path / "g.yaml", fetching=FetchOptions(retry=1))
    (reported,) = error.value.problems
    assert "t: dataset_uri: cannot read http://127.0.0.1:9/t.jsonl: " in reported
    assert "onnect" in reported


def test_a_store_is_asked_with_the_runs_credentials_and_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with s3_server() as (s3, put):
        put("rows/a.jsonl", lines("a"))
        put("rows/b.jsonl", lines("b"))
        options = {"s3": {"key": "id", "secret": "secret", "endpoint_url": s3.url}}
        fetching = FetchOptions(storage_options=options, retry=3, timeout=10)

        def read(name: str) -> list[str]:
            task = TaskConfig("t", f"s3://{BUCKET}/rows/{name}", KIND, [0])
            rows = load_rows(task, gauntlet_path=tmp_path / "g.yaml", fetching=fetching)
            return [row.contexts[0] for row in rows]

        s3.faults["rows/a.jsonl"] = ("slow down", 2)
        assert read("a.jsonl") == ["a"]
        s3.faults[""] = ("slow down", 2)  # the listing's
        assert read("*.jsonl") == ["a", "b"] and s3.faults[""] == ("slow down", 0)
        with pytest.raises(RowsNotFound, match=r"nothing at s3://"):
            read("c.jsonl")
        s3.faults["rows/b.jsonl"] = ("forbidden", -1)
        with pytest.raises(UserError, match=r"cannot read .*access is refused"):
            read("b.jsonl")


def test_a_missing_package_and_an_unknown_protocol_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    (reported,) = problems_of(tmp_path, "gs://bucket/t.jsonl")
    assert "cannot read gs://bucket/t.jsonl: gs://bucket: gs:// needs the package" in reported
    assert "llmfoundry-recipes[gcs]" in reported
    (reported,) = problems_of(tmp_path, "s33://bucket/t.jsonl")
    assert "unknown protocol s33; did you mean 's3" in reported
    (reported,) = problems_of(tmp_path, "helout://continuations")
    assert "unknown protocol helout; did you mean 'heldout'?" in reported


# ------------------------------------------------------------------ data sets


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {
        "goal": ["boil", "cut"],
        "year": [1990, 2001],
        "sol1": ["water", "bread"],
        "sol2": ["sand", "sky"],
        "label": [0, 1],
        "names": [["w", "h2o"], ["b"]],
    }
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "test.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def load_set(folder: Path, uri: str, kind: str, **keys: Any) -> list[Any]:
    loading = {"cache_dir": str(folder / "cache"), **keys.pop("hf_loading_vars", {})}
    task = TaskConfig("t", uri, kind, [0], hf_loading_vars=loading, **keys)
    return load_rows(task, gauntlet_path=folder / "g.yaml")


def test_columns_of_a_data_set_become_fields(tmp_path: Path, parquet: Path) -> None:
    texts = {"context": ["goal", "year"], "continuation": ["sol1"]}
    first, second = load_set(tmp_path, f"hf://{parquet}", KIND, hf_parsing_map=texts)
    assert (first.contexts, first.choices) == (("boil 1990",), ("water",))
    assert (second.contexts, second.choices) == (("cut 2001",), ("bread",))
    assert second.place == f"hf://{parquet}:2"

    choice = {"query": ["goal"], "choices": ["sol1", "sol2"], "gold": ["label"]}
    split = {"split": "test"}
    rows = load_set(
        tmp_path, "hf://data", "multiple_choice", hf_parsing_map=choice, hf_loading_vars=split
    )
    assert [(row.choices, row.gold) for row in rows] == [
        (("water", "sand"), 0),
        (("bread", "sky"), 1),
    ]

    answer = {"context": ["goal"], "answer": ["year"], "aliases": ["names"]}
    first, _ = load_set(
        tmp_path, "hf://data", "generation_task_with_answers", hf_parsing_map=answer
    )
    assert first.aliases == ("1990", "w", "h2o")


def test_a_column_that_is_not_there_is_reported_with_those_that_are(
    tmp_path: Path, parquet: Path
) -> None:
    texts = {"context": ["gaol"], "continuation": ["sol1"]}
    with pytest.raises(UserError) as error:
        load_set(tmp_path, f"hf://{parquet}", KIND, hf_parsing_map=texts)
    (reported,) = error.value.problems
    assert "hf_parsing_map.context: no column 'gaol'; did you mean 'goal'?" in reported
    assert "(columns: goal, year, sol1, sol2, label, names)" in reported


def test_the_splits_of_a_data_set_are_reported_where_one_must_be_chosen(
    tmp_path: Path, parquet: Path
) -> None:
    (parquet.parent / "train.parquet").write_bytes(parquet.read_bytes())
    with pytest.raises(UserError, match=r"has the splits train, test; choose one: hf_loading_vars"):
        load_set(tmp_path, "hf://data", KIND)
    with pytest.raises(UserError, match=r"cannot load hf://data: .*dev"):
        load_set(tmp_path, "hf://data", KIND, hf_loading_vars={"split": "dev"})


def test_a_data_set_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"t: dataset_uri: .*hf://no/such-data-set: "):
        load_set(tmp_path, "hf://no/such-data-set", KIND)

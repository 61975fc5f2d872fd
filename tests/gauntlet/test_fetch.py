"""Fetching rows: from a clone and from data sets, stopped and repeated, changed and incomplete."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import GatedRepoError

from llmfoundry.cli.script import run
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.fetch import (
    DataFile,
    FetchError,
    FileProvenance,
    HubSource,
    fetch,
    from_foundry,
    from_hub,
    read_table,
)
from llmfoundry.recipe.before_training import FetchRecipe

Rows = Sequence[dict[str, Any]]

COPA = [
    {"query": "The sun rose, therefore", "choices": ["it was day.", "it was night."], "gold": 0},
    {"query": "It rained, because", "choices": ["it was dry.", "clouds came."], "gold": 1},
]
ARC = [
    {"id": "a", "question": "What is ice?", "answerKey": "B",
     "choices": {"text": ["air", "water", "iron", "salt"], "label": ["A", "B", "C", "D"]}},
    {"id": "b", "question": "What is fog?", "answerKey": "1",
     "choices": {"text": ["water", "air", "iron", "salt"], "label": ["1", "2", "3", "4"]}},
    {"id": "c", "question": "What is dew?", "answerKey": "A",
     "choices": {"text": ["water", "air", "iron"], "label": ["A", "B", "C"]}},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_clone(folder: Path, files: dict[str, Rows]) -> Path:
    (folder / "scripts/eval/local_data/world_knowledge").mkdir(parents=True)
    for name, rows in files.items():
        path = folder / "scripts/eval/local_data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(jsonl(rows))
    return folder


def write_data_set(folder: Path, config: str, split: str, rows: Rows) -> str:
    """A folder that `datasets` loads as it loads a repository of the hub."""
    import datasets

    folder.mkdir()
    datasets.Dataset.from_list(list(rows)).to_parquet(str(folder / f"{split}.parquet"))
    card = {
        "configs": [
            {"config_name": config, "data_files": [{"split": split, "path": f"{split}.parquet"}]}
        ]
    }
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    return str(folder)


def write_table(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"files": list(entries)}))
    return path


def outcomes(output: Path, route: Any, *files: DataFile) -> dict[str, tuple[bool, str]]:
    return {o.file: (o.there, o.line) for o in fetch(files, output=output, route=route)}


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of scripts/fetch_eval_data.py."""
    status = 0
    try:
        run(FetchRecipe, "llmfoundry.cli.commands.fetch_eval_data:fetch_eval_data", argv)
    except SystemExit as stop:
        status = int(str(stop.code))
    out, err = capsys.readouterr()
    return status, out, err


# --- from a clone of LLM Foundry ---------------------------------------------------------------


COPA_FILE = "commonsense_reasoning/copa.jsonl"


def test_a_clone_is_read_in_place_counted_and_entered_with_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = write_clone(tmp_path / "clone", {COPA_FILE: COPA})
    table = write_table(tmp_path / "t.yaml", {"file": COPA_FILE, "rows": 2, "licence": "BSD"})
    argv = [
        "tasks=[copa]",
        f"from_foundry={clone}",
        f"output={tmp_path / 'out'}",
        f"table={table}",
    ]
    status, out, err = command(capsys, *argv)
    assert (status, err) == (0, "")
    assert "2 rows from LLM Foundry; licence: BSD" in out and "1 of 1 files" in out
    linked = tmp_path / "out" / COPA_FILE
    assert linked.readlink() == clone / "scripts/eval/local_data" / COPA_FILE
    assert linked.read_text() == jsonl(COPA)
    entry = json.loads((tmp_path / "out/manifest.json").read_text())["files"][COPA_FILE]
    assert entry == {
        "sha256": hashlib.sha256(linked.read_bytes()).hexdigest(),
        "bytes": linked.stat().st_size,
        "rows": 2,
        "source": "LLM Foundry",
        "licence": "BSD",
    }
    before = linked.lstat().st_mtime_ns
    status, out, _ = command(capsys, *argv)
    assert status == 0 and "2 rows, already there" in out
    assert linked.lstat().st_mtime_ns == before
    clone.rename(tmp_path / "moved")
    status, out, _ = command(capsys, *argv[:1], f"from_foundry={tmp_path / 'moved'}", *argv[2:])
    assert status == 0 and "2 rows from LLM Foundry" in out
    assert linked.read_text() == jsonl(COPA), "linked anew"


def test_what_a_clone_lacks_is_reported_for_each_task_and_the_rest_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = write_clone(tmp_path / "clone", {COPA_FILE: COPA})
    hub = {"id": "aps/x", "split": "test", "mapping": "piqa"}
    table = write_table(
        tmp_path / "t.yaml",
        {"file": COPA_FILE, "rows": 2},
        {"file": "commonsense_reasoning/piqa.jsonl", "rows": 5, "hub": hub},
        {"file": "symbolic_problem_solving/svamp.jsonl", "rows": 5},
    )
    out = tmp_path / "out"
    tasks = "tasks=[copa,piqa,svamp,svamp_cot,siqa]"
    status, reported, err = command(
        capsys, tasks, f"from_foundry={clone}", f"output={out}", f"table={table}"
    )
    assert status == 2 and "1 of 4 files" in reported
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("siqa: commonsense_reasoning/siqa.jsonl: is not in")
    assert lines[1].startswith("piqa: commonsense_reasoning/piqa.jsonl is not in ")
    assert lines[1].endswith("; the hub has it: from_hub=true")
    assert lines[2].startswith("svamp, svamp_cot: symbolic_problem_solving/svamp.jsonl is not")
    assert (out / COPA_FILE).exists()


def test_a_truncated_or_broken_file_of_a_clone_is_refused(tmp_path: Path) -> None:
    clone = write_clone(tmp_path / "clone", {"x/short.jsonl": COPA[:1], "x/good.jsonl": COPA})
    broken = clone / "scripts/eval/local_data/x/broken.jsonl"
    broken.write_text(jsonl(COPA) + '{"query": "cut o')
    names = ["x/short.jsonl", "x/broken.jsonl", "x/good.jsonl"]
    files = [DataFile(name, rows=2) for name in names]
    found = outcomes(tmp_path / "out", from_foundry(clone), *files)
    assert "short.jsonl has 1 rows, not 2; is the clone complete" in found["x/short.jsonl"][1]
    assert "broken.jsonl:3: is not JSON" in found["x/broken.jsonl"][1]
    assert found["x/good.jsonl"][0]
    assert [p.name for p in (tmp_path / "out/x").iterdir()] == ["good.jsonl"]


@pytest.mark.parametrize(
    ("known", "note"),
    [
        ({"bytes": 7}, "bytes, LLM Foundry's file has 7"),
        ({"sha256": "0" * 64}, "not byte for byte LLM Foundry's file"),
        ({"sha256": hashlib.sha256(jsonl(COPA).encode()).hexdigest()}, None),
    ],
)
def test_another_version_of_a_file_is_reported(
    tmp_path: Path, known: dict[str, Any], note: str | None
) -> None:
    clone = write_clone(tmp_path / "clone", {"x/a.jsonl": COPA})
    file = DataFile("x/a.jsonl", rows=2, **known)
    there, line = outcomes(tmp_path / "out", from_foundry(clone), file)["x/a.jsonl"]
    assert there
    assert note in line if note else "LLM Foundry's file" not in line


def test_the_clones_commit_is_the_source(tmp_path: Path) -> None:
    clone = write_clone(tmp_path / "clone", {"x/a.jsonl": COPA})
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    found = outcomes(tmp_path / "out", from_foundry(clone), DataFile("x/a.jsonl", rows=2))
    assert f"from LLM Foundry at {head.stdout[:8]}" in found["x/a.jsonl"][1]


def test_a_folder_that_is_no_clone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no scripts/eval/local_data; write the folder of a cl"):
        from_foundry(tmp_path)


# --- stopping, resuming, noticing changes -------------------------------------------------------


def test_a_stopped_run_is_completed_by_the_next(tmp_path: Path) -> None:
    asked: list[str] = []
    stop_at = ["b.jsonl"]

    def route(file: DataFile, target: Path) -> FileProvenance:
        asked.append(file.file)
        target.write_text(jsonl(COPA[:1]))
        if file.file in stop_at:
            raise KeyboardInterrupt
        target.write_text(jsonl(COPA))
        return FileProvenance("somewhere")

    files = [DataFile(name, rows=2) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    with pytest.raises(KeyboardInterrupt):
        outcomes(tmp_path, route, *files)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "manifest.json"]
    stop_at.clear()
    found = outcomes(tmp_path, route, *files)
    assert asked == ["a.jsonl", "b.jsonl", "b.jsonl", "c.jsonl"]
    assert all(there for there, _ in found.values())
    names = ["a.jsonl", "b.jsonl", "c.jsonl", "manifest.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert (tmp_path / "b.jsonl").read_text() == jsonl(COPA)


def test_a_file_that_changed_or_vanished_is_noticed_and_never_overwritten(tmp_path: Path) -> None:
    clone = write_clone(tmp_path / "clone", {"x/a.jsonl": COPA, "x/b.jsonl": COPA})
    files = [DataFile(name, rows=2) for name in ("x/a.jsonl", "x/b.jsonl")]
    out = tmp_path / "out"
    outcomes(out, from_foundry(clone), *files)
    (out / "x/a.jsonl").write_text(jsonl([COPA[1], COPA[0]]))
    (out / "x/b.jsonl").unlink()
    found = outcomes(out, from_foundry(clone), *files)
    there, line = found["x/a.jsonl"]
    assert not there and "has changed since it was fetched" in line and "remove it" in line
    assert (out / "x/a.jsonl").read_text() == jsonl([COPA[1], COPA[0]])
    assert found["x/b.jsonl"] == (True, found["x/b.jsonl"][1])
    assert (out / "x/b.jsonl").read_text() == jsonl(COPA)


def test_a_file_that_a_user_put_there_is_checked_and_kept(tmp_path: Path) -> None:
    def route(file: DataFile, target: Path) -> FileProvenance:
        raise FetchError("not asked for a file that is there")

    (tmp_path / "a.jsonl").write_text(jsonl(COPA))
    (tmp_path / "b.jsonl").write_text("nothing\n")
    found = outcomes(tmp_path, route, DataFile("a.jsonl", rows=3), DataFile("b.jsonl", rows=1))
    assert found["a.jsonl"] == (True, "2 rows, found in place; LLM Foundry's file has 3 rows")
    assert not found["b.jsonl"][0] and "b.jsonl:1: is not JSON" in found["b.jsonl"][1]


def test_a_spoilt_manifest_is_reported(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"files": {"a": 1}}')
    with pytest.raises(UserError, match=r"manifest\.json: is no manifest .* remove it"):
        outcomes(tmp_path, None)


# --- from data sets of the hub -----------------------------------------------------------------


def test_a_data_set_becomes_rows_with_its_differences_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "world_knowledge/arc_easy.jsonl"
    source = write_data_set(tmp_path / "arc", "ARC-Easy", "test", ARC)
    hub = {"id": source, "config": "ARC-Easy", "split": "test", "mapping": "ai2_arc"}
    entry = {"file": name, "rows": 9, "hub": hub, "differs": "other choices"}
    table = write_table(tmp_path / "t.yaml", entry)
    status, out, _ = command(
        capsys, "tasks=[arc_easy]", "from_hub=true", f"output={tmp_path / 'out'}", f"table={table}"
    )
    assert status == 0
    for note in (
        "2 rows from",
        "LLM Foundry's file has 9 rows",
        "another task version: other choices",
        "1 rows of the source do not fit and were left out",
        "licence: not stated",
    ):
        assert note in out
    rows = [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
    assert rows == [
        {"query": "Question: What is ice?", "choices": ARC[0]["choices"]["text"], "gold": 1},
        {"query": "Question: What is fog?", "choices": ARC[1]["choices"]["text"], "gold": 0},
    ]


def hub_outcome(tmp_path: Path, **changes: Any) -> tuple[bool, str]:
    source = HubSource(**{"id": "someone/x", "split": "test", "mapping": "piqa", **changes})
    file = DataFile("a.jsonl", rows=3, hub=source)
    return outcomes(tmp_path / "out", from_hub(), file)["a.jsonl"]


def test_a_sample_is_drawn_without_repeats_and_always_the_same(tmp_path: Path) -> None:
    rows = [{"goal": f"g{i}", "sol1": "a", "sol2": "b", "label": i % 2} for i in range(50)]
    source = write_data_set(tmp_path / "piqa", "default", "test", rows)
    texts = []
    for folder in ("first", "second"):
        assert hub_outcome(tmp_path / folder, id=source, sample=20)[0]
        texts.append((tmp_path / folder / "out/a.jsonl").read_text())
    assert texts[0] == texts[1]
    queries = [json.loads(line)["query"] for line in texts[0].splitlines()]
    numbers = [int(query.split("g", 1)[1]) for query in queries]
    assert len(numbers) == 20 and numbers == sorted(set(numbers))


def test_a_data_set_with_other_columns_is_reported_by_row_and_column(tmp_path: Path) -> None:
    rows = [{"goal": "g", "solution1": "a", "sol2": "b", "label": 0}]
    source = write_data_set(tmp_path / "piqa", "default", "test", rows)
    there, line = hub_outcome(tmp_path, id=source)
    assert not there
    assert "row 0: KeyError: 'sol1'" in line and "goal, solution1, sol2, label" in line
    there, line = hub_outcome(tmp_path, id=source, split="train")
    assert not there and "train" in line and "\n" not in line


def gated() -> Exception:
    response = httpx.Response(403, request=httpx.Request("GET", "https://example.org"))
    return GatedRepoError("403: access to this data set is restricted", response=response)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (gated(), "someone/x: its terms must be accepted first, at https://hugg"),
        (ConnectionError("name not known"), "someone/x: no network (name not known)"),
        (httpx.ConnectError("name not known"), "someone/x: no network (name not known)"),
        (RuntimeError("Dataset scripts are no longer supported"), "refs/convert/parquet"),
        (ValueError("two\nlines"), "someone/x: ValueError: two lines"),
    ],
)
def test_what_forbids_a_data_set_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reported: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    there, line = hub_outcome(tmp_path)
    assert not there and reported in line and "\n" not in line


def test_licence_and_commit_are_those_of_the_data_sets_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    card = SimpleNamespace(license=["mit", "other"])
    info = SimpleNamespace(sha="0123456789abcdef", card_data=card)
    loaded: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> Rows:
        loaded.update(options)
        return [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    _, line = hub_outcome(tmp_path)
    assert "from someone/x at 01234567" in line and "licence: mit, other" in line
    assert loaded["revision"] == info.sha  # the rows are of the commit whose licence was read


def test_a_file_that_only_llm_foundry_has_is_reported(tmp_path: Path) -> None:
    found = outcomes(tmp_path, from_hub(), DataFile("a.jsonl", rows=1))
    assert found["a.jsonl"] == (
        False,
        "only LLM Foundry's repository has it: from_foundry=PATH",
    )


# --- what is asked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        ([], "from_foundry: write from_foundry=PATH, a clone of LLM Foundry, or from_hub=true"),
        (["from_foundry=x", "from_hub=true"], "or from_hub=true, not both"),
        (["from_hub=true", "tasks=[copa]", "gauntlet=x"], "tasks: has no effect with gauntlet"),
        (["from_hub=true", "tasks=[arc_eazy]"], "tasks: arc_eazy: is not defined in eval/tasks"),
        (["from_hub=true", "table=eval/fetches.yaml"], "did you mean eval/fetch.yaml?"),
        (["from_hub=true", "tasks=[wikiqa_2k]"], "reads hf://mosaicml/long_context_eval; it needs"),
    ],
)
def test_a_mistake_in_the_call_is_reported(
    capsys: pytest.CaptureFixture[str], argv: list[str], reported: str
) -> None:
    status, _, err = command(capsys, *argv)
    assert status == 2 and reported in err


def test_mistakes_in_the_table_are_all_reported(tmp_path: Path) -> None:
    hub = {"id": "x", "split": "test", "mapping": "pica"}
    table = write_table(
        tmp_path / "t.yaml",
        {"file": "a", "row": 1},
        {"file": "b", "rows": "2,000"},
        {"file": "c", "rows": 1, "hub": hub},
        {"file": "c", "rows": 1},
    )
    with pytest.raises(UserError) as error:
        read_table(table)
    lines = error.value.problems
    assert len(lines) == 5  # the first entry has two
    assert "unknown key 'row'; did you mean 'rows'?" in lines[0]
    assert "rows: '2,000' is not an integer" in lines[2]
    assert "'pica' is not a choice; did you mean 'piqa'?" in lines[3]
    assert "c is there before" in lines[4]

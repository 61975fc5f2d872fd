"""Runs on rows of which some cannot be used, as users start them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import run, write_recipe


def recipe_of(folder: Path) -> tuple[str, ...]:
    """tiny.yaml in `folder` on chats of which five cannot be used, as arguments of train.py."""
    rows = [
        {"messages": [{"role": "user", "content": f"count to {n}"},
                      {"role": "assistant", "content": " ".join(map(str, range(n % 9 + 1)))}]}
        for n in range(40)
    ]  # fmt: skip
    lines = [json.dumps(row) for row in rows]
    lines[3] = lines[9] = "not a row"
    for n in (5, 11, 17):
        lines[n] = lines[n].replace('"assistant"', '"bot"')
    (folder / "chats.jsonl").write_text("\n".join(lines))
    data = "data={name: files, paths: [chats.jsonl], format: chat, validation_fraction: 0.2,"
    cache = f"cache_folder: {folder / 'cache'}}}"
    tokenizer = "tokenizer={name: bytes, chat_template: zephyr}"
    return (str(write_recipe(folder)), f"{data} {cache}", tokenizer, "max_duration=1ba")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_rows_end_a_run_with_all_reasons_or_are_events(tmp_path: Path, processes: int) -> None:
    words = recipe_of(tmp_path)
    failed = run("train.py", *words, cwd=tmp_path, processes=processes, status=3 - processes)
    lines = [line for line in failed.stderr.splitlines() if not line.startswith("[rank 1] ")]
    assert [line.split(": ")[0].split("/")[-1] for line in lines if "chats.jsonl:" in line] == [
        "chats.jsonl:6",
        "chats.jsonl:4",
    ]
    head = "data: 5 of 40 rows cannot be used, for 2 reasons; correct them, or leave them out: "
    assert head + "data.supervised.bad_rows: drop" in lines
    dropped = ("data.supervised.bad_rows=drop", "run_name=dropped")
    done = run("train.py", *words, *dropped, cwd=tmp_path, processes=processes)
    assert "data: 3 rows dropped: messages[1].role is 'bot'" in done.stdout
    run("train.py", *words, *dropped, "max_duration=2ba", cwd=tmp_path, processes=processes)
    events = (tmp_path / "runs" / "dropped" / "events.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, events) if event["kind"] == "bad_rows"]
    assert [event["action"] for event in found] == ["drop", "drop"]  # once, though it was resumed
    assert found[0]["what"].endswith("chats.jsonl:6, :12, :18)")
    assert found[1]["what"].startswith("data: 2 rows dropped: not JSON")

"""Supervised rows from files to batches: formats, packing, order, mixtures, and what goes wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from llmfoundry import bounded
from llmfoundry.builders.data import RunData, open_data
from llmfoundry.builders.trainer import build_loader
from llmfoundry.data.batch import TrainingSequence
from llmfoundry.data.held_out import validation_batches
from llmfoundry.data.loader import BatchPrefetcher, Loader
from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.supervised.formats import lacks_argument
from llmfoundry.data.supervised.packed_examples import best_fit, cut_lengths, pack_examples
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.ops.packed_layout import IGNORE
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.data import DataConfig, SupervisedConfig, TokenizerConfig
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.source import StreamConfig
from llmfoundry.recipe.train import TrainRecipe

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def chats(n: int = 60) -> list[dict[str, Any]]:
    return [
        {"messages": [user(f"count to {i % 9}, number {i}"), assistant(f"{i} " * (i % 9 + 1))]}
        for i in range(n)
    ]


def write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def recipe_of(folder: Path, config: dict[str, Any], **more: Any) -> TrainRecipe:
    supervised = SupervisedConfig(**config.pop("supervised", {}))
    data = DataConfig(
        **{"name": "files", "validation_fraction": 0.0, "cache_folder": str(folder / "cache")}
        | config,
        supervised=supervised,
    )
    data.fill()
    problems = [*data.check()]
    if problems:
        raise UserError(*problems)
    return TrainRecipe(**{"max_seq_len": 128, "global_train_batch_size": 4} | more, data=data)


def tokenizer_of(template: str | None = "chatml") -> Tokenizer:
    config = TokenizerConfig(name="bytes", chat_template=template)
    return build_tokenizer(config, DataConfig(), progress=False)


def opened(
    folder: Path, config: dict[str, Any], *, template: str | None = "chatml", **more: Any
) -> RunData:
    return open_data(recipe_of(folder, config, **more), tokenizer_of(template), ALONE)


def rows_of(data: RunData) -> list[TrainingSequence]:
    source = data.streams[0].source  # type: ignore[attr-defined]
    return [source.row(n) for n in range(source.n_rows)]


def learned(rows: list[TrainingSequence]) -> list[str]:
    """What is learned of each document."""
    tokenizer, found = tokenizer_of(), []
    for row in rows:
        begin = 0
        for length in row.lengths:
            part = slice(begin, begin + length)
            assert row.weights is not None
            found.append(tokenizer.decode(row.ids[part][row.weights[part] > 0].tolist()))
            begin += length
    return found


def documents(rows: list[TrainingSequence]) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for row in rows:
        ends = np.cumsum(row.lengths)[:-1]
        found.update(part.tobytes() for part in np.split(row.ids.astype(np.int64), ends))
    return found


# Sources and formats


def test_the_same_rows_from_every_kind_of_file(tmp_path):
    rows = [{"prompt": f"{n}?", "response": f"{n}!"} for n in range(20)]
    lines = "\n".join(map(json.dumps, rows))
    table = io.StringIO()
    writer = csv.DictWriter(table, ["prompt", "response"])
    writer.writeheader()
    writer.writerows(rows)
    write(tmp_path / "jsonl" / "a.jsonl", rows)
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name, text in [("json", json.dumps(rows)), ("lines", lines), ("csv", table.getvalue())]:
        (tmp_path / name).mkdir()
        suffix = "json" if name == "lines" else name
        (tmp_path / name / f"a.{suffix}").write_text(text)
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    (tmp_path / "parquet").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "parquet" / "a.parquet")
    found = {}
    for name in ("jsonl", "gz", "json", "lines", "csv", "parquet"):
        config = {"paths": [str(tmp_path / name)], "format": "prompt_response", "shuffle": False}
        found[name] = learned(rows_of(opened(tmp_path, config)))
    config = {"name": "huggingface", "dataset": str(tmp_path / "jsonl"), "shuffle": False}
    config["format"] = "prompt_response"
    found["huggingface"] = learned(rows_of(opened(tmp_path, config)))
    columns = {"prompt": "str", "response": "str"}
    with MDSWriter(tmp_path / "mds", columns=columns) as shards:
        for row in rows:
            shards.write(row)
    config = {"name": "shards", "local": str(tmp_path / "mds"), "shuffle": False}
    config["format"] = "prompt_response"
    found["mds"] = learned(rows_of(opened(tmp_path, config)))
    expected = sorted(f"{n}!<|endoftext|>" for n in range(20))
    assert all(sorted(texts) == expected for texts in found.values()), found


def test_a_split_conversation_is_counted_once_and_held_out_whole(tmp_path):
    """A template that ends its last turn otherwise: every answer is learned as the last, once."""
    template = write(tmp_path / "t.jinja", [
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last and m.role =="
        " 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ])  # fmt: skip
    rows = [{"messages": [user(f"a{n}"), assistant(f"b{n}"), user("c"), assistant(f"d{n}")]}
            for n in range(40)]  # fmt: skip
    file = write(tmp_path / "rows.jsonl", [*rows, {"messages": rows[0]["messages"][:2]}])
    config = {"format": "chat", "paths": [str(file)], "validation_fraction": 0.3}
    data = opened(tmp_path, config, template=str(template))
    line = "40 rows split into 80, one for each answer, because the chat template renders"
    assert data.summary.count(line) == 1 and f"(the first: {file}:1)" in data.summary
    held = data.validation.texts()
    assert 0 < len(held) < 81 and sum("[assistant]d" in text for text in held) > 0
    for text in held:  # with the other part of its conversation
        if "[assistant]d" in text:
            assert text.partition("[user]c")[0] + "<|endoftext|>" in held
    found = learned(rows_of(data))
    kept = Counter(found) + Counter(t.rpartition("[assistant]")[2] for t in held)
    expected = [f"{letter}{n}<|endoftext|>" for n in range(40) for letter in "bd"]
    assert kept == Counter([*expected, "b0<|endoftext|>"])


def test_columns_and_functions_bring_rows_to_a_format(tmp_path):
    rows = [{"q": f"{n}?", "a": f"{n}!", "id": n} for n in range(4)]
    paths = [str(write(tmp_path / "in" / "a.jsonl", rows))]
    code = "def rename(row):\n    return None if row['id'] == 2 else "
    (tmp_path / "mine.py").write_text(f"{code}{{'prompt': row['q'], 'completion': row['a']}}\n")
    config = {"paths": paths, "format": "prompt_response"}
    by_columns = opened(tmp_path, {**config, "columns": {"prompt": "q", "response": "a"}})
    assert sorted(learned(rows_of(by_columns))) == [f"{n}!<|endoftext|>" for n in range(4)]
    assert "columns not read: id" in by_columns.summary
    function = {"preprocess": f"{tmp_path / 'mine.py'}:rename"}
    by_function = opened(tmp_path, config | function)
    assert sorted(learned(rows_of(by_function))) == [f"{n}!<|endoftext|>" for n in (0, 1, 3)]
    assert "1 row left out by preprocess: dropped (the first: " in by_function.summary
    (tmp_path / "mine.py").write_text(f"{code}{{'prompt': row['q'], 'completion': 'new'}}\n")
    assert set(learned(rows_of(opened(tmp_path, config | function)))) == {"new<|endoftext|>"}


def test_answers_that_are_lists_in_json_are_text(tmp_path):
    answers = ["[]", '[{"name": "Ann", "role": "chair"}]', '[{"content": "x"}]', "[1, 2]"]
    expected = {f"{answer}<|endoftext|>" for answer in answers}
    pairs = [{"prompt": "Who? ", "chosen": answer, "rejected": "No"} for answer in answers]
    path = write(tmp_path / "pairs" / "a.jsonl", pairs)
    found = learned(rows_of(opened(tmp_path, {"paths": [str(path)], "format": "preference"})))
    assert {*found} == expected | {"No<|endoftext|>"}
    rows = [{"prompt": "Who? ", "response": answer} for answer in answers]
    spelled = json.dumps([user("hi"), assistant("yes")])
    rows.append({"prompt": json.dumps([user("hi")]), "response": spelled})
    path = write(tmp_path / "in" / "a.jsonl", rows)
    data = opened(tmp_path, {"paths": [str(path)], "format": "prompt_response"})
    assert {*learned(rows_of(data))} == expected | {f"{spelled}<|endoftext|>"}
    line = "data: 1 row with a text that spells messages in JSON: learned as text; a function that"
    assert line in data.summary
    pairs = [{"prompt": "Chat? ", "chosen": spelled, "rejected": "No"}]
    path = write(tmp_path / "chats" / "a.jsonl", pairs)
    found = learned(rows_of(opened(tmp_path, {"paths": [str(path)], "format": "preference"})))
    assert {*found} == {f"{spelled}<|endoftext|>", "No<|endoftext|>"}
    judged = [{"prompt": "Chat? ", "completion": spelled, "label": True}] * 2
    path = write(tmp_path / "judged" / "a.jsonl", judged)
    found = learned(rows_of(opened(tmp_path, {"paths": [str(path)], "format": "unpaired"})))
    assert {*found} == {f"{spelled}<|endoftext|>"}


def null_rows() -> list[dict[str, Any]]:
    """Calls with an argument that is null, and with other keys than those of the next row."""
    rows = []
    for n, arguments in enumerate(
        [{"city": "Oslo", "unit": None}, {"x": [1, None]}, {"unit": "C"}]
    ):
        function = {"name": "f", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function}
        messages = [user(f"{n}?"), assistant("", tool_calls=[call]), assistant("3", weight=0.5)]
        parameters = {"required": ["city", "unit"][: 2 - n], "default": None}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        rows.append({"messages": messages, "tools": [tool]})
    return rows


def without_null_keys(value: Any) -> Any:
    there = partial(filter, lambda pair: pair[1] is not None)
    return json.loads(json.dumps(value), object_pairs_hook=lambda pairs: dict(there(pairs)))


def test_null_stands_for_a_missing_key_in_a_struct_of_arrow_alone(tmp_path):
    """JSON keeps its nulls: in lines, in text, in Arrow's type for it; so do Arrow's maps."""
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    datasets = pytest.importorskip("datasets")
    rows = null_rows()
    tables = {
        "struct": pa.Table.from_pylist(rows),
        "text": pa.Table.from_pylist([{k: json.dumps(v) for k, v in row.items()} for row in rows]),
    }
    texts = tables["text"].to_pydict()
    tables["json"] = pa.table({k: pa.array(v, pa.json_()) for k, v in texts.items()})
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        parquet.write_table(table, tmp_path / name / "a.parquet")
    write(tmp_path / "lines" / "a.jsonl", rows)
    sources = {name: {"paths": [str(tmp_path / name)]} for name in (*tables, "lines")}
    sources["mixed"] = {"name": "huggingface", "dataset": str(tmp_path / "lines")}
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(tmp_path / "saved")
    sources["saved"] = {"name": "huggingface", "dataset": str(tmp_path / "saved")}
    tokenizer_of("qwen2.5").save(tmp_path / "tokenizer")
    referee = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for name, source in sources.items():
        config = {"format": "chat", "shuffle": False, **source}
        data = opened(tmp_path, config, template="qwen2.5", max_seq_len=2048)
        found = {tokenizer_of("qwen2.5").decode(np.frombuffer(ids, np.int64).tolist())
                 for ids in documents(rows_of(data))}  # fmt: skip
        structs = {"struct": ("messages", "tools"), "lines": (), "text": (), "json": ()}
        in_structs = structs.get(name, ("tools",))
        kept = [{k: without_null_keys(v) if k in in_structs else v for k, v in row.items()}
                for row in rows]  # fmt: skip
        assert found == {referee.apply_chat_template(row["messages"], tools=row["tools"],
                         tokenize=False) for row in kept}, name  # fmt: skip
        lacks = "with a tool call that lacks an argument which its tool requires: learned so;"
        assert (
            f"data: {2 if name == 'struct' else 1} row" in data.summary
        ) and lacks in data.summary


def test_braces_in_a_published_row_stay(tmp_path):
    row = {"instruction": "Fill {input} and {instruction}.", "input": "{x} {}", "output": "o"}
    path = write(tmp_path / "in" / "a.jsonl", [row])
    (row,) = rows_of(opened(tmp_path, {"paths": [str(path)], "format": "alpaca"}, max_seq_len=512))
    text = tokenizer_of().decode(row.ids.tolist())
    assert "### Instruction:\nFill {input} and {instruction}.\n\n### Input:\n{x} {}\n\n" in text


@pytest.mark.parametrize("as_messages", [False, True])
def test_pairs_lie_side_by_side_and_only_their_answers_are_learned(tmp_path, as_messages):
    rows: list[dict[str, Any]] = [
        {"prompt": f"{n}?", "chosen": f"{n}!", "rejected": f"not {n}"} for n in range(9)
    ]
    if as_messages:  # as UltraFeedback has them, and as TRL does
        for row in rows[:4]:
            for name in ("chosen", "rejected"):
                row[name] = [user(row["prompt"]), assistant(row[name])]
        for row in rows[4:]:
            row["prompt"] = [user(row["prompt"])]
            row |= {name: [assistant(row[name])] for name in ("chosen", "rejected")}
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    found = rows_of(opened(tmp_path, {"paths": [path], "format": "preference"}))
    end = "<|im_end|>\n" if as_messages else "<|endoftext|>"
    texts = learned(found)
    sides = [side for row in found for side in row.sides or []]
    assert sides == [1, -1] * 9
    pairs = set(zip(texts[0::2], texts[1::2], strict=True))
    assert pairs == {(f"{n}!{end}", f"not {n}{end}") for n in range(9)}


def test_unpaired_answers_have_the_side_of_their_label(tmp_path):
    rows = [{"prompt": f"{n}?", "completion": f"{n}!", "label": n % 3 == 0} for n in range(9)]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    found = rows_of(opened(tmp_path, {"paths": [path], "format": "unpaired"}))
    sides = [side for row in found for side in row.sides or []]
    expected = {f"{n}!<|endoftext|>": 1 if n % 3 == 0 else -1 for n in range(9)}
    assert dict(zip(learned(found), sides, strict=True)) == expected


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_unpaired_rows_that_are_not_packed_bring_the_one_before_them(tmp_path, held_out):
    """For KTO, whose estimate needs another's answer; none where the row has no room for it."""
    rows = [{"prompt": f"{n}?", "completion": f"{n}!", "label": n % 3 == 0} for n in range(20)]
    rows[4]["completion"] = "x" * 200
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "unpaired", "validation_fraction": held_out}
    data = opened(tmp_path, config | {"supervised": {"packing": "off"}})
    found = rows_of(data)
    if held_out:
        found = [data.validation.row(n, 128) for n in range(data.validation.n_rows(128))]
    own = [row.ids[: row.lengths[0]].tolist() for row in found]
    for n, row in enumerate(found):
        has_room = row.lengths[0] < 127
        assert row.sides is not None and row.sides[0] != 0 and row.sides[1:] == [0] * has_room
        before = own[n - 1][: 128 - len(own[n])]
        assert row.ids[row.lengths[0] :].tolist() == (before if has_room else [])
        assert sum(row.lengths) == len(row.ids) <= 128
    assert len({*map(tuple, own)}) == len(found) >= 5


# Packing


def test_padding_of_realistic_lengths_is_below_one_percent():
    """Log-normal, as instruction sets are: a median of 200 tokens, a long tail, cut at 2,048."""
    sizes = np.exp(np.random.default_rng(0).normal(np.log(200), 1.0, 20_000)).astype(np.int64)
    sizes = np.clip(sizes, 8, 2048)
    members, ends = pack_examples(sizes, 2048, window=8192, packed=True)
    assert sorted(members) == list(range(len(sizes)))
    filled = np.add.reduceat(sizes[members], np.concatenate([[0], ends[:-1]]))
    assert filled.max() <= 2048
    assert 1 - sizes.sum() / (2048 * len(ends)) < 0.01


def test_best_fit_puts_each_size_into_the_fullest_row_that_holds_it():
    def slow(sizes: list[int], room: int) -> list[list[int]]:
        rows: list[list[int]] = []
        for place in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
            free = [(room - sum(sizes[n] for n in row), k) for k, row in enumerate(rows)]
            fits = [(left, k) for left, k in free if left >= sizes[place]]
            if fits:
                rows[min(fits)[1]].append(place)
            else:
                rows.append([place])
        return sorted(sorted(row) for row in rows)

    random = np.random.default_rng(1)
    for _ in range(30):
        sizes = random.integers(1, 40, 50)
        assert best_fit(sizes, 64) == slow(sizes.tolist(), 64)


def test_a_pair_is_cut_to_fit_a_row():
    cut = cut_lengths(np.array([90, 90, 20, 200, 200, 30, 10, 10]), 2, 100)
    assert cut.tolist() == [50, 50, 20, 80, 70, 30, 10, 10]


def test_packing_loses_and_joins_nothing(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(60)))
    config = {"paths": [path], "format": "chat"}
    packed = opened(tmp_path, dict(config), max_seq_len=256)
    alone = opened(tmp_path, config | {"supervised": {"packing": "off"}}, max_seq_len=256)
    assert len(rows_of(alone)) == 60 > 2 * len(rows_of(packed))
    assert documents(rows_of(packed)) == documents(rows_of(alone))
    batch = build(packed, tmp_path, config, max_seq_len=256).batch(0)
    assert batch.layout is not None
    for row in range(4):  # no label lies across the border of two documents
        ends = np.cumsum(batch.layout.lengths[row])[:-1] - 1
        assert (batch.labels[row, ends] == IGNORE).all()
    assert any(len(lengths) > 2 for lengths in batch.layout.lengths)


def test_each_sequence_weighs_one(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(30)))
    config = {"paths": [path], "format": "chat", "supervised": {"loss": "sequences"}}
    for row in rows_of(opened(tmp_path, config)):
        assert row.weights is not None
        sums = np.add.reduceat(row.weights, np.concatenate([[0], np.cumsum(row.lengths)[:-1]]))
        assert sums == pytest.approx(np.ones(len(row.lengths)), abs=1e-6)


# Order, resuming, ranks, mixtures


def build(
    data: RunData, folder: Path, config: dict[str, Any], world: World = ALONE, **more: Any
) -> Loader:
    recipe = recipe_of(folder, dict(config), **more)
    clock = Clock(
        samples_per_batch=4,
        tokens_per_batch=4 * recipe.max_seq_len,
        batches_per_epoch=data.epoch_rows / 4,
        max_duration=Duration.parse("4ep"),
    )
    return build_loader(recipe, data, clock, tokenizer_of(), world)


def test_rows_are_a_pure_function_of_the_seed_on_any_number_of_ranks(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(80)))
    config = {"paths": [path], "format": "chat"}
    data = opened(tmp_path, dict(config))
    whole = build(data, tmp_path, config)
    steps = [whole.rows(step) for step in range(12)]
    again = build(opened(tmp_path / "other", dict(config)), tmp_path / "other", config)
    for step in (11, 3):  # of another cache, and without the steps before
        assert np.array_equal(again.rows(step).ids, steps[step].ids)
    for rank in range(2):
        world = World(rank=rank, size=2, local_rank=rank, device=torch.device("cpu"))
        part = build(data, tmp_path, config, world).rows(5)
        assert np.array_equal(part.ids, steps[5].ids[2 * rank : 2 * rank + 2])
        assert np.array_equal(part.weights, steps[5].weights[2 * rank : 2 * rank + 2])
    resumed = build(data, tmp_path, config)
    resumed.resume(json.loads(json.dumps(whole.state(7))), 7)
    assert np.array_equal(resumed.rows(7).ids, steps[7].ids)
    other = build(opened(tmp_path, dict(config), seed=5), tmp_path, config, seed=5)
    assert not np.array_equal(other.rows(0).ids, steps[0].ids)


def test_a_resumed_run_refuses_other_rows(tmp_path):
    path = write(tmp_path / "in" / "a.jsonl", chats(80))
    config = {"paths": [str(path)], "format": "chat"}
    state = build(opened(tmp_path, dict(config)), tmp_path, config).state(3)
    write(path, chats(81))
    loader = build(opened(tmp_path, dict(config)), tmp_path, config)
    with pytest.raises(UserError, match="data: its rows are not those of the checkpoint"):
        loader.resume(state, 3)


def test_worker_processes_read_the_same_rows(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(40)))
    config = {"paths": [path], "format": "chat"}
    loader = build(opened(tmp_path, dict(config)), tmp_path, config)
    expected = [loader.batch(step) for step in range(3)]
    loader.workers = 1
    batches = BatchPrefetcher(loader, 0)
    try:
        for batch in expected:
            assert torch.equal(next(batches).labels, batch.labels)
    finally:
        batches.close()


def test_supervised_streams_mix_with_each_other_and_with_text(tmp_path):
    write(tmp_path / "chat" / "a.jsonl", chats(200))
    write(tmp_path / "pr" / "a.jsonl", [{"prompt": f"{n}?", "response": "!"} for n in range(99)])
    write(tmp_path / "text" / "a.jsonl", [{"text": f"story {n} " * 40} for n in range(99)])
    streams = {
        "chat": StreamConfig(name="files", paths=[str(tmp_path / "chat")], format="chat"),
        "pr": StreamConfig(name="files", paths=[str(tmp_path / "pr")], format="prompt_response"),
        "text": StreamConfig(name="files", paths=[str(tmp_path / "text")]),
    }
    for stream, part in zip(streams.values(), (2.0, 1.0, 1.0), strict=True):
        stream.proportion = part
    config = {"name": "mixture", "streams": streams, "validation_fraction": 0.1}
    data = opened(tmp_path, dict(config))
    loader = build(data, tmp_path, config)
    assert loader.mixture.consumed(100) == (200, 100, 100)
    sources, _ = loader.mixture.plan(0)
    batch = loader.batch(0)
    for row, source in enumerate(sources.tolist()):
        count = int((batch.labels[row] != IGNORE).sum())
        assert (count == 128) == (source == 2)  # each label of a row of text counts
    assert batch.weights is None  # which is 1 for each
    assert "data.streams.chat:" in data.summary and data.validation.n_rows(128) > 2


@pytest.mark.parametrize("unit", ["tokens", "loss_tokens", "examples"])
def test_proportions_are_shares_of_what_the_recipe_counts(tmp_path: Path, unit: str) -> None:
    """Counted in the batches of a run: three formats, each found by the columns of its file."""
    answers = [{"prompt": f"count {n}", "completion": f"{n} " * 30} for n in range(80)]
    sharegpt = [
        {"conversations": [{"from": "human", "value": "?" * 40}, {"from": "gpt", "value": f"{n}"}]}
        for n in range(150)
    ]
    parts = {"chat": chats(200), "answers": answers, "sharegpt": sharegpt}
    shares = dict(zip(parts, (0.5, 0.3, 0.2), strict=True))
    streams = {
        name: StreamConfig(paths=[str(write(tmp_path / name / "a.jsonl", rows))])
        for name, rows in parts.items()
    }
    for name, stream in streams.items():
        stream.proportion = shares[name]
        stream.settle()
    formats = [stream.format for stream in streams.values()]
    assert formats == ["chat", "prompt_response", "sharegpt"]
    config = {"name": "mixture", "streams": streams, "proportion_unit": unit}
    data = opened(tmp_path, dict(config))
    loader = build(data, tmp_path, config)
    found = dict.fromkeys(parts, 0)
    for step in range(400):
        sources, _ = loader.mixture.plan(step)
        batch = loader.batch(step)
        assert batch.layout is not None
        for row, source in enumerate(sources.tolist()):
            padded = batch.layout.padding[row] if batch.layout.padding else 0
            documents = batch.layout.lengths[row]
            counts = {
                "tokens": batch.tokens.shape[1] - padded,
                "loss_tokens": int((batch.labels[row] != IGNORE).sum()),
                "examples": len(documents) - bool(padded),
            }
            found[list(parts)[source]] += counts[unit]
    total = sum(found.values())
    assert {name: count / total for name, count in found.items()} == pytest.approx(shares, abs=0.02)


def test_examples_of_text_are_refused_as_a_unit(tmp_path: Path) -> None:
    write(tmp_path / "text" / "a.jsonl", [{"text": "story"}])
    stream = StreamConfig(name="files", paths=[str(tmp_path / "text")], proportion=1.0)
    stream.settle()
    config = {"name": "mixture", "streams": {"a": stream}, "proportion_unit": "examples"}
    with pytest.raises(UserError, match=r"data\.streams\.a is text, which has none; write tokens"):
        recipe_of(tmp_path, config)


# Held-out rows


def test_held_out_rows_are_measured_on_what_is_learned(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(100)))
    config = {"paths": [path], "format": "chat", "validation_fraction": 0.2}
    data = opened(tmp_path, dict(config), max_seq_len=256)
    texts = data.validation.texts()
    assert 5 < len(texts) < 40
    inner = documents(rows_of(data))
    assert sum(inner.values()) == 100 - len(texts)
    labels: list[int] = []
    for rank in range(2):
        share = {"data_rank": rank, "data_size": 2}
        for batch in validation_batches(
            data.validation, seq_len=256, batch_size=2, eos_id=256, **share
        ):
            labels += batch.labels[batch.labels != IGNORE].tolist()
    answers = "".join(text.split("assistant\n")[1] for text in texts)
    assert len(labels) == len(tokenizer_of().encode_chat(answers))
    assert Counter(tokenizer_of().decode(labels)) == Counter(answers)
    more = write(tmp_path / "in" / "b.jsonl", chats(150)[100:])
    grown = opened(tmp_path, config | {"paths": [path, str(more)]}, max_seq_len=256)
    assert set(texts) <= set(grown.validation.texts())  # none moved to the other side


def test_held_out_rows_of_their_own(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(30)))
    theirs = str(write(tmp_path / "val" / "a.jsonl", chats(50)[40:]))
    validation = StreamConfig(name="files", paths=[theirs])
    config = {"paths": [path], "format": "chat", "validation": validation}
    data = opened(tmp_path, config | {"validation_fraction": 0.5})
    assert sum(documents(rows_of(data)).values()) == 30
    assert len(data.validation.texts()) == 10
    assert "data.validation: 10 rows of chat" in data.summary


# What is too long, empty, double


def test_what_is_cut_dropped_or_double_is_counted_and_named(tmp_path):
    rows = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": "b"},
        {"prompt": "long", "response": "x" * 200},
        {"prompt": "no answer", "response": ""},
        {"prompt": "y" * 200, "response": "never seen"},
    ]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "prompt_response", "shuffle": False}
    with pytest.raises(UserError, match=r"a.jsonl:5: not one token is learned of its first 128;"):
        opened(tmp_path, dict(config))
    data = opened(tmp_path, config | {"supervised": {"nothing_learned": "drop"}})
    assert sorted(learned(rows_of(data))) == ["b<|endoftext|>"] * 2 + ["x" * 124]
    for line in (
        "data: 1 row repeated: kept (the first: {}:2)",
        "data: 2 rows truncated: to 128 tokens, 77 learned tokens cut off (the first: {}:3)",
        "data: 1 row without a learned token: dropped (the first: {}:5)",
        "data: 1 row empty: dropped (the first: {}:4)",
    ):
        assert line.format(path) in data.summary.splitlines()
    supervised = {"too_long": "drop", "drop_duplicates": True}
    data = opened(tmp_path, config | {"supervised": supervised})
    assert learned(rows_of(data)) == ["b<|endoftext|>"]
    with pytest.raises(UserError, match=r"a.jsonl:3: has 205 tokens, more than max_seq_len: 128"):
        opened(tmp_path, config | {"supervised": {"too_long": "error"}})


def test_messages_that_spell_special_tokens_are_reported(tmp_path):
    rows = [{"messages": [user("say <|im_end|>"), assistant("no")]}, *chats(5)]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    data = opened(tmp_path, {"paths": [path], "format": "chat"})
    line = f"data: 1 row with the text of a special token: read as that token (the first: {path}:1)"
    assert line in data.summary.splitlines()


# The cache


@pytest.mark.slow
def test_a_preparation_that_is_killed_leaves_nothing_that_counts(tmp_path):
    rows = [{"prompt": f"{n}?", "response": f"{n}!"} for n in range(8_000)]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "prompt_response", "num_workers": 1}
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.data.test_supervised import *\n"
        f"opened(Path({str(tmp_path)!r}), {config!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    folder = tmp_path / "cache" / "supervised"
    while not [*folder.glob("*.tmp.*")]:
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert [path for path in folder.iterdir() if path.is_dir()] == [*folder.glob("*.tmp.*")]
    assert sum(documents(rows_of(opened(tmp_path, config, max_seq_len=512))).values()) == 8_000
    assert not [*folder.glob("*.tmp.*")]


def test_the_number_of_processes_changes_nothing(tmp_path):
    rows = [row | {"unread": "x" * 15_000} for row in chats(600)]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))  # more than one part
    config = {"paths": [path], "format": "chat"}
    one = opened(tmp_path / "1", config | {"num_workers": 1}, max_seq_len=512)
    two = opened(tmp_path / "2", config | {"num_workers": 2}, max_seq_len=512)
    sources = [data.streams[0].source for data in (one, two)]  # type: ignore[attr-defined]
    assert sources[0].fingerprint == sources[1].fingerprint
    for source in sources:
        assert [source.store.where(n) for n in (0, 299, 599)] == [
            f"{path}:{n}" for n in (1, 300, 600)
        ]


def test_damage_is_found(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(20)))
    config = {"paths": [path], "format": "chat"}
    opened(tmp_path, dict(config))
    (file,) = (tmp_path / "cache" / "supervised").glob("*/ids.*")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"prepared rows are damaged: tokens are missing; delete"):
        opened(tmp_path, dict(config))


# Bad input: a line each


DEEP: Any = "x"
for _ in range(300):
    DEEP = [{"a": DEEP}]
BAD_CHATS: list[tuple[Any, str]] = [
    ("{bad json", "not JSON"),
    ("[1, 2]", "every line must hold one JSON object"),
    ({"text": "x"}, r"no column 'messages'; it has text; write"),
    ({"messages": "hi"}, "messages holds text, not a list of messages"),
    ({"messages": [user("a")]}, "messages has 1 messages; a conversation has at least two"),
    ({"messages": [user("a"), assistant("b"), user("c")]}, "last message must be the assistant"),
    ({"messages": [user("a"), {"role": "bot", "content": "b"}]}, r"messages\[1\].role is 'bot'"),
    ({"messages": [user("a"), {"role": "assistant"}]}, r"messages\[1\] has no content"),
    ({"messages": [user("a"), {"role": "assistant", "content": 3}]},
     r"messages\[1\].content holds a int, not text"),
    ({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
     r"messages\[0\] has from and value; write data.format=sharegpt"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
     r"no column 'messages'; it has conversations; write data.format=sharegpt, or correct"),
    ({"prompt": "a", "response": "b"}, r"write data.format=prompt_response, or correct the row"),
    ({"chosen": "a", "rejected": "b"}, r"write data.format=preference, or correct the row"),
    ({"messages": [user("a"), assistant("b", weight="x")]}, r"messages\[1\].weight is 'x'"),
    ({"messages": [user("a"), assistant("b", weight=float("nan"))]}, r"weight is nan"),
    ({"messages": [user("a"), assistant("b", weight=10**400)]}, r"weight is 10000.* from 0 to"),
    ({"messages": [{**user("a"), "weight": 1}, assistant("b")]}, r"on a message of user"),
    ({"messages": [user("a"), assistant("b", tool_calls=[{"x": 1}])]}, "names no function"),
    ({"messages": [user("a"), assistant("b")], "tools": "soon"}, "tools holds text"),
    ({"messages": [user("a"), assistant("b")] * 600}, "has 1,200 messages, more than 1,024"),
    ({"messages": [user("a"), assistant("b")], "tools": [{"a": DEEP}]}, "nested in more than 100"),
    ({"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "{x"}])]},
        r"messages\[1\].tool_calls\[0\]: arguments are not JSON: .*; write an object, or a JSON"),
    ({"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])]},
        "arguments spell no JSON object"),
    ({"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments":
        '{"a": "\\ud800"}'}])]}, r"holds half a surrogate pair \(U\+D800\), which is not text"),
    ({"messages": json.dumps([user("a"), assistant("b \udfff")])}, r"surrogate pair \(U\+DFFF\)"),
    ({"messages": [user("a"), assistant("b")], "tools": [{"function": "f"}]},
        r"tools\[0\].function holds text, not a JSON schema"),
    ({"messages": [user("a"), "b"]}, r"messages\[1\] holds text, not an object"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), BAD_CHATS)
def test_a_row_that_is_no_conversation_is_named(tmp_path, row, message):
    path = str(write(tmp_path / "in" / "a.jsonl", [*chats(2), row]))
    with pytest.raises(UserError, match=message) as error:
        opened(tmp_path, {"paths": [path], "format": "chat"})
    assert str(error.value).startswith(f"{path}:3: ") and len(error.value.lines()) == 1


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("prompt_response", {"prompt": "a"}, "no column 'response'"),
        ("prompt_response", {"response": "a"}, "no column 'prompt'"),
        ("prompt_response", {"prompt": "a", "response": "b", "completion": "c"}, "has both"),
        ("prompt_response", {"prompt": 1, "response": "b"}, "prompt holds a int, not text"),
        ("preference", {"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "the same answer"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": "good"}, "label is 'good'"),
        ("alpaca", {"instruction": "a"}, "no column 'output'"),
        ("alpaca", {"instruction": "a", "input": 5, "output": "b"}, "input holds a int, not text"),
        ("dolly", {"instruction": "a", "context": {}, "response": "b"}, "context holds a dict"),
        ("prompt_response", {"prompt": "a", "response": [{"role": "bot", "content": "b"}]},
            "role is 'bot'"),
        ("alpaca", {"text": "no mark"}, "0 times '### Response:', not once"),
        ("sharegpt", {"conversations": [{"from": [1], "value": "a"}] * 2}, r"role is \[1\]"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, r"conversations\[0\] lacks from"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value":
            "b"}]}, "messages ends with user; the last message"),
        ("sharegpt", {"messages": [user("a"), assistant("b")]},
            "no column 'conversations'; it has messages; write data.format=chat, or correct it"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_of_its_format_is_named(tmp_path, form, row, message):
    path = str(write(tmp_path / "in" / "a.jsonl", [row]))
    with pytest.raises(UserError, match=message) as error:
        opened(tmp_path, {"paths": [path], "format": form})
    assert str(error.value).startswith(f"{path}:1: ") and len(error.value.lines()) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(row): raise KeyError('q')", "raised KeyError: 'q'; correct the function"),
        ("def f(row): return 3", "returned int; return a dict with prompt, response, completion"),
        ("def f(row): return {'prompt': 'a', 'answer': 'b'}", "returned the key 'answer'"),
        ("def f(row): return {'prompt': 'a', 'response': None}", "no column 'response'"),
        ("def g(row): return row", "has no function 'f'"),
        ("def f(row) return", "cannot import .*SyntaxError"),
    ],
)
def test_a_function_that_fails_is_a_line(tmp_path, code, message):
    path = str(write(tmp_path / "in" / "a.jsonl", [{"q": 1}]))
    (tmp_path / "mine.py").write_text(code)
    config = {"paths": [path], "format": "prompt_response"}
    with pytest.raises(UserError, match=message) as error:
        opened(tmp_path, config | {"preprocess": f"{tmp_path / 'mine.py'}:f"})
    assert len(error.value.lines()) == 1


def test_a_column_that_no_row_has_is_named_with_its_key(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", [{"prompt": "a", "response": "b"}] * 5))
    config = {"paths": [path], "format": "prompt_response", "columns": {"prompt": "zz"}}
    with pytest.raises(UserError) as error:
        opened(tmp_path, config)
    head, line = error.value.lines()
    assert head.startswith("data: 5 of 5 rows cannot be used; correct them, or leave them out: ")
    assert line == (
        f"{path}:1: no column 'zz', which data.columns.prompt names; it has prompt, response"
        f" (5 rows; also :2, :3 and 2 more)"
    )


MIXED: list[Any] = [
    *chats(4),
    "{bad json",
    {"messages": [user("a"), {"role": "bot", "content": "b"}]},
    {"text": "x"},
    "[1]",
    {"messages": [user("a"), assistant("b"), {"role": "narrator", "content": "c"}]},
    "also bad",
    {"messages": [user("half \ud800 a pair"), assistant("b")]},
    *chats(9)[4:],
    {"prompt": "a", "response": "b"},
]


def mixed_files(folder: Path, kind: str) -> tuple[Path, dict[int, int]]:
    """MIXED in a file, and the place that each line of jsonl has in it, where it can be there."""
    rows, lines = MIXED, [row if isinstance(row, str) else json.dumps(row) for row in MIXED]
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        return folder / "a.jsonl.gz", {n: n for n in range(1, len(lines) + 1)}
    if kind == "jsonl":
        return write(folder / "a.jsonl", rows), {n: n for n in range(1, len(lines) + 1)}
    kept = [n for n, line in enumerate(lines) if line[0] in "{[" and "bad" not in line]
    if kind == "parquet":
        kept = [n for n in kept if line_holds_columns(lines[n])]
        pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        table = [{"messages": None, "text": None, "prompt": None, "response": None} for _ in kept]
        table = [empty | json.loads(lines[n]) for empty, n in zip(table, kept, strict=True)]
        for row in table:
            row["messages"] = row["messages"] and json.dumps(row["messages"])
        parquet.write_table(pyarrow.Table.from_pylist(table), folder / "a.parquet")
        return folder / "a.parquet", {n + 1: k for k, n in enumerate(kept)}  # from 0
    (folder / "a.json").write_text("[" + ",".join(lines[n] for n in kept) + "]")
    return folder / "a.json", {n + 1: k + 1 for k, n in enumerate(kept)}


def line_holds_columns(line: str) -> bool:
    return line[0] == "{" and "ud800" not in line


@pytest.mark.parametrize(
    ("kind", "reasons"), [("jsonl", 5), ("gz", 5), ("json", 4), ("parquet", 2)]
)
def test_one_pass_counts_all_bad_rows_by_reason(tmp_path, kind, reasons):
    path, place = mixed_files(tmp_path / "in", kind)
    config = {"paths": [str(path)], "format": "chat"}
    bad = [n for n in place if not 1 <= n <= 4 and not 12 <= n <= 16]
    with pytest.raises(UserError) as error:
        opened(tmp_path, dict(config))
    head, *lines = error.value.lines()
    assert head == (
        f"data: {len(bad)} of {len(place)} rows cannot be used, for {reasons} reasons; correct"
        " them, or leave them out: data.supervised.bad_rows: drop"
    )
    assert len(lines) == reasons
    for row, text in [(6, "messages[1].role is 'bot'; roles are "), (7, "no column 'messages'; ")]:
        (line,) = [line for line in lines if text in line]
        assert line.startswith(f"{path}:{place[row]}: {text}")
        assert line.endswith(f"(2 rows; also :{place[{6: 9, 7: 17}[row]]})")
    data = opened(tmp_path, config | {"supervised": {"bad_rows": "drop"}}, max_seq_len=512)
    assert sum(documents(rows_of(data)).values()) == 9
    assert len(data.bad_rows) == reasons and {*data.bad_rows} <= {*data.summary.splitlines()}
    assert sum(int(line.split()[1]) for line in data.bad_rows) == len(bad)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("prompt_response", {"prompt": "a", "response": "b"}, {"prompt": "a"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"},
                                        {"from": "gpt", "value": "b"}]}, {"conversations": 3}),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "b"}),
        ("unpaired", {"prompt": "a", "completion": "b", "label": True},
            {"prompt": "a", "completion": "b", "label": "good"}),
        ("alpaca", {"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}),
    ],
)  # fmt: skip
def test_bad_rows_of_every_format_can_be_left_out(tmp_path, form, good, bad):
    path = str(write(tmp_path / "in" / "a.jsonl", [bad, "no", good, bad, *[good] * 3]))
    config = {"paths": [path], "format": form}
    with pytest.raises(UserError) as error:
        opened(tmp_path, dict(config))
    head, line, no_json = error.value.lines()
    assert head.startswith("data: 3 of 7 rows cannot be used, for 2 reasons; ")
    assert line.startswith(f"{path}:1: ") and line.endswith(" (2 rows; also :4)")
    assert no_json.startswith(f"{path}:2: not JSON")
    data = opened(tmp_path, config | {"supervised": {"bad_rows": "drop"}}, max_seq_len=512)
    assert len({*learned(rows_of(data))}) == (2 if form == "preference" else 1)
    dropped = [line.split(":")[1] for line in data.bad_rows]
    assert dropped == [" 2 rows dropped", " 1 row dropped"]


def test_bad_rows_of_several_parts_are_counted_in_order_in_bounded_memory(tmp_path):
    """Two parts; 60,000 bad rows of 50 kinds are 41 lines, and each line's places are the first."""
    rows: list[Any] = []
    for n in range(60_000):
        rows.append({f"column {chr(97 + n % 50 // 26)}{chr(97 + n % 50 % 26)}": "x" * 50, "n": n})
    rows += [row | {"unread": "x" * 15_000} for row in chats(150)]
    path = write(tmp_path / "in" / "a.jsonl", rows)
    assert path.stat().st_size > 4 << 20  # so that it is read in parts
    config = {"paths": [str(path)], "format": "prompt_response", "num_workers": 2}
    function = {"preprocess": f"{tmp_path / 'mine.py'}:f"}
    (tmp_path / "mine.py").write_text(
        "def f(row):\n    if 'messages' in row: return {'prompt': 'a', 'response': str(row)[:50]}\n"
        "    return {next(iter(row)): 'x'}\n"
    )
    with pytest.raises(UserError) as error:
        opened(tmp_path, config | function)
    head, *lines = error.value.lines()
    assert head.startswith("data: 60,000 of 60,150 rows cannot be used, for 41 reasons; ")
    counts = {line.split(":")[1]: line for line in lines}
    assert f"{path}:1: " in counts["1"] and "; also :51, :101 and 1,197 more)" in counts["1"]
    (other,) = [line for line in lines if ": other mistakes (" in line]
    assert other.startswith(f"{path}:")
    dropped = {"supervised": {"bad_rows": "drop"}}
    data = opened(tmp_path, config | function | dropped, max_seq_len=512)
    assert sum(int(line.split()[1].replace(",", "")) for line in data.bad_rows) == 60_000
    assert sum(documents(rows_of(data)).values()) == 150


def test_what_was_prepared_to_drop_bad_rows_is_still_an_error_without(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", [*chats(5), "no"]))
    config = {"paths": [path], "format": "chat"}
    opened(tmp_path, config | {"supervised": {"bad_rows": "drop"}})
    for _ in range(2):
        with pytest.raises(UserError, match=r"a.jsonl:6: not JSON: .*data.supervised.bad_rows"):
            opened(tmp_path, dict(config))


def test_no_row_makes_a_line_endless_or_writes_to_a_terminal(tmp_path):
    rows: list[Any] = [
        {"messages": [user("a"), {"role": "r" * 100_000, "content": "b"}]},
        {"\x1b[2J\nfirst": 1, **{f"column {n}": n for n in range(5_000)}},
        {"messages": [user("a"), assistant("b", **{"k" * 9_000: 1, "\x1b[2J": 2})]},
        *({"messages": [user("a"), assistant(f"{n}", **{f"key{n}": 1})]} for n in range(1_500)),
    ]
    path = str(write(tmp_path / "in" / "a.jsonl", [*rows, *chats(3)]))
    config = {"paths": [path], "format": "chat", "supervised": {"bad_rows": "drop"}}
    data = opened(tmp_path, config)
    lines = data.summary.splitlines()
    assert max(map(len, lines)) < 700 and len(lines) < 30
    assert all(line.isprintable() for line in lines)
    assert "data: 990 other keys of messages not read" in lines  # the first thousand are counted
    facts = json.loads(next((tmp_path / "cache" / "supervised").glob("*/facts.json")).read_text())
    assert len(json.dumps(facts)) < 100_000


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_row_that_is_too_long_is_one_bad_row(tmp_path, suffix):
    """In a file of several parts, read by lines whose places are bytes."""
    good = [{"prompt": f"{n}?", "response": "!", "more": "x" * 4_000} for n in range(1_500)]
    rows = [good[0], {"prompt": "x" * 9_000, "response": "y"}, *good[1:]]
    rows += [{"prompt": "x" * 9_000_000, "response": "y"}, good[0]]
    lines = "\n".join(map(json.dumps, rows)).encode()
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / f"a.{suffix}"
    path.write_bytes(gzip.compress(lines, 1) if suffix.endswith("gz") else lines)
    config = {"paths": [str(path)], "format": "prompt_response", "max_row_size": "8kb"}
    with pytest.raises(UserError) as error:
        opened(tmp_path, dict(config))
    head, line = error.value.lines()
    assert head.startswith("data: 2 of 1,503 rows cannot be used; ")
    assert line.startswith(f"{path}:2: is longer than 8,000 bytes; divide it, or write a larger")
    assert line.endswith("(2 rows; also :1502)")
    data = opened(tmp_path, config | {"supervised": {"bad_rows": "drop"}}, max_seq_len=512)
    assert sum(documents(rows_of(data)).values()) == 1_501


def test_bad_rows_of_all_streams_and_of_validation_are_reported_at_once(tmp_path):
    write(tmp_path / "a" / "a.jsonl", [*chats(20), "no"])
    write(tmp_path / "b" / "b.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "c"}])
    kinds = {"a": ("a", "chat"), "b": ("b", "prompt_response")}
    streams = {
        name: StreamConfig(name="files", paths=[str(tmp_path / at)], format=form, proportion=1.0)
        for name, (at, form) in kinds.items()
    }
    held_out = StreamConfig(name="files", paths=[str(tmp_path / "a")], format="chat")
    with pytest.raises(UserError) as error:
        opened(tmp_path, {"name": "mixture", "streams": streams, "validation": held_out})
    places = [line.split(": ")[0].split("/")[-1] for line in error.value.lines()]
    assert places == ["a.jsonl:21", "b.jsonl:2", "a.jsonl:21"]


def test_bad_rows_alone_leave_nothing_to_learn(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", ["no", '{"a": 1}']))
    with pytest.raises(UserError) as error:
        config = {"paths": [path], "format": "chat", "supervised": {"bad_rows": "drop"}}
        opened(tmp_path, config)
    head, *lines = error.value.lines()
    assert head == "data: no row is left to learn from; dropped: 2 that cannot be used"
    assert [line.split(":")[1] for line in lines] == [" 1 row dropped"] * 2


# Conversations in other orders


def turns_of(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]


ORDERS = [
    ("assistant", "user", "assistant"),
    ("system", "assistant", "user", "assistant"),
    ("user", "user", "assistant"),
    ("user", "assistant", "assistant"),
    ("developer", "user", "assistant"),
    ("user", "system", "assistant"),
]


@pytest.mark.parametrize("template", ["chatml", "llama3", "zephyr", "mpt"])
def test_orders_that_a_template_takes_are_accepted(tmp_path, template):
    rows = [{"messages": turns_of(*roles)} for roles in ORDERS]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "chat", "shuffle": False}
    config["supervised"] = {"packing": "off"}
    found = rows_of(opened(tmp_path, config, template=template, max_seq_len=512))
    tokenizer = tokenizer_of(template)
    for row, roles in zip(found, ORDERS, strict=True):
        text = tokenizer.decode(row.ids.tolist())
        shown = [m | {"role": m["role"].replace("developer", "system")} for m in turns_of(*roles)]
        assert text.removesuffix(tokenizer.eos) == tokenizer.chat.render(shown).removesuffix(
            tokenizer.eos
        )
        answers = [m["content"] for m in shown if m["role"] == "assistant"]
        assert row.weights is not None
        weighed = tokenizer.decode(row.ids[row.weights > 0].tolist())
        assert all(a in weighed for a in answers) and "user" not in weighed


def test_orders_that_a_template_refuses_or_leaves_out_are_named(tmp_path):
    (tmp_path / "alternate.jinja").write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{{ eos_token }}"
        "{% endfor %}"
    )
    (tmp_path / "silent.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }}: "
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "assistant: {% endif %}"
    )
    row = {"messages": turns_of("user", "user", "assistant")}
    path = str(write(tmp_path / "in" / "a.jsonl", [*chats(3), row]))
    config = {"paths": [path], "format": "chat"}
    message = (
        r"a.jsonl:4: messages\[1\] is user after user; the chat template refuses it: roles must"
    )
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config, template=str(tmp_path / "alternate.jinja"))
    row = {"messages": turns_of("user", "system", "assistant")}
    path = str(write(tmp_path / "in" / "b.jsonl", [*chats(3), row]))
    message = r"b.jsonl:4: the chat template leaves out messages\[1\], a message of system; write"
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config | {"paths": [path]}, template=str(tmp_path / "silent.jinja"))


def test_keys_of_messages_that_nothing_reads_are_reported(tmp_path):
    (tmp_path / "named.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m['mood'] }}: {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    row = {"messages": [user("a") | {"mood": "glad"}, assistant("b", wieght=1, id=3)], "n": 1}
    path = str(write(tmp_path / "in" / "a.jsonl", [row, *chats(3)]))
    config = {"paths": [path], "format": "chat"}
    data = opened(tmp_path, dict(config), template=str(tmp_path / "named.jinja"))
    lines = data.summary.splitlines()
    key = "data: a key of messages not read: messages[]"
    assert [line for line in lines if "not read" in line] == [
        "data: columns not read: n",
        f"{key}.id, in 1 row",
        f"{key}.wieght, in 1 row; did you mean 'weight'?",
    ]
    text = "".join(tokenizer_of().decode(row.ids.tolist()) for row in rows_of(data))
    assert "user glad: a<|endoftext|>assistant : b<|endoftext|>" in text


def test_an_empty_answer_of_a_conversation_is_dropped_as_one_of_a_prompt_is(tmp_path):
    call = {"function": {"name": "f", "arguments": {}}}
    rows = [
        {"messages": [user("a"), assistant("")]},
        {"messages": [user("a"), assistant(" \n")]},
        {"messages": [user("a"), assistant(""), user("b"), assistant("c")]},
        {"messages": [user("a"), assistant("", weight=0), user("b"), assistant("history")]},
        {"messages": [user("a"), {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [user("a"), assistant("kept")]},
    ]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "chat", "shuffle": False}
    data = opened(tmp_path, config, max_seq_len=512)
    assert f"data: 3 rows empty: dropped (the first: {path}:1)" in data.summary.splitlines()
    texts = [text.partition("<|im_end|>")[0] for text in learned(rows_of(data))]
    assert len(texts) == 3 and {"history", "kept"} < {*texts}
    config["supervised"] = {"target_responses": "last"}
    assert "data: 2 rows empty: dropped" in opened(tmp_path, config, max_seq_len=512).summary
    pairs = [{"prompt": [user("a")], "chosen": [assistant("x")], "rejected": [assistant("")]}]
    path = str(write(tmp_path / "pairs" / "a.jsonl", [*pairs, *pairs, {"prompt": [user("a")],
        "chosen": [assistant("x")], "rejected": [assistant("y")]}]))  # fmt: skip
    data = opened(tmp_path, {"paths": [path], "format": "preference"})
    assert "data: 2 rows empty: dropped" in data.summary


def test_odd_schemas_of_tools_are_no_reason_to_end():
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ([1], None, "")]
    messages = [assistant("", tool_calls=calls)]
    for parameters in (None, [], {"required": None}, {"required": [["a"], {}, 1]}):
        tools = [{"function": {"name": ["f"]}}, {"name": "f", "parameters": parameters}]
        assert not lacks_argument(messages, tools)
    tools[1]["parameters"] = {"required": ["a"]}
    assert lacks_argument(messages, tools)


def test_an_error_of_a_stream_names_its_key_and_held_out_rows_need_a_measure(tmp_path):
    path = write(tmp_path / "in" / "data.text.jsonl", [{"body": "x"}])
    good = str(write(tmp_path / "good" / "a.jsonl", chats(9)))
    stream = StreamConfig(name="files", paths=[str(path)], format="text")
    config = {"name": "mixture", "streams": {"web": stream}}
    with pytest.raises(UserError) as error:
        opened(tmp_path, config)
    what = "no column 'text'; set data.streams.web.text_column to one of: body"
    assert str(error.value) == f"{path}:1: {what}"
    held_out = StreamConfig(name="files", paths=[str(path)], format="chat")
    config = {"paths": [good], "format": "chat", "validation": held_out}
    data = opened(tmp_path, config, eval=EvalConfig(validation=False))
    assert "data.validation: not read, as eval.validation is false" in data.summary.splitlines()
    with pytest.raises(UserError, match=r"a.text.jsonl:1: no column 'messages'"):
        opened(tmp_path, {**config})


def test_a_tokenizer_without_a_template_is_a_line(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", chats(3)))
    with pytest.raises(
        UserError, match=r"^tokenizer.chat_template: the tokenizer has none"
    ) as error:
        opened(tmp_path, {"paths": [path], "format": "chat"}, template=None)
    assert len(error.value.lines()) == 1


def test_a_template_that_refuses_a_row_names_it(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not bad!') }}"
        "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    rows = [*chats(3), {"messages": [user("bad"), assistant("b")]}]
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "chat"}
    with pytest.raises(UserError, match=r"a.jsonl:4: the chat template refuses it: not bad!"):
        opened(tmp_path, config, template=str(tmp_path / "t.jinja"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"columns": {"promt": "q"}}, r"data.columns.promt: rows of prompt_response have prompt"),
        ({"preprocess": "mine"}, "data.preprocess: mine; write module:function"),
        ({"preprocess": "no_such_module:f"}, "data.preprocess: cannot import 'no_such_module'"),
        ({"text_column": "x"}, "data.text_column: has no effect with data.format: prompt_resp"),
        ({"attend_across_documents": True}, "data.attend_across_documents: true lets answers see"),
        ({"deduplicate": "exact"}, "data.deduplicate: has no effect on supervised rows"),
        ({"format": "text", "supervised": {"loss": "sequences"}}, "data.supervised: has no effect"),
        ({"format": "alpacca"}, "data.format: 'alpacca' is not a choice; did you mean 'alpaca'"),
        (
            {"format": "preference", "supervised": {"target_responses": "last"}},
            "last has no effect",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_a_line(tmp_path, config, message):
    path = str(write(tmp_path / "in" / "a.jsonl", [{"prompt": "a", "response": "b"}]))
    with pytest.raises(UserError, match=message) as error:
        opened(tmp_path, {"paths": [path], "format": "prompt_response"} | config)
    assert len(error.value.lines()) == 1
    assert not [*tmp_path.glob("cache/supervised/*/facts.json")]


def test_no_rows_are_a_line(tmp_path):
    path = str(write(tmp_path / "in" / "a.jsonl", ["", "  "]))
    with pytest.raises(UserError, match="data: no row is left to learn from; the source has no"):
        opened(tmp_path, {"paths": [path], "format": "chat"})


@pytest.mark.parametrize("n", [1, 9])
def test_copies_of_one_row_are_all_trained_on(tmp_path, n):
    rows = [{"prompt": "count", "response": "to one"}] * n
    path = str(write(tmp_path / "in" / "a.jsonl", rows))
    config = {"paths": [path], "format": "prompt_response", "validation_fraction": 0.5}
    data = opened(tmp_path, config)
    assert data.validation.n_rows(64, partial=True) == 0 and not data.validation_texts()
    assert f"data: {n} row" in data.summary and "held out: 0 rows" in data.summary


@pytest.mark.parametrize("bad_rows", ["error", "drop"])
def test_a_row_that_a_template_does_not_end_with_is_named_and_ends_the_run(
    bad_rows, tmp_path, monkeypatch
):
    """It is the template's fault, so the row is not one of those that may be dropped."""
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.3)
    (tmp_path / "slow.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% if 'number 19' in m.content %}"
        "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    path = str(write(tmp_path / "in" / "a.jsonl", chats(30)))
    config = {"paths": [path], "format": "chat", "supervised": {"bad_rows": bad_rows}}
    with pytest.raises(UserError, match=r"slow.jinja: took more than .*a.jsonl:20\)$"):
        opened(tmp_path, config, template=str(tmp_path / "slow.jinja"))

"""Tasks, parts and processes: the output against that of one process, and against plain Python."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmfoundry.data.preparation import partition
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.input_files import InputRange
from llmfoundry.data.preparation.output_folder import OutputFolder
from llmfoundry.data.preparation.partition import content_hash, cut_tasks
from llmfoundry.data.preparation.prepare import ExecutionOptions, prepare_corpus, prepare_to
from llmfoundry.data.preparation.write_part import WORK, PartSettings, make_part, token_output
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer(bytes_backend(), END_OF_TEXT)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_SMALLEST", 2000)


def documents(n: int = 200) -> list[str]:
    rng = random.Random(0)
    return [f"document {k} " + "wörter\n" * rng.randrange(12) for k in range(n)]


def write_all(folder: Path) -> list[str]:
    """Files of every kind; their documents in order."""
    folder.mkdir(exist_ok=True)
    texts = documents(400)
    rows = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join(rows[:150]), encoding="utf-8")
    for n in range(150, 200):
        (folder / f"b{n}.txt").write_text(texts[n], encoding="utf-8")
    table = pa.table({"text": texts[200:350]})
    pq.write_table(table, folder / "c.parquet", row_group_size=7)
    (folder / "d.jsonl").write_text("\n".join(rows[350:]) + "\n", encoding="utf-8")
    return texts


def config_of(folder: Path, **fields: object) -> DataConfig:
    written = {"name": "files", "paths": [str(folder)], "validation_fraction": 0.1, **fields}
    return DataConfig(cache_folder=str(folder.parent / "cache"), **written)  # type: ignore[arg-type]


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run(folder: Path, data: Path, tokenizer: Tokenizer, *, workers: int = 1) -> dict[str, bytes]:
    prepare_to(
        OutputFolder(str(folder)),
        config_of(data),
        tokenizer,
        output=token_output(tokenizer),
        execution=ExecutionOptions(workers),
        about={},
    )
    return everything(folder)


@pytest.mark.parametrize("longest", [None, 1, 13, 100, 1000, 10**6])
def test_spans_read_by_themselves_are_the_corpus(tmp_path: Path, longest: int | None) -> None:
    texts = write_all(tmp_path / "data")
    corpus = Corpus(config_of(tmp_path / "data"))
    spans = corpus.spans(longest)
    assert [d.text for span in spans for d in corpus.read(span)] == texts
    assert sum(span.n_bytes or 0 for span in spans) == sum(file.size for file in corpus.files)
    wheres = [d.where for span in corpus.spans(None) for d in corpus.read(span)]
    assert [d.where for span in spans for d in corpus.read(span)] == wheres


@pytest.mark.parametrize("column", ["text", "text,"])
def test_a_part_is_read_without_what_is_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """What a message says of a row's place costs a reading of the file: only errors may ask."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents(50))
    (tmp_path / "a.jsonl").write_text(rows)
    corpus = Corpus(config_of(tmp_path / "a.jsonl", text_column=column))
    monkeypatch.setattr(
        InputRange, "lines_before", lambda _: pytest.fail("read from its beginning")
    )
    assert len(corpus.spans(300)) > 5
    assert len([d.text for span in corpus.spans(300) for d in corpus.read(span)]) == 50


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n"])
def test_lines_are_cut_wherever_they_end(tmp_path: Path, ending: str) -> None:
    rows = [json.dumps({"text": "x" * n}) for n in (1, 0, 40, 2, 3)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text(ending.join(rows), newline="")
    corpus = Corpus(config_of(tmp_path / "data"))
    whole = [(d.where, d.text) for d in corpus.read(corpus.spans()[0])]
    for longest in range(1, 60):
        spans = corpus.spans(longest)
        assert [(d.where, d.text) for s in spans for d in corpus.read(s)] == whole


def test_a_wrong_row_is_named_by_its_line_in_the_file(tmp_path: Path, plain: Tokenizer) -> None:
    write_all(tmp_path / "data")
    file = tmp_path / "data/a.jsonl"
    lines = file.read_text().split("\n")
    lines[120] = '{"text": 3}'
    file.write_text("\n".join(lines))
    corpus = Corpus(config_of(tmp_path / "data"))
    with pytest.raises(UserError, match=r"a\.jsonl:121: 'text' holds a value of type int"):
        for span in corpus.spans(1000):
            list(corpus.read(span))


@pytest.mark.usefixtures("small_tasks")
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, plain: Tokenizer) -> None:
    texts = write_all(tmp_path / "data")
    assert len(cut_tasks(Corpus(config_of(tmp_path / "data")))) > 5
    one = run(tmp_path / "one", tmp_path / "data", plain)
    three = run(tmp_path / "three", tmp_path / "data", plain, workers=3)
    assert one == three
    assert not [name for name in one if WORK in name or "scratch" in name]
    train = prepare_corpus(config_of(tmp_path / "data"), plain, progress=False).train
    bound = int(0.1 * 2**64)
    kept = [text for text in texts if content_hash(text) >= bound]
    expected = [token for text in kept for token in [256, *text.encode()]]
    assert train.row(0, train.n_tokens - 1)[0].tolist() == expected


@pytest.mark.usefixtures("small_tasks")
def test_an_error_in_a_process_is_the_line_and_finished_parts_stay(
    tmp_path: Path, plain: Tokenizer
) -> None:
    write_all(tmp_path / "data")
    whole = run(tmp_path / "whole", tmp_path / "data", plain)
    last = tmp_path / "data/d.jsonl"
    good, times = last.read_bytes(), last.stat()
    last.write_bytes(good[:-3] + b"\n")
    with pytest.raises(UserError, match=r"d\.jsonl:50: not JSON"):
        run(tmp_path / "out", tmp_path / "data", plain, workers=2)
    finished = list((tmp_path / "out" / WORK).glob("part-*.json"))
    last.write_bytes(good)
    os.utime(last, ns=(times.st_atime_ns, times.st_mtime_ns))
    made: list[str] = []

    def spy(job: PartSettings, task: partition.PartitionTask, *rest: object) -> object:
        made.append(task.part)
        return make_part(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmfoundry.data.preparation.prepare.make_part", spy)
        assert run(tmp_path / "out", tmp_path / "data", plain) == whole
    assert 0 < len(made) < 5 < len(finished)  # those of the corrected file


_SCRIPT = """
import sys
from llmfoundry.data.preparation import partition
partition._SMALLEST = 2000
sys.path.insert(0, sys.argv[3])
from test_prepare_parts import Tokenizer, bytes_backend, END_OF_TEXT, run
from pathlib import Path
if __name__ == "__main__":
    import llmfoundry.data.preparation.write_part as parts
    write = parts.OutputFolder.write
    def slow(place, name, data):
        write(place, name, data)
        if name.endswith("00002.json"):
            print("third", flush=True)
            sys.stdin.read()
    parts.OutputFolder.write = slow
    run(Path(sys.argv[1]), Path(sys.argv[2]), Tokenizer(bytes_backend(), END_OF_TEXT))
"""


@pytest.mark.usefixtures("small_tasks")
def test_after_a_kill_finished_parts_stay_and_the_output_is_the_same(
    tmp_path: Path, plain: Tokenizer
) -> None:
    write_all(tmp_path / "data")
    whole = run(tmp_path / "whole", tmp_path / "data", plain)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    words = [sys.executable, script, tmp_path / "out", tmp_path / "data", Path(__file__).parent]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"third\n"
        process.send_signal(signal.SIGKILL)
    finished = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out" / WORK).glob("part-*.json")
    }
    assert len(finished) == 3
    shard = next((tmp_path / "out/train/part-00000").iterdir())
    before = shard.stat().st_mtime_ns
    assert run(tmp_path / "out", tmp_path / "data", plain) == whole
    assert shard.stat().st_mtime_ns == before


@pytest.mark.usefixtures("small_tasks")
def test_a_killed_cache_is_gone_on_with(tmp_path: Path, plain: Tokenizer) -> None:
    write_all(tmp_path / "data")
    config = config_of(tmp_path / "data", num_workers=1)
    whole = prepare_corpus(config, plain, progress=False)
    (made,) = (path for path in (tmp_path / "cache/tokens").iterdir() if path.is_dir())
    files = everything(made)
    made.rename(made.with_name("aside"))
    stopped: list[int] = []

    def stop(job: PartSettings, task: partition.PartitionTask, *rest: object) -> object:
        if task.number == 3:
            raise KeyboardInterrupt
        stopped.append(task.number)
        return make_part(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmfoundry.data.preparation.prepare.make_part", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(config, plain, progress=False)
    (left,) = (tmp_path / "cache/tokens").glob("*.tmp.*")
    assert len(list((left / WORK).glob("part-*.json"))) == len(stopped) == 3
    left.rename(left.with_name(left.name.rpartition(".")[0] + ".1"))  # another process' number
    assert (
        prepare_corpus(config, plain, progress=False).train.fingerprint == whole.train.fingerprint
    )
    assert everything(made) == files
    assert not list((tmp_path / "cache/tokens").glob("*.tmp.*"))


def test_a_worker_ends_when_the_main_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from llmfoundry.data.preparation.engines import local_engine\n"
        "def work(task):\n"
        "    if task: print('begun', flush=True)\n"
        "    time.sleep(60 * task)\n"
        "if __name__ == '__main__':\n"
        "    with local_engine(2) as run:\n"
        "        list(run(work, [0, 1]))\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGKILL)
        # The pipe's end is the worker's too: it is closed when both are gone.
        began = time.monotonic()
        process.stdout.read()
    assert time.monotonic() - began < 30


def test_what_workers_import_is_light() -> None:
    script = "import sys, llmfoundry.data.preparation.write_part as _;"
    script += " print({'torch', 'datasets'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", script]) == b"set()\n"

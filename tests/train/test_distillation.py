"""`loss=distill` in whole runs: what a teacher stores, and what a student learns from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from llmfoundry.builders import teacher as writing
from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.builders.data import RunData, open_data
from llmfoundry.builders.teacher import with_teacher
from llmfoundry.builders.tokenizer import make_tokenizer
from llmfoundry.cli.commands.prepare_data import prepare_data
from llmfoundry.data.sources import OrderedStream, tokens_left_out
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.plan.memory import estimate
from llmfoundry.recipe.before_training import PrepareRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from tests.tiny import write_recipe
from tests.train.here import rows, train_here
from tests.train.test_finetune_class import write_class

K = 20
DISTILL = ("loss=distill", "max_duration=4ba", "eval_interval=4ba", "save_interval=0ba")
KL, CROSS_ENTROPY = "loss/train/kl", "loss/train/cross_entropy"
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a" * n}]}
    for n in range(1, 30)
]


def prepare(*overrides: str, top_k: int = K, teacher: str = "runs/teacher") -> None:
    """Run scripts/prepare_data.py tiny.yaml teacher=… in this process."""
    asked = (f"teacher={teacher}", f"top_k={top_k}", *overrides)
    prepare_data(checked(PrepareRecipe, "tiny.yaml", asked).resolve())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/teacher, whose tokens are stored in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("distillation")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("teacher", "max_duration=8ba", "model.vocab_size=300")
        prepare()
        yield folder


@pytest.fixture
def own_cache(folder: Path, tmp_path: Path) -> str:
    """A copy of the cache, to be changed."""
    shutil.copytree(folder / "cache", tmp_path / "cache")
    return f"data.cache_folder={tmp_path / 'cache'}"


def opened(*overrides: str) -> tuple[ResolvedTrainRecipe, RunData]:
    """The data of a run with a teacher."""
    recipe = checked(TrainRecipe, "tiny.yaml", ["loss=distill", *overrides]).resolve()
    tokenizer = make_tokenizer(recipe, ALONE)
    return recipe, with_teacher(open_data(recipe, tokenizer, ALONE), recipe, tokenizer, ALONE)


def source_of(data: RunData, n: int = 0) -> Any:
    """A stream's source with its teacher."""
    stream = data.streams[n]
    assert isinstance(stream, OrderedStream)
    return stream.source


@torch.no_grad()
def log_probs_of(run: str, documents: list[np.ndarray]) -> torch.Tensor:
    """Log-probabilities (n, V) after each token, of documents that are read one by one."""
    loaded = load_checkpoint(run, ALONE, note=lambda line: None)
    model = loaded.root.model.eval()
    parts = []
    for ids in documents:
        hidden, _ = model.run(torch.from_numpy(ids.astype(np.int64))[None], None)
        parts.append(model.head(hidden)[0].double().log_softmax(-1))
    return torch.cat(parts)


def test_stored_tokens_are_the_teachers_of_the_next_token(folder: Path) -> None:
    """Of packed documents, each read alone by another path; ids of padding are left out."""
    recipe, data = opened()
    source = source_of(data)
    for row in range(min(6, source.n_rows)):
        sequence = source.row(row)
        ids, log_probs = sequence.teacher
        n = sum(sequence.lengths)
        assert ids.shape == log_probs.shape == (len(sequence.ids) - 1, K)
        assert ids.dtype == np.uint16 and log_probs.dtype == np.float16
        documents = np.split(sequence.ids[:n], np.cumsum(sequence.lengths)[:-1])
        full = log_probs_of("runs/teacher", documents)
        vocabulary = make_tokenizer(recipe, ALONE).vocab_size
        assert full.shape == (n, 300) and vocabulary < 300
        right = full[:, :vocabulary].topk(K).values
        at_ids = full.gather(1, torch.from_numpy(ids.astype(np.int64)))
        torch.testing.assert_close(at_ids, right, rtol=0, atol=1e-5)
        stored = torch.tensor(log_probs).double()
        torch.testing.assert_close(stored, right, rtol=1e-3, atol=1e-4)


def test_tokens_that_no_sequence_has_are_counted_as_without_a_teacher(folder: Path) -> None:
    _, data = opened("max_seq_len=31")
    assert tokens_left_out(data.streams) == source_of(data).source.tokens_left_out > 0


def test_other_sequence_lengths_read_the_same_positions(folder: Path) -> None:
    """A stream of tokens has one row for each position, however it is split."""
    every = []
    for length in (64, 40, 128):
        _, data = opened(f"max_seq_len={length}")
        source = source_of(data)
        parts = [source.row(row).teacher for row in range(source.n_rows)]
        every.append([np.concatenate(columns) for columns in zip(*parts, strict=True)])
    for ids, log_probs in every[1:]:
        n = min(len(ids), len(every[0][0]))
        assert n > 1000
        assert np.array_equal(ids[:n], every[0][0][:n])
        assert np.array_equal(log_probs[:n], every[0][1][:n])


def test_a_student_with_the_teachers_weights_has_nothing_to_learn(
    folder: Path, tmp_path: Path
) -> None:
    """With all tokens of the vocabulary the divergence is that of fp16, forward and reverse."""
    cache = f"data.cache_folder={tmp_path / 'cache'}"
    train_here("unpadded", "max_duration=2ba", "model.vocab_size=257")
    prepare(cache, top_k=257, teacher="runs/unpadded")
    for divergence in ("forward", "reverse"):
        run = train_here(
            f"same-{divergence}",
            *DISTILL,
            cache,
            "max_duration=1ba",
            "eval_interval=1ba",
            "model.vocab_size=257",
            f"loss.divergence={divergence}",
            "load_path=runs/unpadded",
            "load_weights_only=true",
            "optimizer.lr=1e-9",
            "log_interval=1ba",
        )
        logged = rows(run, KL)[1]
        assert abs(logged[KL]) < 2e-3
        assert logged[CROSS_ENTROPY] > 1
        assert logged["loss/train/total"] == pytest.approx(
            0.5 * logged[KL] + 0.5 * logged[CROSS_ENTROPY], rel=1e-5
        )
        assert abs(rows(run, "loss/eval/kl")[1]["loss/eval/kl"]) < 2e-3


def test_losses_do_not_depend_on_the_microbatch(folder: Path) -> None:
    """Nor on the worker processes that read the rows."""
    settings = (*DISTILL, "log_interval=1ba", "loss.temperature=2", "loss.divergence=symmetric")
    one = train_here("one", *settings, "device_train_microbatch_size=1")
    four = train_here("four", *settings, "device_train_microbatch_size=4", "data.loader_workers=2")
    for name in (KL, CROSS_ENTROPY, "loss/train/total"):
        mine, theirs = rows(one, name), rows(four, name)
        assert sorted(mine) == [1, 2, 3, 4]
        for batch, row in mine.items():
            assert row[name] == pytest.approx(theirs[batch][name], rel=1e-5)
    measured = "metrics/eval/LanguageCrossEntropy"
    assert rows(one, measured)[4][measured] == pytest.approx(rows(four, measured)[4][measured])


def test_the_divergence_falls_and_a_stopped_run_continues_with_the_same_losses(
    folder: Path,
) -> None:
    settings = ("loss=distill", "log_interval=1ba", "eval_interval=0ba", "max_duration=8ba")
    whole = rows(train_here("whole", *settings), KL)
    assert whole[8][KL] < whole[1][KL] - 0.2
    train_here("parts", *settings, "pause_at=4ba", "save_interval=4ba")
    again = rows(train_here("parts", *settings, "save_interval=4ba"), KL)
    assert {n: row[KL] for n, row in again.items()} == {n: row[KL] for n, row in whole.items()}


def files_of(place: Path) -> dict[str, bytes]:
    """The contents of all files below a folder, but for locks."""
    paths = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


def test_a_killed_preparation_continues_and_its_files_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PART_BYTES", 1 << 17)
    made: list[int] = []
    write = writing._write_part

    def stopping(writer: Any, number: int, span: range) -> None:
        if len(made) == limit:
            raise KeyboardInterrupt
        made.append(number)
        write(writer, number, span)

    monkeypatch.setattr(writing, "_write_part", stopping)
    whole, parts = (f"data.cache_folder={tmp_path / name}" for name in ("whole", "parts"))
    limit = 1000
    prepare(whole)
    n_parts = len(made)
    assert n_parts > 4
    made.clear()
    limit = 2
    with pytest.raises(KeyboardInterrupt):
        prepare(parts)
    (teacher,) = (tmp_path / "parts").glob("tokens/*/train/teacher")
    assert not (teacher / "index.json").exists()
    (teacher / ".parts" / "scratch-left").mkdir()  # as a killed process leaves it
    with pytest.raises(UserError, match="has no teacher for loss=distill"):
        opened(parts)
    limit = 1000
    prepare(parts)
    assert len(made) == n_parts
    assert not (teacher / ".parts" / "scratch-left").exists()
    teacher = next((tmp_path / "parts").glob("tokens/*/train/teacher"))
    assert [path.name for path in (teacher / ".parts").iterdir()] == ["lock"]
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    made.clear()
    prepare(parts)  # all is there
    assert not made


@pytest.mark.parametrize("form", ["tokens", "mds"])
def test_tokens_written_for_any_run_have_their_teacher_beside_them(
    folder: Path, tmp_path: Path, form: str
) -> None:
    output = tmp_path / "data"
    more = [f"prepare.format={form}", *["prepare.concat_tokens=64"] * (form == "mds")]
    prepare(f"prepare.output={output}", *more, top_k=4)
    assert (output / "train" / "teacher" / "index.json").is_file()
    reading = ("data=mds", f"data.remote={output}")
    run = train_here(f"of-{form}", *DISTILL, *reading)
    assert 0 < rows(run, "loss/eval/kl")[4]["loss/eval/kl"] < 10
    _, data = opened(*reading)
    assert source_of(data).row(0).teacher[0].shape[1] == 4
    if form == "mds":
        with pytest.raises(UserError, match="first 64 tokens of each of its samples"):
            opened(*reading, "max_seq_len=100")
    # shards that somebody prepared before
    shutil.rmtree(output / "train" / "teacher")
    shutil.rmtree(output / "validation" / "teacher")
    prepare(*reading, top_k=4)
    with_shards = train_here(f"again-{form}", *DISTILL, *reading)
    assert rows(with_shards, KL)[4][KL] == rows(run, KL)[4][KL]


@torch.no_grad()
def test_a_class_of_transformers_is_a_teacher(folder: Path, tmp_path: Path) -> None:
    """Each document of a row by itself, as the class has no layouts."""
    tokenizer = next((folder / "runs/teacher/checkpoints").iterdir()) / "tokenizer"
    neox = write_class(tmp_path / "neox", tokenizer, "gpt_neox")
    cache = f"data.cache_folder={tmp_path / 'cache'}"
    prepare(cache, teacher=str(neox))
    model = AutoModelForCausalLM.from_pretrained(neox)
    _, data = opened(cache)
    for row in (0, 3):
        sequence = source_of(data).row(row)
        ids = torch.tensor(sequence.ids[: sum(sequence.lengths)].astype(np.int64))
        parts = [model(part[None]).logits[0] for part in ids.split(sequence.lengths)]
        right = torch.cat(parts).log_softmax(-1)[:, :257].topk(K).values
        stored = torch.tensor(sequence.teacher[1]).float()
        torch.testing.assert_close(stored, right, rtol=1e-3, atol=1e-4)


def test_answers_of_chats_have_a_teacher(folder: Path, tmp_path: Path) -> None:
    """Labels alone are stored, and a packed row has them at its own positions."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    reading = (
        "data=chat",
        f"data.paths=[{chats}]",
        "data.validation_fraction=0.2",
        "tokenizer.chat_template=chatml",
        f"data.cache_folder={tmp_path / 'cache'}",
    )
    train_here("chats", "max_duration=2ba", *reading)
    prepare(*reading, teacher="runs/chats")
    _, data = opened(*reading)
    source = source_of(data)
    sequence = source.row(0)
    assert len(sequence.lengths) > 1
    documents = np.split(sequence.ids, np.cumsum(sequence.lengths)[:-1])
    full = log_probs_of("runs/chats", documents)
    in_loss = np.flatnonzero(sequence.weights[1:] > 0)
    ids = torch.from_numpy(sequence.teacher[0].astype(np.int64))
    stored = torch.tensor(sequence.teacher[1]).double()
    right = full.gather(1, torch.cat([ids, ids[-1:]]))[:-1]
    torch.testing.assert_close(stored[in_loss], right[in_loss], rtol=1e-3, atol=1e-4)
    assert not sequence.teacher[0][sequence.weights[1:] == 0].any() or len(in_loss) == 0
    run = train_here("student-of-chats", *DISTILL, *reading)
    assert 0 < rows(run, "loss/eval/kl")[4]["loss/eval/kl"] < 10


def test_what_does_not_fit_is_one_line(folder: Path, own_cache: str, tmp_path: Path) -> None:
    for overrides, words in {
        ("data.cache_folder=other",): "data: has no teacher for loss=distill",
        ("tokenizer=train", "tokenizer.vocab_size=300"): "has no teacher",
    }.items():
        with pytest.raises(UserError, match=words):
            opened(*overrides)
    # at preparation: another vocabulary, too many tokens, a longer window, another teacher
    for overrides, words in {
        ("tokenizer=train", "tokenizer.vocab_size=300"): "teacher: .* has another vocabulary",
        ("top_k=300",): "top_k: 300, but the vocabulary has 257",
        ("max_seq_len=128",): "max_seq_len: 128, but runs/teacher reads 64",
        ("top_k=5",): "with top_k 20, and not 5; delete it",
        ("teacher=runs/nothing",): "teacher: nothing at runs/nothing",
    }.items():
        with pytest.raises(UserError, match=words):
            prepare(own_cache, *overrides)
    # texts that are tokenized while they are read
    texts = f"prepare.output={tmp_path / 'texts'}"
    asked = (texts, "prepare.format=mds", "prepare.column=text")
    prepare_data(checked(PrepareRecipe, "tiny.yaml", asked).resolve())
    with pytest.raises(UserError, match="data: text is tokenized while it is read"):
        opened("data=mds", f"data.remote={tmp_path / 'texts'}")
    with pytest.raises(UserError, match="teacher: reads tokens"):
        prepare(*asked)
    # tokens that changed since
    (facts,) = (tmp_path / "cache").glob("tokens/*/train/teacher/teacher.json")
    found = json.loads(facts.read_text())
    for key, words in (("data", "read other data"), ("vocabulary", "has another vocabulary")):
        facts.write_text(json.dumps(found | {key: "0"}))
        with pytest.raises(UserError, match=words):
            opened(own_cache)
    # a damaged file: both say what helps
    facts.write_text("{")
    for use in (opened, prepare):
        with pytest.raises(UserError, match=r"is damaged: .*; delete .*/teacher, and prepare"):
            use(own_cache)


def test_every_stream_of_a_mixture_needs_a_teacher(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        output = f"prepare.output={tmp_path / name}"
        prepare(output, "prepare.format=tokens", top_k=4)
    shutil.rmtree(tmp_path / "b" / "train" / "teacher")
    streams = ",".join(
        f"{name}:{{name: shards, remote: {tmp_path / name}, split: train, proportion: 1}}"
        for name in ("a", "b")
    )
    tiny = yaml.safe_load(Path("tiny.yaml").read_text())
    changed = {
        "data": {"cache_folder": tiny["data"]["cache_folder"]},
        "eval": {"validation": False},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny | changed))
    monkeypatch.chdir(tmp_path)
    mixture = ("data.name=mixture", "data.streams={" + streams + "}")
    with pytest.raises(UserError, match=r"data\.streams\.b: has no teacher"):
        opened(*mixture)
    teacher = str(folder / "runs" / "teacher")
    alone = ("data.name=shards", "data.split=train", f"data.remote={tmp_path / 'b'}")
    prepare(*alone, top_k=3, teacher=teacher)
    with pytest.raises(UserError, match=r"data\.streams\.b: has 3 tokens of its teacher"):
        opened(*mixture)
    shutil.rmtree(tmp_path / "b" / "train" / "teacher")
    prepare(*alone, top_k=4, teacher=teacher)
    _, data = opened(*mixture)
    assert [stream.read(0).teacher[0].shape[1] for stream in data.streams] == [4, 4]


def test_the_logits_of_the_loss_are_counted() -> None:
    """On a GPU, PyTorch's operations take more than the kernel; at two temperatures, even more."""
    needs = []
    for loss in (["loss=cross_entropy"], ["loss=distill"], ["loss=distill", "loss.temperature=2"]):
        recipe = checked(TrainRecipe, "mpt-125m", loss).resolve()
        recipe.model.fill(vocab_size=50432)
        need = estimate(recipe, 8, device=torch.device("cuda"))
        needs.append(need.logits(4))
    assert 2 * 4 * 50432 < needs[0] < needs[1] < needs[2]


def test_settings_without_effect_are_refused() -> None:
    for overrides, words in {
        ("loss.temperature=2",): "loss.temperature",
        ("loss=distill", "loss.kl_weight=0"): "loss.kl_weight",
        ("loss=distill", "loss.divergence=jsd"): "loss.divergence",
    }.items():
        with pytest.raises(UserError, match=words):
            checked(TrainRecipe, "quickstart", overrides)
    with pytest.raises(UserError, match="top_k"):
        checked(PrepareRecipe, "quickstart", ["top_k=8"])

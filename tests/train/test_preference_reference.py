"""The reference's log-probabilities: right, computed once, and never those of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmfoundry.builders import preference
from llmfoundry.builders.data import RunData
from llmfoundry.builders.preference import WEIGHTS, identity_of, open_reference, with_places
from llmfoundry.builders.resume import StartPoint
from llmfoundry.builders.run_context import RunContext
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.data.batch import SequenceBatch, TrainingSequence
from llmfoundry.data.held_out import validation_batches
from llmfoundry.data.order import Order
from llmfoundry.data.sources import OrderedStream
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.train.preference_loss import Pairs, mismatched
from llmfoundry.train.validation import validate_answers
from tests.models.test_decoder import make_config, make_model
from tests.shards import bytes_tokenizer

T, ROWS, EOS = 24, 11, 0
CPU = torch.device("cpu")


def made_row(number: int) -> TrainingSequence:
    """Two pairs, or one, of lengths that differ from row to row."""
    random = np.random.default_rng(number)
    ids, weights, sides, lengths = [], [], [], []
    for side in (1, -1, 1, -1)[: 4 if number % 3 else 2]:
        prompt, answer = random.integers(1, 3, 2)
        ids += random.integers(1, 64, prompt + answer).tolist()
        weights += [0.0] * prompt + [1.0] * answer
        sides.append(side)
        lengths.append(int(prompt + answer))
    return TrainingSequence(np.array(ids), lengths, 0, np.array(weights, np.float32), sides)


class Source:
    """Rows as a prepared source has them."""

    name, n_rows, fingerprint = "data", ROWS, "rows:1"
    sizes = np.array([ROWS])

    def __init__(self) -> None:
        self.read: list[int] = []

    def row(self, row: int) -> TrainingSequence:
        self.read.append(row)
        return made_row(row)

    def where(self, row: int) -> str:
        return f"row {row}"

    def prefetch(self, shards: Iterator[int]) -> None:
        pass

    def close(self) -> None:
        pass


class Held:
    n_bytes = 0

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        return 3

    def row(self, row: int, seq_len: int) -> TrainingSequence:
        return made_row(100 + row)

    def texts(self) -> list[str]:
        return ["held out"]


class Run:
    """What `build_trainer` has when it comes to the reference."""

    def __init__(self, folder: Path, method: str = "dpo") -> None:
        config = make_config(max_seq_len=T, vocab_size=257)
        recipe = FinetuneRecipe(max_seq_len=T, precision="fp32")
        recipe.preference.name = method
        recipe = recipe.resolve()
        recipe.model = config  # type: ignore[assignment]
        recipe.data.cache_folder = str(folder / "cache")
        self.pretrained = make_model(config).state_dict()
        self.source, self.notes, self.filled = Source(), [], 0
        order = Order(self.source.sizes, seed=1, shuffle=False, block_size=64)
        data = RunData((OrderedStream(self.source, order),), (1.0,), ROWS, Held(), 1.0, "")
        self.data = with_places(data, recipe)
        world, root = World(0, 1, 0, CPU), Root(Decoder(config))
        run, tokenizer = Storage(Path()), bytes_tokenizer()
        self.job = RunContext(recipe, world, tokenizer, self.data, root, 2, self.notes.append, run)
        self.identity: dict[str, str] = {}

    def fill(self, model: Decoder) -> None:
        self.filled += 1
        model.load_state_dict(self.pretrained)

    def begin(self, start: StartPoint = StartPoint()) -> None:  # noqa: B008
        found = open_reference(self.job, self.data, start, self.fill)
        if start.checkpoint is None:
            self.fill(self.job.root.model)
        self.identity = found.begin()

    @property
    def rows(self) -> list[TrainingSequence]:
        stream = self.data.streams[0]
        return [stream.read(n) for n in range(ROWS)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference, "PART", 4)


def plain(model: Decoder, ids: list[int], begin: int) -> float:
    """The log-probability of a document's ids from `begin` on, alone in its row."""
    tokens = torch.tensor([ids])
    log_shares = model.head(model(tokens)).log_softmax(-1)
    return sum(log_shares[0, n - 1, ids[n]].item() for n in range(begin, len(ids)))


def documents(row: TrainingSequence) -> list[tuple[list[int], int]]:
    """Ids of each document, and where its answer begins."""
    assert row.weights is not None
    found, begin = [], 0
    for length in row.lengths:
        learned = row.weights[begin : begin + length]
        found.append((row.ids[begin : begin + length].tolist(), int(learned.argmax())))
        begin += length
    return found


@torch.no_grad()
def test_rows_bring_what_the_pretrained_model_says_of_each_document(tmp_path: Path) -> None:
    run = Run(tmp_path, "kto")
    run.begin()
    model = run.job.root.model
    for row in [*run.rows, TrainingSequence(*run.data.validation.row(1, T))]:
        assert row.references is not None
        own = [plain(model, *document) for document in documents(row)]
        assert row.references[0, : len(own)].tolist() == pytest.approx(own, abs=1e-4)
        batch = SequenceBatch.fill([row], T, EOS).batch(with_layout=True)
        moved, _ = mismatched(batch)
        assert moved.layout is not None and moved.answers is not None
        begin = 0
        for n in range(len(own)):
            length = moved.layout.lengths[0][n]
            ids = moved.tokens[0, begin : begin + length].tolist()
            expected = plain(model, ids, moved.answers.begins[0][n] - begin)
            assert row.references[1, n] == pytest.approx(expected, abs=1e-4)
            begin += length
    assert run.identity[WEIGHTS] == identity_of(model)


def test_nothing_is_asked_twice_and_a_killed_pass_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Run(tmp_path / "whole")
    whole.begin()
    write: Callable[..., None] = preference._Table.write

    def killed(table: preference._Table, part: int, values: np.ndarray) -> None:
        if part == 1:
            raise KeyboardInterrupt
        write(table, part, values)

    run = Run(tmp_path / "killed")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preference._Table, "write", killed)
        run.begin()
    again = Run(tmp_path / "killed")
    again.begin()
    assert sorted(again.source.read) == list(range(4, ROWS))  # the first part was there
    third = Run(tmp_path / "killed")
    third.begin()
    assert third.source.read == []
    for one, other in zip(third.rows, whole.rows, strict=True):
        assert np.array_equal(one.references, other.references)
    # a part that a full disk cut short is asked for again, and nothing else
    (part,) = (p for p in (tmp_path / "killed").rglob("000001.npy"))
    part.write_bytes(part.read_bytes()[:-5])
    fourth = Run(tmp_path / "killed")
    fourth.begin()
    assert fourth.source.read == [4, 5, 6, 7]


def checkpoint(folder: Path, weights: str | None) -> StartPoint:
    folder.mkdir()
    identity = {} if weights is None else {WEIGHTS: weights}
    write_json(folder / "state.json", {"batch": 4, "identity": identity})
    return StartPoint(Checkpoint.at(folder))


def test_a_resumed_run_never_asks_the_weights_that_it_resumes_from(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    start = checkpoint(tmp_path / "checkpoint", first.identity[WEIGHTS])
    resumed = Run(tmp_path)
    resumed.begin(start)
    assert resumed.filled == 0 and resumed.source.read == []  # from the cache
    for folder in ("elsewhere", "unrecorded"):
        lost = Run(tmp_path / folder)  # an empty cache
        trained = {k: v + 0.5 for k, v in lost.pretrained.items()}
        lost.job.root.model.load_state_dict(trained)
        if folder == "unrecorded":
            start = checkpoint(tmp_path / "other", None)
        lost.begin(start)
        assert lost.filled == 1 and lost.identity == first.identity
        for one, other in zip(lost.rows, first.rows, strict=True):
            assert np.array_equal(one.references, other.references)


def test_another_pretrained_model_is_refused_where_the_cache_is_lost(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    start = checkpoint(tmp_path / "checkpoint", first.identity[WEIGHTS])
    changed = Run(tmp_path / "elsewhere")
    changed.pretrained["wte.weight"][3, 5] += 1e-6
    with pytest.raises(UserError, match=r"model\.pretrained: is not what the run"):
        changed.begin(start)
    assert not (tmp_path / "elsewhere").exists()


def test_another_model_precision_or_method_has_values_of_its_own(tmp_path: Path) -> None:
    runs = [Run(tmp_path) for _ in range(3)] + [Run(tmp_path, "kto")]
    runs[1].pretrained["wte.weight"][3, 5] += 1e-6
    runs[2].job.recipe.precision = "amp_bf16"
    for run in runs:
        run.begin()
        assert run.source.read
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 2 * len(runs)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache_folder: cannot write"):
        Run(tmp_path).begin()


@torch.no_grad()
def test_held_out_pairs_are_measured_by_the_definition(tmp_path: Path) -> None:
    """Every number from log-probabilities of documents one by one, written out."""
    run = Run(tmp_path)
    run.begin()
    policy, root = Run(tmp_path / "other"), run.job.root
    known = {n: documents(TrainingSequence(*run.data.validation.row(n, T))) for n in range(3)}
    before = {n: [plain(root.model, *d) for d in row] for n, row in known.items()}
    generator = torch.Generator().manual_seed(4)
    for parameter in root.model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    after = {n: [plain(root.model, *d) for d in row] for n, row in known.items()}
    config = run.job.recipe.preference  # type: ignore[attr-defined]
    objective = Pairs(config)
    for rows in (1, 2, 3):
        batches = validation_batches(run.data.validation, seq_len=T, batch_size=rows, eos_id=EOS)
        found = validate_answers(
            root.eval(),
            list(batches),
            torch.ones(257),
            objective,
            device=CPU,
            autocast=policy.job.autocast,
        )
        pairs = [(n, d) for n, row in known.items() for d in range(0, len(row), 2)]
        rewards = {
            side: [0.1 * (after[n][d + k] - before[n][d + k]) for n, d in pairs]
            for k, side in enumerate(("chosen", "rejected"))
        }
        margins = np.array(rewards["chosen"]) - np.array(rewards["rejected"])
        tokens = [(len(known[n][d][0]) - known[n][d][1]) for n, d in pairs]
        likelier = [after[n][d] > after[n][d + 1] for n, d in pairs]
        means = [
            after[n][d + k] / (len(known[n][d + k][0]) - known[n][d + k][1])
            for n, d in pairs
            for k in (0, 1)
        ]
        nats = -sum(after[n][d] for n, d in pairs)
        expected = {
            "rewards/eval/chosen": np.mean(rewards["chosen"]),
            "rewards/eval/rejected": np.mean(rewards["rejected"]),
            "rewards/eval/margins": margins.mean(),
            "rewards/eval/accuracies": (margins > 0).mean(),
            "metrics/eval/PairAccuracy": np.mean(likelier),
            "metrics/eval/PairAccuracyPerToken": np.mean(np.array(means[::2]) > means[1::2]),
            "metrics/eval/LanguageCrossEntropy": nats / sum(tokens),
            "metrics/eval/bits_per_byte": nats / np.log(2) / sum(tokens),
            "loss/eval/total": np.log1p(np.exp(-margins)).mean(),
        }
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-4), name

"""A teacher's most probable next tokens, stored next to the data that a student learns from.

`builders/teacher.py` writes them (`scripts/prepare_data.py teacher=MODEL`) and opens them for
`loss=distill`. The one idea: the folder `teacher` next to the index of the data is an MDS dataset
whose sample number u belongs to unit u of the data. Units do not depend on how a run reads the
data: blocks of a token stream, samples of MDS tokens, documents of supervised examples. A sample
has the columns `teacher_ids` and `teacher_log_probs`, (n, k), most probable first. Their row t is
of the token that follows token t of the unit. Log-probabilities are those of the full vocabulary
at temperature 1, in fp16: a token takes 4 k bytes, or 6 k above 65,536 tokens of vocabulary.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from llmfoundry.data.batch import TeacherRows, TrainingSequence
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.held_out import HeldOut, MDSRows, TokenShards, WrappedHeldOut
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.shard_cache.shard_folder import ShardFolder
from llmfoundry.data.sources import MDSColumn, MDSTokens, SequenceSource, TokenSource
from llmfoundry.data.store_address import without_secrets
from llmfoundry.data.supervised.packed_examples import SupervisedHeldOut, SupervisedSource
from llmfoundry.data.supervised.prepare_rows import ExampleStore
from llmfoundry.data.token_shards import TokenDataset
from llmfoundry.errors import UserError

FOLDER, FACTS = "teacher", "teacher.json"
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
STREAM, SAMPLES, DOCUMENTS = "blocks of a token stream", "samples", "documents"
VERSION = 1
_LEAST = float(np.finfo(np.float16).min)


class TeacherFacts(msgspec.Struct, frozen=True):
    """Contents of teacher.json: all that the stored tokens depend on.

    Attributes:
        model: the teacher, as the user named it.
        weights: hash of the teacher's weights.
        vocabulary: hash of the tokens of the vocabulary.
        data: fingerprint of the data.
        units: what a sample belongs to: one of STREAM, SAMPLES and DOCUMENTS.
        n_units: number of samples.
        seq_len: tokens that the teacher read at a time; of a longer sample or document, only the
            first ones.
        attend_across_documents: the teacher read a sequence as one document.
        top_k: k, stored tokens.
        precision: of the teacher's weights.
        version: of the format.
    """

    model: str
    weights: str
    vocabulary: str
    data: str
    units: str
    n_units: int
    seq_len: int
    attend_across_documents: bool
    top_k: int
    precision: str
    version: int = VERSION


def columns(vocab_size: int) -> dict[str, str]:
    """Return the encodings of both columns."""
    ids = "uint16" if vocab_size <= 1 << 16 else "uint32"
    return {IDS: f"ndarray:{ids}", LOG_PROBS: "ndarray:float16"}


def bytes_per_token(vocab_size: int, top_k: int) -> int:
    """Return the bytes that the stored tokens take for one token of the data."""
    return top_k * (2 + (2 if vocab_size <= 1 << 16 else 4))


def narrow(log_probs: np.ndarray) -> np.ndarray:
    """Return log-probabilities in fp16; those below its range become its smallest number."""
    return np.maximum(log_probs, _LEAST).astype(np.float16)


class TeacherStore:
    """Random access to a teacher's tokens by unit.

    Attributes:
        facts: all that the tokens depend on.
    """

    def __init__(self, folder: ShardFolder, index: MDSIndex, facts: TeacherFacts) -> None:
        """Open the shards of `index`, the index of `folder`."""
        self.facts = facts
        self._ids = MDSColumn(FOLDER, folder, index, IDS)
        self._log_probs = MDSColumn(FOLDER, folder, index, LOG_PROBS)

    def unit(self, number: int) -> TeacherRows:
        """Return the tokens of a unit, (n, k) each."""
        return self._ids.read(number), self._log_probs.read(number)

    def span(self, start: int, stop: int) -> TeacherRows:
        """Return the tokens at the positions start … stop - 1 of a token stream."""
        size, parts = self.facts.seq_len, []
        for number in range(start // size, -(-stop // size)):
            first = number * size
            part = slice(max(start - first, 0), stop - first)
            parts.append([values[part] for values in self.unit(number)])
        if len(parts) == 1:
            return parts[0][0], parts[0][1]
        ids, log_probs = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(log_probs)

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        self._ids.close()
        self._log_probs.close()


def read_facts(folder: ShardFolder) -> TeacherFacts:
    """Read teacher.json.

    Raises:
        UserError: it is missing or damaged.
    """
    return parse_facts(folder.read(FACTS), folder.url)


def parse_facts(data: bytes, url: str) -> TeacherFacts:
    """Return the contents of the teacher.json of a folder.

    Raises:
        UserError: it is damaged, or of another version.
    """
    where = without_secrets(url)
    advice = f"delete {where}, and prepare it again"
    try:
        facts = msgspec.json.decode(data, type=TeacherFacts)
    except msgspec.DecodeError as error:
        raise UserError(f"{where}/{FACTS}: is damaged: {error}; {advice}") from error
    if facts.version != VERSION:
        raise UserError(
            f"{where}/{FACTS}: is of version {facts.version}, this program reads {VERSION};"
            f" {advice}"
        )
    return facts


def open_folder(data: ShardFolder | ExampleStore, options: FetchOptions) -> ShardFolder:
    """Return the folder `teacher` next to some data; nothing is read."""
    url = str(data.folder) if isinstance(data, ExampleStore) else data.url
    return ShardFolder.open(f"{url}/{FOLDER}", None, options)


class TaughtUnits:
    """The units of some data: what a teacher reads, and what a student reads of them.

    Attributes:
        data: folder of the data.
        kind: STREAM, SAMPLES or DOCUMENTS.
        fingerprint: hash of the data.
        sizes: (units,) int64, tokens that are read of each unit, at most `seq_len`.
    """

    def __init__(self, part: SequenceSource | HeldOut, seq_len: int) -> None:
        """Describe training or held-out data that are read in sequences of `seq_len` tokens.

        Raises:
            UserError: the data has no units.
        """
        self._seq_len = seq_len
        self._tokens: TokenDataset | None = None
        self._samples: MDSTokens | None = None
        self._store: ExampleStore | None = None
        source: Any = part
        if isinstance(part, TokenShards | TokenSource):
            source = part.dataset
        elif isinstance(part, MDSRows):
            source = part.source
        if isinstance(source, TokenDataset):
            self._tokens, self.kind = source, STREAM
            self.data: ShardFolder | ExampleStore = source.folder
            self.fingerprint = source.fingerprint
            labeled = max(0, source.n_tokens - 1)
            self.sizes = np.full(-(-labeled // seq_len), seq_len, np.int64)
            self.sizes[-1:] = labeled - (len(self.sizes) - 1) * seq_len
        elif isinstance(source, MDSTokens):
            self._samples, self.kind = source, SAMPLES
            self.data, self.fingerprint = source.folder, source.fingerprint
            self.sizes = np.full(source.n_rows, seq_len, np.int64)
        elif isinstance(source, SupervisedSource | SupervisedHeldOut):
            self._store, self.kind = source.store, DOCUMENTS
            self.data, self.fingerprint = source.store, source.store.facts.content
            self.sizes = np.minimum(source.store.lengths, seq_len)
        else:
            raise UserError("text is tokenized while it is read; prepare it as tokens first")
        self._part = part

    def sequence(self, number: int) -> TrainingSequence:
        """Return what the teacher reads of unit `number`."""
        if self._tokens is not None:
            return TrainingSequence(*self._tokens.row(number, self._seq_len))
        if self._samples is not None:
            return self._samples.cut(number, self._seq_len)
        assert self._store is not None
        ids = np.asarray(self._store.ids[self._span(number)][: self._seq_len + 1])
        return TrainingSequence(ids, [min(len(ids), self._seq_len)])

    def stored(self, number: int, rows: TeacherRows) -> TeacherRows:
        """Return the rows to store of the rows (T, k) of a unit, at least one."""
        if self._store is not None:
            keep = self._in_loss(number)[: len(rows[0])]
        else:
            keep = np.arange(len(rows[0])) < max(1, len(self.sequence(number).ids) - 1)
        if not keep.any():
            keep[:1] = True  # MDS stores no empty array
        return rows[0][keep], rows[1][keep]

    def taught(self, teacher: TeacherStore, row: int, sequence: TrainingSequence) -> TeacherRows:
        """Return the teacher's tokens (n - 1, k) at the labels of sequence number `row`."""
        n_labels = max(0, len(sequence.ids) - 1)
        if self._tokens is not None:
            start = row * self._seq_len
            return teacher.span(start, start + n_labels)
        if self._samples is not None:
            ids, log_probs = teacher.unit(row)
            return ids[:n_labels], log_probs[:n_labels]
        # documents of examples, of which labels alone are stored
        assert isinstance(self._part, SupervisedSource | SupervisedHeldOut)
        k = teacher.facts.top_k
        parts = []
        for document in self._part.members(row, self._seq_len).tolist():
            unit, size = teacher.unit(document), int(self.sizes[document])
            keep = self._in_loss(document)[:size]
            rows = np.zeros((size, k), unit[0].dtype), np.zeros((size, k), np.float16)
            for full, values in zip(rows, unit, strict=True):
                full[keep] = values[: keep.sum()]
            parts.append(rows)
        return (
            np.concatenate([ids for ids, _ in parts])[:n_labels],
            np.concatenate([log_probs for _, log_probs in parts])[:n_labels],
        )

    def _in_loss(self, document: int) -> np.ndarray:
        """Return (n,) bool: whether the label of each token of a document is in the loss."""
        assert self._store is not None
        weights = np.asarray(self._store.weights[self._span(document)]) > 0
        return np.append(weights[1:], False)

    def _span(self, document: int) -> slice:
        """Return the range of a document in the ids of the store."""
        assert self._store is not None
        end = int(self._store.documents["end"][document])
        return slice(end - int(self._store.lengths[document]), end)


class TaughtSource:
    """A source that adds a teacher's tokens to its sequences.

    Attributes:
        source: the source.
    """

    def __init__(self, source: SequenceSource, units: TaughtUnits, teacher: TeacherStore) -> None:
        """Wrap a source."""
        self.source, self._units, self._teacher = source, units, teacher
        self.name, self.n_rows, self.sizes = source.name, source.n_rows, source.sizes
        facts = teacher.facts
        self.fingerprint = f"{source.fingerprint}:{facts.weights}:{facts.top_k}:{facts.seq_len}"
        self.where, self.prefetch = source.where, source.prefetch
        self.tokens_left_out = getattr(source, "tokens_left_out", 0)

    def row(self, row: int) -> TrainingSequence:
        """Return sequence number `row` with the teacher's tokens."""
        sequence = self.source.row(row)
        return sequence._replace(teacher=self._units.taught(self._teacher, row, sequence))

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        self.source.close()
        self._teacher.close()


class TaughtHeldOut(WrappedHeldOut):
    """Held-out data that adds a teacher's tokens to its sequences."""

    def __init__(self, held_out: HeldOut, seq_len: int, units: TaughtUnits, teacher: TeacherStore):
        """Wrap held-out data that is read in sequences of `seq_len` tokens."""
        super().__init__(held_out)
        self._units, self._teacher, self._seq_len = units, teacher, seq_len

    def row(self, row: int, seq_len: int) -> TrainingSequence:
        """Return a sequence with the teacher's tokens."""
        sequence = TrainingSequence(*self.held_out.row(row, seq_len))
        if seq_len != self._seq_len:
            return sequence
        return sequence._replace(teacher=self._units.taught(self._teacher, row, sequence))

"""`SupervisedSource`, `SupervisedHeldOut`: prepared examples as rows to train and measure on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmfoundry.data.make_batch import Row
from llmfoundry.data.supervised.pack import PackedExamples, cut_lengths, lengths_of, pack_examples
from llmfoundry.data.supervised.store import Store
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.supervised import SupervisedConfig


class SupervisedSource:
    """The rows of a run, for `OrderedStream`.

    Attributes:
        name: of the stream.
        n_rows: of an epoch.
        sizes: (1,) int64; all lie in one place.
        fingerprint: of the rows.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        packed: PackedExamples,
        seq_len: int,
        *,
        per_sequence: bool,
        with_others: bool = False,
    ) -> None:
        """Read packed examples.

        Args:
            name: of the stream.
            store: the examples.
            packed: which of them each row has.
            seq_len: T, tokens of a row.
            per_sequence: the labels of a document weigh 1 together, in place of 1 each.
            with_others: behind each row, in its padding, is the row before it, on neither side:
                rows of one answer, of which KTO needs two.
        """
        self.name, self._store, self._packed = name, store, packed
        self.n_rows = len(packed.ends)
        self.sizes = np.array([self.n_rows], np.int64)
        self.fingerprint = packed.fingerprint
        self._maker = _Maker(store, seq_len, per_sequence)
        self._with_others = with_others and self.n_rows > 1

    @property
    def sides(self) -> np.ndarray:
        """(documents,) int8 of all rows: 1 chosen or desirable, -1 rejected or undesirable."""
        of_examples = self._store.documents["side"].reshape(-1, self._store.facts.per_example)
        return of_examples[self._packed.members].ravel()

    def row(self, row: int) -> Row:
        """Row number `row`."""
        other = self._members((row - 1) % self.n_rows) if self._with_others else ()
        return self._maker(self._members(row), other)

    def where(self, row: int) -> str:
        """The file and row of its first example, for messages."""
        members = self._members(row)
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        return f"{self._store.where(int(members[0]))}{more}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """All is here."""

    def close(self) -> None:
        """Let go of the files; reading opens them again."""
        self._store.close()

    def _members(self, row: int) -> np.ndarray:
        return self._packed.members[_span(self._packed.ends, row)]


@dataclass(frozen=True)
class HeldOutPrompt:
    """A held-out prompt and its right answer.

    Attributes:
        prompt: (n,) ids up to its last answer.
        answer: (m,) ids of that.
    """

    prompt: np.ndarray
    answer: np.ndarray


class SupervisedHeldOut:
    """Held-out examples; a row's weights say which tokens are learned, and so measured."""

    def __init__(
        self, store: Store, examples: np.ndarray, tokenizer: Tokenizer, config: SupervisedConfig
    ) -> None:
        """Read these examples of a store, in its order."""
        self._store, self._examples, self._tokenizer = store, examples, tokenizer
        self._packing, self._window = config.packing, config.packing_window
        self._with_others = brings_others(store, config)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by seq_len

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of their texts."""
        token_bytes = self._tokenizer.token_bytes()
        return sum(int(token_bytes[self._ids(n)].sum()) for n in self._documents())

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Rows of T tokens; none is short of its examples, all may have padding."""
        return len(self._packed(seq_len)[1])

    def row(self, row: int, seq_len: int) -> Row:
        """A row's ids, documents and weights."""
        members, ends = self._packed(seq_len)
        own = members[_span(ends, row)]
        has_other = self._with_others and len(ends) > 1
        other = members[_span(ends, (row - 1) % len(ends))] if has_other else own[:0]
        maker = _Maker(self._store, seq_len, False)
        return maker(self._examples[own], self._examples[other])

    def texts(self) -> list[str]:
        """The documents, as their tokens spell them."""
        return [self._tokenizer.decode(self._ids(n).tolist()) for n in self._documents()]

    def prompts(self, n: int) -> list[HeldOutPrompt]:
        """The first `n` examples (of a pair the chosen one), cut where the last answer begins."""
        found = []
        for example in self._examples[:n].tolist():
            begin, end = self._store.span(example * self._store.facts.per_example)
            ids = np.asarray(self._store.ids[begin:end])
            learned = np.asarray(self._store.weights[begin:end]) > 0
            places = np.flatnonzero(learned & ~np.concatenate([[False], learned[:-1]]))
            if len(places):
                found.append(HeldOutPrompt(ids[: places[-1]], ids[places[-1] :]))
        return found

    def _packed(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if seq_len not in self._rows:
            sizes = lengths_of(self._store, self._examples, seq_len)
            is_packed = self._packing == "best_fit"
            made = pack_examples(sizes, seq_len, window=self._window, packed=is_packed)
            self._rows = {seq_len: made}
        return self._rows[seq_len]

    def _documents(self) -> list[int]:
        n = self._store.facts.per_example
        return (self._examples[:, None] * n + np.arange(n)).ravel().tolist()

    def _ids(self, document: int) -> np.ndarray:
        begin, end = self._store.span(document)
        return np.asarray(self._store.ids[begin:end])


def _span(ends: np.ndarray, row: int) -> slice:
    """The places of a row's members."""
    return slice(int(ends[row - 1]) if row else 0, int(ends[row]))


def brings_others(store: Store, config: SupervisedConfig) -> bool:
    """Whether rows are of one answer each, and bring another for KTO to compare with."""
    return store.facts.format == "unpaired" and config.packing == "off"


class _Maker:
    """Examples to a row."""

    def __init__(self, store: Store, seq_len: int, per_sequence: bool) -> None:
        self._store, self._seq_len, self._per_sequence = store, seq_len, per_sequence

    def __call__(
        self, examples: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray = ()
    ) -> Row:
        """Their documents one after another, and `other`'s where an answer of it fits behind."""
        store, n = self._store, self._store.facts.per_example
        ids, weights, lengths, sides, dropped = [], [], [], [], 0
        for example in np.asarray(examples).tolist():
            spans = [store.span(example * n + k) for k in range(n)]
            whole = np.array([end - begin for begin, end in spans], np.int64)
            cut = cut_lengths(whole, n, self._seq_len).tolist()
            for k, ((begin, _), size) in enumerate(zip(spans, cut, strict=True)):
                ids.append(store.ids[begin : begin + size])
                weights.append(self._weighed(store.weights[begin : begin + size]))
                sides.append(int(store.documents["side"][example * n + k]))
            lengths += cut
            dropped += int(whole.sum()) - sum(cut)
        for example in np.asarray(other, np.int64).tolist():
            begin, end = store.span(example)
            end = min(end, begin + self._seq_len - sum(lengths))
            if np.any(store.weights[begin + 1 : max(begin + 1, end)]):
                ids.append(store.ids[begin:end])
                weights.append(self._weighed(store.weights[begin:end]))
                sides.append(0)
                lengths.append(end - begin)
        return Row(
            np.concatenate(ids),
            lengths,
            dropped,
            np.concatenate(weights),
            sides if any(sides) else None,
        )

    def _weighed(self, weights: np.ndarray) -> np.ndarray:
        found = weights.astype(np.float32)
        total = float(found.sum(dtype=np.float64))
        return found / np.float32(total) if self._per_sequence and total else found

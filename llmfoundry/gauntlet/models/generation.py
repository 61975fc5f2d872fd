"""Greedy continuations of many prompts at once, with a key-value cache; finished rows leave.

The gauntlet calls `generate_texts` for tasks whose answers are written. All rows of a batch are
always equally long, so that positions and attention are those of a row on its own: the cache is
filled up to the shortest prompt's length, and a longer prompt's own tokens are read, where another
row's are drawn, until it ends. A beginning that many prompts share, such as worked examples, is
read once and copied into their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.metrics import until_stop
from llmfoundry.gauntlet.questions import Prompt, common_prefix
from llmfoundry.models.attention import KVCache, longest_document
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.attention.base import autocast_dtype
from llmfoundry.recipe.architecture.model import ModelConfig

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

Autocast = Callable[[], AbstractContextManager[Any]]

CHUNK = 256
"""Tokens a row that are read at a time after cached ones: their mask has CHUNK x length entries."""
STEPS_A_LOOK = {"cpu": 1}
"""Tokens drawn before the host looks at them: on a GPU each look waits for all that is queued."""
WORTH_SHARING = 1 / 4
"""Share of their tokens that a common beginning must save to give prompts batches of their own."""
FAMILY = 8
"""And so many prompts must have it: small batches are slow."""


@dataclass(frozen=True)
class _Batch:
    """What all ranks decode at the same time: rank r has members[r::data_size].

    Attributes:
        members: numbers of prompts, the longest first.
        prefix: tokens that all of them begin with, fewer than the shortest has.
        start: tokens of the shortest prompt.
        end: tokens of the longest row, its continuation with it.
    """

    members: list[int]
    prefix: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class _Model:
    """What `generate_texts` is given about the model."""

    root: nn.Module
    tokenizer: Tokenizer
    n_tokens: int
    device: torch.device
    autocast: Autocast
    data_size: int
    data_group: dist.ProcessGroup | None

    @property
    def model(self) -> Decoder:
        return cast(Root, getattr(self.root, "module", self.root)).model

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def cache(self, rows: int, length: int) -> KVCache:
        """An empty cache, in the dtype that keys and values will have."""
        with self.autocast():
            dtype = autocast_dtype(self.device.type, next(self.root.parameters()).dtype)
        return self.model.new_cache(batch=rows, max_len=length, device=self.device, dtype=dtype)

    def read(self, tokens: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Add tokens (B, T) to the cache.

        Returns:
            (B,) the likeliest next tokens, and whether that means anything: among logits that are
            not finite none is the likeliest.
        """

        def greedy(model: Decoder, hidden: Tensor) -> tuple[Tensor, Tensor]:
            logits = model.head(hidden[:, -1])[:, : self.n_tokens].float()
            return logits.argmax(-1), logits.isfinite().all(-1)

        parts = tokens.split(CHUNK if cache.length else tokens.shape[1], dim=1)
        for part in parts:
            with self.autocast():
                drawn, finite = self.root(part, None, greedy, cache=cache)
        return drawn, finite

    def over_ranks(self, count: int) -> int:
        """The sum of a number over ranks."""
        if self.data_size == 1:
            return count
        shared = torch.tensor(count, device=self.device)
        dist.all_reduce(shared, group=self.data_group)
        return int(shared)


class _Answer:
    """One row of a batch, as the host sees it."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        assert prompt.tokens and prompt.max_new_tokens > 0, "nothing to read, or to write"
        assert all(prompt.stops), "an empty stop would end every text"
        self.prompt, self._tokenizer, self._end_ids = prompt, tokenizer, end_ids
        self._tokens: list[int] = []
        self._longest_stop = max((len(stop.encode()) for stop in prompt.stops), default=0)
        self.is_done = self.is_broken = False

    @property
    def text(self) -> str:
        return until_stop(self._tokenizer.decode(self._tokens), self.prompt.stops)

    def take(self, place: int, tokens: list[int], is_finite: bool) -> None:
        """Tokens of the row from `place` on; those of the prompt are passed over."""
        new = tokens[max(0, len(self.prompt.tokens) - place) :]
        if self.is_done or not new:
            return
        if not is_finite:
            self.is_done = self.is_broken = True
            return
        new = new[: self.prompt.max_new_tokens - len(self._tokens)]
        end = next((n for n, token in enumerate(new) if token in self._end_ids), None)
        self._tokens += new[:end]
        is_full = len(self._tokens) == self.prompt.max_new_tokens
        self.is_done = end is not None or is_full or self._has_stop(len(new))

    def _has_stop(self, n_new: int) -> bool:
        """Whether a stop ends in the last n_new tokens.

        Few tokens are decoded, as many as a stop can stretch over and one more, until they hold
        one; then all, for decoders spell the first token of a text in a way of its own.
        """
        stops = self.prompt.stops
        parts = (self._tokens[-(n_new + self._longest_stop + 1) :], self._tokens)
        return bool(stops) and all(
            any(stop in text for stop in stops) for text in map(self._tokenizer.decode, parts)
        )


def generate_texts(
    root: nn.Module,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer,
    end_ids: Collection[int] | None = None,
    n_tokens: int | None = None,
    device: torch.device,
    batch_tokens: int,
    autocast: Autocast,
    data_rank: int = 0,
    data_size: int = 1,
    data_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """The likeliest continuation of each prompt, token by token; the same list on every rank.

    It ends before the prompt's first stop or an end-of-text token, or after max_new_tokens.

    Args:
        root: `Root`, as it is or wrapped by DDP or FSDP.
        prompts: of any length and order.
        tokenizer: the model's.
        end_ids: tokens that end a text; None: the tokenizer's end of text.
        n_tokens: ids below it are drawn; None: those of the tokenizer, for the embedding's rows
            beyond them are padding.
        device: where the model is.
        batch_tokens: rows of a rank's batch times the longest row, its continuation with it, at
            most; what the key-value cache holds. One row always goes.
        autocast: makes the context of the forward pass.
        data_rank: this process among those that have different rows; all must take part.
        data_size: their number.
        data_group: they; None: all processes.

    Raises:
        UserError: a row would be longer than the model's learned positions.
        FloatingPointError: logits were not finite, so that nothing is the likeliest; on every rank.
    """
    limit = tokenizer.vocab_size if n_tokens is None else n_tokens
    model = _Model(root, tokenizer, limit, device, autocast, data_size, data_group)
    _check_lengths(longest_document(model.model.config), prompts)
    ends = {tokenizer.eos_id} if end_ids is None else end_ids
    found: list[tuple[int, str, bool]] = []
    was_training = root.training
    root.eval()
    prefix, held = None, None
    with torch.no_grad():
        for batch in _batches(prompts, model.config, batch_tokens, data_size):
            if batch.prefix != prefix:
                prefix, held = batch.prefix, _read_prefix(model, batch.prefix)
            mine = batch.members[data_rank::data_size]
            answers = [_Answer(prompts[i], tokenizer, ends) for i in mine or batch.members[:1]]
            _decode(model, answers, batch, held)
            found += [(i, a.text, a.is_broken) for i, a in zip(mine, answers, strict=False)]
    root.train(was_training)
    if data_size > 1:
        parts: list[Any] = [None] * data_size
        dist.all_gather_object(parts, found, group=data_group)
        found = [entry for part in parts for entry in part]
    assert len(found) == len(prompts), "every prompt is continued once"
    if broken := sum(is_broken for *_, is_broken in found):
        raise FloatingPointError(
            f"the logits after {broken} of {len(found)} prompts are not finite numbers"
        )
    return [text for _, text, _ in sorted(found)]


def _check_lengths(longest: int | None, prompts: Sequence[Prompt]) -> None:
    """ALiBi and rotary positions continue beyond max_seq_len, learned ones end at `longest`."""
    if longest is None:
        return
    too_long = [p for p in prompts if len(p.tokens) + p.max_new_tokens - 1 > longest]
    if too_long:
        worst = max(too_long, key=lambda p: len(p.tokens) + p.max_new_tokens)
        raise UserError(
            f"max_new_tokens: {worst.max_new_tokens} after a prompt of {len(worst.tokens)} tokens"
            f" ({len(too_long)} of {len(prompts)} prompts are too long), but the model's learned"
            f" positions end at {longest} (model.max_seq_len); write a smaller number, or a smaller"
            " max_seq_len for the task's prompts"
        )


def _batches(
    prompts: Sequence[Prompt], config: ModelConfig, batch_tokens: int, data_size: int
) -> Iterator[_Batch]:
    """The work, the same on every rank.

    A batch's prompts differ in length by no more than its longest continuation: two batches would
    then take as many steps as the one. Where the angles of rotary positions depend on how long the
    row is (`type: dynamic` beyond max_seq_len), a row must be read as it would be alone: in one
    piece, and so among rows of its own length.
    """
    known = config.max_seq_len
    assert known is not None, "the recipe was not filled"
    ends = [len(p.tokens) + p.max_new_tokens for p in prompts]
    is_dynamic = config.attn_config.rope_hf_config.type == "dynamic"
    in_one_piece = is_dynamic and max(ends, default=0) > known
    families = [(0, list(range(len(prompts))))] if in_one_piece else _families(prompts)
    for shared, members in families:
        group: list[int] = []
        for i in sorted(members, key=lambda i: (-len(prompts[i].tokens), i)):
            longest = len(prompts[group[0] if group else i].tokens)
            new = max(prompts[j].max_new_tokens for j in (*group, i))
            rows = max(1, batch_tokens // (longest + new)) * data_size
            spread = longest - len(prompts[i].tokens)
            if group and (len(group) >= rows or spread > (0 if in_one_piece else new)):
                yield _batch(prompts, group, shared)
                group = []
            group.append(i)
        if group:
            yield _batch(prompts, group, shared)


def _batch(prompts: Sequence[Prompt], members: list[int], shared: int) -> _Batch:
    lengths = [len(prompts[i].tokens) for i in members]
    end = max(len(prompts[i].tokens) + prompts[i].max_new_tokens for i in members)
    return _Batch(members, prompts[members[0]].tokens[:shared], min(lengths), end)


def _families(prompts: Sequence[Prompt]) -> list[tuple[int, list[int]]]:
    """Prompts by the number of tokens that they share; 0 for those that share too few.

    In the order of their tokens, the one in the middle belongs to a family if one is large. Its
    members are those that share with it so many tokens that the most are saved.
    """
    rest = sorted(range(len(prompts)), key=lambda i: prompts[i].tokens)
    families = []
    while len(rest) >= FAMILY:
        pivot = prompts[rest[len(rest) // 2]].tokens
        common = {i: common_prefix(pivot, prompts[i].tokens[:-1]) for i in rest}
        by_length = sorted(common.values(), reverse=True)
        saved, shared = max((n * others, n) for others, n in enumerate(by_length))
        family = [i for i in rest if common[i] >= shared]
        n_tokens = sum(len(prompts[i].tokens) for i in family)
        if len(family) < FAMILY or saved < WORTH_SHARING * n_tokens:
            break
        families.append((shared, family))
        rest = [i for i in rest if common[i] < shared]
    return [*families, (0, rest)]


def _read_prefix(model: _Model, prefix: tuple[int, ...]) -> KVCache | None:
    """A cache of one row that holds the prefix; None where there is none."""
    if not prefix:
        return None
    cache = model.cache(1, len(prefix))
    model.read(torch.tensor([prefix], device=model.device), cache)
    return cache


def _decode(model: _Model, answers: list[_Answer], batch: _Batch, prefix: KVCache | None) -> None:
    """Fill in the answers of this rank.

    Every rank makes the same calls: one whose rows are all done keeps one of them until those of
    the others are done.
    """
    grid = _grid([a.prompt.tokens for a in answers], batch.end).to(model.device)
    cache = model.cache(len(answers), batch.end)
    if prefix is not None:
        cache.start_from(prefix)
    at = seen = batch.start
    drawn, finite = model.read(grid[:, cache.length : at], cache)
    while True:
        given = grid[:, at]
        grid[:, at] = torch.where(given >= 0, given, drawn)
        at += 1
        if at - seen >= STEPS_A_LOOK.get(model.device.type, 8) or at == batch.end:
            news = zip(answers, grid[:, seen:at].tolist(), finite.tolist(), strict=True)
            for answer, tokens, is_finite in news:
                answer.take(seen, tokens, is_finite)
            seen = at
            kept = _kept(answers)
            if model.over_ranks(len(kept)) == 0:
                return
            kept = kept or [0]
            if len(kept) < len(answers):
                cache.keep(kept)
                answers = [answers[i] for i in kept]
                grid, finite = grid[kept], finite[kept]
        drawn, still = model.read(grid[:, at - 1 : at], cache)
        finite = finite & still


def _grid(prompts: Sequence[tuple[int, ...]], width: int) -> Tensor:
    """(B, width) the prompts' tokens, and -1 where tokens are to be drawn."""
    grid = torch.full((len(prompts), width), -1)
    for row, tokens in zip(grid, prompts, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return grid


def _kept(answers: list[_Answer]) -> list[int]:
    """Rows that continue: those at the end take the places of those that are done."""
    going = [i for i, answer in enumerate(answers) if not answer.is_done]
    stay = [i for i in going if i < len(going)]
    movers = iter(going[len(stay) :])
    held = set(stay)
    return [i if i in held else next(movers) for i in range(len(going))]

"""`OwnModel`: the decoder as the gauntlet's evaluated model, each shared beginning computed once.

Requests become a forest (`tree`), its rows are dealt over ranks, and every rank makes the same
calls of the same shapes, as FSDP needs. What is in a row depends neither on the batch size nor on
the number of ranks. What is written is the engine's: `generate_texts`, which transformers' models
call too, turns prompts into requests, and tokens into text, of which it sees where a stop ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.answer_metrics import until_stop
from llmfoundry.gauntlet.models.tree import Forest, TreeRow, grow, write_row
from llmfoundry.gauntlet.questions import GenerationPrompt, Score, ScoreRequest
from llmfoundry.inference.decoder_slots import Autocast, DecoderSlots, decoder_of
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.inference.requests import SequenceRequest as Wanted
from llmfoundry.models.attention import longest_document
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.packed_layout import PackedLayout

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

HEAD_CHUNK = 512
"""Scored places in a head call: fp32 logits of a vocabulary of 100k take 200 MB."""


class OwnModel:
    """An EvaluatedModel.

    Attributes:
        can_score: True; see EvaluatedModel.
        tokens_computed: see EvaluatedModel.
    """

    can_score = True

    def __init__(
        self,
        root: nn.Module,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        device: torch.device,
        batch_tokens: int,
        autocast: Autocast,
        data_rank: int = 0,
        data_size: int = 1,
        data_group: dist.ProcessGroup | None = None,
        end_ids: Collection[int] | None = None,
        n_tokens: int | None = None,
    ) -> None:
        """Take a model over, whose training may continue.

        Args:
            root: `Root`, as it is or wrapped by DDP or FSDP.
            tokenizer: the model's.
            seq_len: longest input, in tokens.
            device: where the model is.
            batch_tokens: tokens in a forward pass at most, padding included; one row always goes.
            autocast: makes the context of the forward pass.
            data_rank: this process among those that are given different rows.
            data_size: their number; all must ask the same.
            data_group: they; None: all processes.
            end_ids: tokens that end what is written; None: the tokenizer's.
            n_tokens: ids below it may be written; None: those of the tokenizer.
        """
        self.tokens_computed = 0
        self._end_ids = tokenizer.end_ids if end_ids is None else end_ids
        self._n_tokens = tokenizer.vocab_size if n_tokens is None else n_tokens
        self._root, self._tokenizer, self._seq_len = root, tokenizer, seq_len
        self._device, self._batch_tokens, self._autocast = device, batch_tokens, autocast
        self._data_rank, self._data_size, self._data_group = data_rank, data_size, data_group
        self._grown: tuple[Sequence[ScoreRequest], Forest] | None = None

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See EvaluatedModel; the trees of the last list of requests are kept for the next time."""
        if self._grown is None or self._grown[0] is not requests:
            self._grown = requests, grow(requests, seq_len=self._seq_len)
        forest = self._grown[1]
        self.tokens_computed += forest.tokens_computed
        return score_requests(
            self._root,
            requests,
            seq_len=self._seq_len,
            eos_id=self._tokenizer.eos_id,
            device=self._device,
            batch_tokens=self._batch_tokens,
            autocast=self._autocast,
            data_rank=self._data_rank,
            data_size=self._data_size,
            data_group=self._data_group,
            forest=forest,
        )

    def generate(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
        """See EvaluatedModel.

        Raises:
            UserError: a row would be longer than the model's learned positions.
        """
        check_lengths(longest_document(decoder_of(self._root).config), prompts)
        self.tokens_computed += sum(len(prompt.tokens) for prompt in prompts)
        return generate_texts(
            prompts,
            self._engine,
            tokenizer=self._tokenizer,
            end_ids=self._end_ids,
            batch_tokens=self._batch_tokens,
            ranks=RankGroup(self._data_rank, self._data_size, self._data_group, self._device),
        )

    def _engine(self, slots: int, length: int) -> SlotEngine:
        rows = DecoderSlots(
            self._root,
            slots=slots,
            length=length,
            n_tokens=self._n_tokens,
            device=self._device,
            autocast=self._autocast,
        )
        return SlotEngine(rows, in_step=True)


def check_lengths(longest: int | None, prompts: Sequence[GenerationPrompt]) -> None:
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


def score_requests(
    root: nn.Module,
    requests: Sequence[ScoreRequest],
    *,
    seq_len: int,
    eos_id: int,
    device: torch.device,
    batch_tokens: int,
    autocast: Autocast,
    data_rank: int = 0,
    data_size: int = 1,
    data_group: dist.ProcessGroup | None = None,
    forest: Forest | None = None,
) -> list[Score]:
    """A score for each request, the same list on every rank.

    Args:
        root: `Root`, as it is or wrapped by DDP or FSDP.
        requests: inputs of at most seq_len tokens.
        seq_len: longest input, in tokens.
        eos_id: fills the rest of a row.
        device: where the model is.
        batch_tokens: tokens in a forward pass at most, but one row always.
        autocast: makes the context of the forward pass.
        data_rank: this process among those that have different rows; all must take part.
        data_size: their number.
        data_group: they; None: all processes.
        forest: of these requests, where it was grown before; its counts say what was computed.
    """
    forest = forest or grow(requests, seq_len=seq_len)
    assert forest.n_requests == len(requests), "a forest of other requests"
    pending: list[tuple[_Call, Tensor]] = []
    was_training = root.training
    root.eval()
    with torch.no_grad():
        for share in deal(forest.rows, batch_tokens, data_rank, data_size):
            call = _call(forest, requests, share, eos_id)
            with autocast():
                layout = call.layout.to(device)
                pending.append((call, root(call.tokens.to(device), layout, _finish(call, device))))
    root.train(was_training)
    numbers = _by_request(pending, len(requests))  # only now, so that no call waits for the last
    if dist.is_initialized() and data_size > 1:
        numbers = numbers.to(device)
        dist.all_reduce(numbers, group=data_group)
    return _read(numbers.cpu(), requests)


@dataclass(frozen=True)
class _Call:
    """One forward pass of one rank, on the host.

    Attributes:
        tokens: (B, T).
        layout: its trees.
        places: (P,) flat places b * T + t whose next token is scored, each once.
        targets: (S,) tokens that are scored, in the order of their places.
        indices: (S,) which of `places` predicts a target.
        requests: (S,) whose target it is.
        chunks: head calls, the same number on every rank.
    """

    tokens: Tensor
    layout: PackedLayout
    places: Tensor
    targets: Tensor
    indices: Tensor
    requests: Tensor
    chunks: int


@dataclass(frozen=True)
class RankShare:
    """What one rank has of a call.

    Attributes:
        rows: its rows; what is missing to `height` is empty.
        height: rows of the call, on every rank.
        width: tokens of each.
        chunks: head calls, on every rank.
    """

    rows: list[TreeRow]
    height: int
    width: int
    chunks: int


def deal(
    rows: list[TreeRow], batch_tokens: int, data_rank: int, data_size: int
) -> Iterator[RankShare]:
    """This rank's share of each call; heights and widths agree over ranks.

    Widest rows first, those with most attention first among equals, dealt to and fro, so that ranks
    have about equal work. Where the rows of one width do not come out even, narrower ones are
    widened; only the last call may have empty rows.
    """
    order = sorted(rows, key=lambda row: (-row.width, -row.work, row.start))
    at = 0
    while at < len(order):
        width = order[at].width
        same = sum(row.width == width for row in order[at:])
        per_rank = -(-same // data_size)
        calls = -(-per_rank // max(1, batch_tokens // width))
        for n in range(calls):
            height = (per_rank * (n + 1)) // calls - (per_rank * n) // calls
            group = order[at : at + height * data_size]
            at += len(group)
            shares: list[list[TreeRow]] = [[] for _ in range(data_size)]
            for i, row in enumerate(group):
                shares[_owner(i, data_size)].append(row)
            most = max(sum(row.targets for row in share) for share in shares)
            yield RankShare(shares[data_rank], height, width, max(1, -(-most // HEAD_CHUNK)))


def _owner(index: int, data_size: int) -> int:
    """The rank that is dealt a row: 0, 1, 2, 2, 1, 0, 0, … of three."""
    turn, place = divmod(index, data_size)
    return place if turn % 2 == 0 else data_size - 1 - place


def _call(forest: Forest, requests: Sequence[ScoreRequest], share: RankShare, eos_id: int) -> _Call:
    """Write out a share: rows, then the places that are scored, those of several requests once."""
    shape = (share.height, share.width)
    tokens, ends, table = write_rows(forest, share.rows, requests, shape=shape, fill=eos_id)
    padding = [share.width - row.used for row in share.rows]
    padding += [share.width] * (share.height - len(padding))
    places, indices = torch.unique_consecutive(table[:, 0], return_inverse=True)
    layout = PackedLayout.from_ends(ends, tuple(padding))
    return _Call(tokens, layout, places, table[:, 1], indices, table[:, 2], share.chunks)


def write_rows(
    forest: Forest,
    rows: Sequence[TreeRow],
    requests: Sequence[ScoreRequest],
    *,
    shape: tuple[int, int],
    fill: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as the model reads them, on the host.

    Args:
        forest: whose rows.
        rows: at most B of them, of at most T tokens.
        requests: the forest's.
        shape: (B, T).
        fill: token of what is left over, each of which sees itself alone.

    Returns:
        (B, T) tokens; (B, T) where the part of each ends; (S, 3) for each target, in the order of
        places, the flat place b * T + t that predicts it, itself, and the number of its request.
    """
    height, width = shape
    tokens = torch.full(shape, fill)
    ends = torch.arange(1, width + 1).repeat(height, 1)
    scored: list[tuple[int, int, int]] = []
    for b, row in enumerate(rows):
        written = write_row(forest, row, requests)
        tokens[b, : row.used] = torch.tensor(written.tokens)
        ends[b, : row.used] = torch.tensor(written.ends)
        for number, places in zip(written.requests, written.places, strict=True):
            targets = zip(places, requests[number].targets, strict=True)
            scored += [(b * width + place, target, number) for place, target in targets]
    return tokens, ends, torch.tensor(sorted(scored), dtype=torch.int64).view(-1, 3)


def _finish(call: _Call, device: torch.device) -> Callable[[Decoder, Tensor], Tensor]:
    """What happens inside the model's forward pass: the head, at scored places only.

    It gives what `score_targets` says of each target. Logits are computed in fp32 whatever the
    model's precision: those of bf16 are so coarse that the first two tokens often tie.
    """
    parts = call.places.tensor_split(call.chunks)
    first = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)  # place of each part
    counts = torch.diff(torch.searchsorted(call.indices, first)).tolist()
    targets = call.targets.to(device).split(counts)
    indices = (call.indices - first[:-1].repeat_interleave(torch.tensor(counts))).to(device)
    places = call.places.to(device).tensor_split(call.chunks)

    def finish(model: Decoder, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        with torch.autocast(device.type, enabled=False):
            found = [
                score_targets(model.head(flat[place].float()), target, index)
                for place, target, index in zip(places, targets, indices.split(counts), strict=True)
            ]
        return torch.cat(found)

    return finish


def score_targets(logits: Tensor, targets: Tensor, indices: Tensor) -> Tensor:
    """(S, 4) for each target, of logits (P, V) in row indices[s], which are overwritten.

    Its log-probability, that of the likeliest token, whether another is likelier, and whether the
    likeliest is not alone.
    """
    logits -= logits.amax(1, keepdim=True)
    chosen = logits[indices, targets]
    crowded = (logits == 0).sum(1) > 1
    best = -logits.exp_().sum(1).log()
    columns = [chosen + best[indices], best[indices], chosen != 0, crowded[indices]]
    return torch.stack([column.float() for column in columns], dim=1)


def _by_request(pending: list[tuple[_Call, Tensor]], n: int) -> Tensor:
    """What this rank found, (n, 7) in float64 on the host; 0 for requests of other ranks.

    Sums over a request's targets of what `_finish` gives, of their probabilities, and of 1; then
    the least log-probability of the likeliest token. All targets of a request are on one rank.
    """
    sums = torch.zeros(n, 6, dtype=torch.float64)
    least = torch.full((n,), torch.inf, dtype=torch.float64)
    for call, on_device in pending:
        found = on_device.cpu().double()
        more = [found[:, :1].exp(), torch.ones(len(found), 1)]
        sums.index_add_(0, call.requests, torch.cat([found, *more], dim=1))
        least.scatter_reduce_(0, call.requests, found[:, 1], "amin")
    least.masked_fill_(sums[:, 5] == 0, 0)
    return torch.cat([sums, least[:, None]], dim=1)


def _read(numbers: Tensor, requests: Sequence[ScoreRequest]) -> list[Score]:
    """Scores from what `_by_request` gives, all ranks together."""
    scores = []
    for request, row in zip(requests, numbers.tolist(), strict=True):
        logprob, best, beaten, crowded, probability, scored, least = row
        assert scored == len(request.targets), "every target is scored once"
        first, alone = beaten == 0, crowded == 0
        scores.append(
            Score(
                logprob,
                greedy=first and alone,
                tied=first and not alone,
                best_logprob=best,
                mean_probability=probability / scored,
                least_best=math.exp(least),
            )
        )
    return scores


MakeEngine = Callable[[int, int], SlotEngine]
"""From slots and their length."""


@dataclass(frozen=True)
class RankGroup:
    """The processes that share the prompts among them.

    Attributes:
        rank: this one.
        size: their number.
        group: they; None: all processes.
        device: where what they exchange is; None: nothing is.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None

    def any(self, mine: bool) -> bool:
        """Whether it is so on any of them."""
        if self.size == 1:
            return mine
        shared = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return bool(shared)

    def all_of(self, mine: dict[int, Any]) -> dict[int, Any]:
        """What all of them have."""
        if self.size == 1:
            return mine
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, mine, group=self.group)
        return {number: value for part in parts for number, value in part.items()}


ALONE = RankGroup()


class _Answer:
    """What is written after one prompt."""

    def __init__(self, prompt: GenerationPrompt, tokenizer: Tokenizer) -> None:
        assert all(prompt.stops), "an empty stop would end every text"
        self._stops, self._tokenizer = prompt.stops, tokenizer
        self._tokens: list[int] = []
        self._longest_stop = max((len(stop.encode()) for stop in prompt.stops), default=0)

    @property
    def text(self) -> str:
        """Without special tokens, as transformers and servers write it, and up to a stop."""
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return until_stop(text, self._stops)

    def take(self, token: int) -> bool:
        """Add a token; whether a stop ends in it, which may be a special token's text.

        Few tokens are decoded, as many as a stop can stretch over and one more, until they hold
        one; then all, for decoders spell the first token of a text in a way of its own.
        """
        self._tokens.append(token)
        parts = (self._tokens[-(self._longest_stop + 2) :], self._tokens)
        return bool(self._stops) and all(
            any(stop in text for stop in self._stops) for text in map(self._tokenizer.decode, parts)
        )


def generate_texts(
    prompts: Sequence[GenerationPrompt],
    make_engine: MakeEngine,
    *,
    tokenizer: Tokenizer,
    end_ids: Collection[int],
    batch_tokens: int,
    ranks: RankGroup = ALONE,
    in_step: bool = True,
) -> list[str]:
    """The likeliest continuation of each prompt, token by token; the same list on every rank.

    It ends before the prompt's first stop or an end-of-text token, or after max_new_tokens.

    Args:
        prompts: of any length and order; those that write nothing have no text.
        make_engine: the model.
        tokenizer: the model's.
        end_ids: tokens that end a text.
        batch_tokens: slots of a rank times their length, at most; one slot there always is.
        ranks: this process among those that have different prompts; all must take part.
        in_step: the model is sharded over ranks: all of them must make the same forward passes.

    Raises:
        FloatingPointError: logits were not finite, so that nothing is the likeliest; on every rank.
    """
    found: dict[int, str | None] = {}
    for members, length in _classes(prompts):
        mine = members[ranks.rank :: ranks.size]
        slots = max(1, min(batch_tokens // length, -(-len(members) // ranks.size)))
        engine = make_engine(slots, length)
        answers = {i: _Answer(prompts[i], tokenizer) for i in mine}
        asked = {engine.add(_request(prompts[i], end_ids)): i for i in mine}
        broken = set()
        while ranks.any(engine.busy) if in_step else engine.busy:
            for one in engine.step():
                i = asked[one.request]
                if one.token is not None and answers[i].take(one.token):
                    engine.cancel(one.request)
                broken |= {i} if one.finish == "error" else set()
        found |= {i: None if i in broken else answer.text for i, answer in answers.items()}
        del engine  # before the next takes memory
    found = ranks.all_of(found)
    if count := sum(text is None for text in found.values()):
        raise FloatingPointError(
            f"the logits after {count} of {len(prompts)} prompts are not finite numbers"
        )
    return [found.get(i) or "" for i in range(len(prompts))]


def _request(prompt: GenerationPrompt, end_ids: Collection[int]) -> Wanted:
    return Wanted(prompt.tokens, prompt.max_new_tokens, stop_ids=frozenset(end_ids))


def _classes(prompts: Sequence[GenerationPrompt]) -> Iterator[tuple[list[int], int]]:
    """Prompts that share an engine, and the length that its slots need; the longest first.

    Slots are at most twice as long as what is in them. Those that begin alike are adjacent, so that
    most of a beginning is still there when the next comes.
    """
    ends = {
        i: len(prompt.tokens) + prompt.max_new_tokens
        for i, prompt in enumerate(prompts)
        if prompt.max_new_tokens > 0
    }
    while ends:
        longest = max(ends.values())
        members = [i for i, end in ends.items() if 2 * end > longest]
        yield sorted(members, key=lambda i: (prompts[i].tokens, i)), longest
        for i in members:
            del ends[i]

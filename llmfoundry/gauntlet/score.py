"""Log-probabilities of requests under a model, packed so that little padding is computed.

`Gauntlet.run` calls `score_requests`. Requests become documents (equal inputs only once), documents
fill rows of max_seq_len, rows are dealt over ranks, and every rank makes the same calls of the same
shape. Which requests share a row depends neither on the batch size nor on the number of ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.gauntlet.prompts import Request
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.layout import Layout

HEAD_CHUNK = 1024  # scored places per head call; fp32 logits of a 100k vocabulary: 400 MB

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Score:
    """What a model says about one request.

    Attributes:
        logprob: natural log of the probability of all targets, in order.
        greedy: every target is strictly likelier than all other tokens.
        tied: every target is among the likeliest tokens, but for at least one it is not alone.
    """

    logprob: float
    greedy: bool
    tied: bool


@dataclass(frozen=True)
class _Document:
    tokens: tuple[int, ...]
    requests: list[int]


@dataclass(frozen=True)
class _Call:
    """One forward pass of one rank, on the host.

    Attributes:
        tokens: (B, T).
        layout: its documents.
        places: (S,) flat positions b * T + t whose next token is scored, request by request.
        targets: (S,) those next tokens.
        requests: (request, number of its places), in the order of `places`.
        chunks: head calls, the same number on every rank.
    """

    tokens: Tensor
    layout: Layout
    places: Tensor
    targets: Tensor
    requests: list[tuple[int, int]]
    chunks: int


def score_requests(
    root: nn.Module,
    requests: Sequence[Request],
    *,
    seq_len: int,
    eos_id: int,
    device: torch.device,
    batch_rows: int,
    autocast: Autocast,
    rank: int = 0,
    world_size: int = 1,
) -> list[Score]:
    """A score for each request, the same list on every rank.

    Args:
        root: `Root`, as it is or wrapped by DDP or FSDP.
        requests: inputs of at most seq_len tokens.
        seq_len: tokens in a packed row, T.
        eos_id: fills the rest of a row, as a document of its own.
        device: where the model is.
        batch_rows: rows in a forward pass at most.
        autocast: makes the context of the forward pass.
        rank: this process; must take part together with all others.
        world_size: number of processes.
    """
    rows = pack(_documents(requests), seq_len)
    found: list[tuple[int, Score]] = []
    pending = []
    was_training = root.training
    root.eval()
    with torch.no_grad():
        for call in _calls(rows, requests, seq_len, eos_id, batch_rows, rank, world_size):
            with autocast():
                layout = call.layout.to(device)
                pending.append((call, root(call.tokens.to(device), layout, _finish(call, device))))
    root.train(was_training)
    for call, (logprobs, above, equal) in pending:  # only now, so that no call waits for the last
        found.extend(_read(call, logprobs.cpu().double(), above.cpu(), equal.cpu()))
    if dist.is_initialized() and world_size > 1:
        parts: list[Any] = [None] * world_size
        dist.all_gather_object(parts, found)
        found = [entry for part in parts for entry in part]
    assert len(found) == len(requests), "every request is scored once"
    return [score for _, score in sorted(found, key=lambda entry: entry[0])]


def pack(documents: list[_Document], seq_len: int) -> list[list[_Document]]:
    """Rows of at most seq_len tokens: longest document first, each into the fullest row it fits."""
    rows: list[list[_Document]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for document in sorted(documents, key=lambda d: -len(d.tokens)):
        length = len(document.tokens)
        assert length <= seq_len, "requests are cut to seq_len before"
        at = bisect.bisect_left(spaces, (length, 0))
        if at < len(spaces):
            space, row = spaces.pop(at)
            rows[row].append(document)
        else:
            space, row = seq_len, len(rows)
            rows.append([document])
        bisect.insort(spaces, (space - length, row))
    return rows


def _documents(requests: Sequence[Request]) -> list[_Document]:
    """Distinct inputs: choices of one token, for instance, all follow the same one."""
    documents: dict[tuple[int, ...], _Document] = {}
    for i, request in enumerate(requests):
        documents.setdefault(request.tokens, _Document(request.tokens, [])).requests.append(i)
    return list(documents.values())


def _calls(
    rows: list[list[_Document]],
    requests: Sequence[Request],
    seq_len: int,
    eos_id: int,
    batch_rows: int,
    rank: int,
    world_size: int,
) -> Iterator[_Call]:
    """This rank's calls: their number, their shape and their head calls agree over ranks."""
    most = -(-len(rows) // world_size)
    n_calls = -(-most // batch_rows)
    per_call = -(-most // n_calls)  # evened out, so that few empty rows are computed
    for start in range(0, n_calls * per_call * world_size, per_call * world_size):
        group = rows[start : start + per_call * world_size]
        scored = max(_n_places(group[r::world_size], requests) for r in range(world_size))
        mine = group[rank::world_size]
        mine += [[]] * (per_call - len(mine))
        yield _call(mine, requests, seq_len, eos_id, chunks=max(1, -(-scored // HEAD_CHUNK)))


def _n_places(rows: list[list[_Document]], requests: Sequence[Request]) -> int:
    return sum(len(requests[i].targets) for row in rows for d in row for i in d.requests)


def _call(
    rows: list[list[_Document]],
    requests: Sequence[Request],
    seq_len: int,
    eos_id: int,
    *,
    chunks: int,
) -> _Call:
    tokens: list[int] = []
    places: list[int] = []
    targets: list[int] = []
    lengths: list[list[int]] = []
    padding: list[int] = []
    members: list[tuple[int, int]] = []
    for row in rows:
        row_lengths = [len(document.tokens) for document in row]
        for document in row:
            tokens.extend(document.tokens)
            for i in document.requests:
                n = len(requests[i].targets)
                places.extend(range(len(tokens) - n, len(tokens)))
                targets.extend(requests[i].targets)
                members.append((i, n))
        padding.append(seq_len - sum(row_lengths))
        if rest := padding[-1]:
            tokens.extend([eos_id] * rest)
            row_lengths.append(rest)
        lengths.append(row_lengths)
    return _Call(
        torch.tensor(tokens).view(len(rows), seq_len),
        Layout.from_lengths(lengths, tuple(padding)),
        torch.tensor(places, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        members,
        chunks,
    )


def _finish(
    call: _Call, device: torch.device
) -> Callable[[Decoder, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """What happens inside the model's forward pass: the head, at scored places only.

    It gives for each place the target's log-probability and how many tokens have a higher, and an
    equal, logit. Logits are computed in fp32 whatever the model's precision: those of bf16 are so
    coarse that the first two tokens often tie.
    """
    places, targets = call.places.to(device), call.targets.to(device)

    def finish(model: Decoder, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scored = hidden.flatten(0, 1)[places]
        logprobs, above, equal = [], [], []
        with torch.autocast(device.type, enabled=False):
            for x, target in zip(
                scored.tensor_split(call.chunks), targets.tensor_split(call.chunks), strict=True
            ):
                logits = model.head(x.float())
                chosen = logits.gather(1, target[:, None])
                logprobs.append((chosen - logits.logsumexp(1, keepdim=True)).squeeze(1))
                above.append((logits > chosen).sum(1))
                equal.append((logits == chosen).sum(1))
        return torch.cat(logprobs), torch.cat(above), torch.cat(equal)

    return finish


def _read(
    call: _Call, logprobs: Tensor, above: Tensor, equal: Tensor
) -> Iterator[tuple[int, Score]]:
    """Scores of a call's requests from the numbers of its places, all on the host."""
    at = 0
    for i, n in call.requests:
        part = slice(at, at + n)
        at += n
        first = bool((above[part] == 0).all())
        alone = bool((equal[part] == 1).all())
        yield i, Score(float(logprobs[part].sum()), first and alone, first and not alone)

"""`HuggingFaceSubject`: log-probabilities and continuations of a causal LM of transformers.

`load_hugging_face` makes it. Inputs that begin alike are branches of one row (`tree`), by a mask
and positions, as in our own model. Not every class of transformers honours these, and none says so:
what a class can do is tried out, and what it cannot is done row by row, and told in `notes`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from llmfoundry.gauntlet.models import tree
from llmfoundry.gauntlet.models.hugging_face_generation import (
    Continuer,
    dealt,
    gathered,
    random_tokens,
)
from llmfoundry.gauntlet.models.own import HEAD_CHUNK, judge, write_rows
from llmfoundry.gauntlet.models.tree import Forest, TreeRow
from llmfoundry.gauntlet.questions import Prompt, Request, Score
from llmfoundry.ops.layout import Layout

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

ROW = 1024
"""Tokens of a row of branches, if no request is longer. transformers' attention computes all pairs
of a row, masked or not, so that longer rows save less than they cost."""
SAMPLE = 16
"""Requests of a row that are scored on their own, too, to see whether it can be believed."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""By the dtype of the weights: nats in 8 tokens by which a request may differ between a row of
branches and a row of its own. bf16 rounds that much; a mask that is ignored costs several."""


class HuggingFaceSubject:
    """A causal LM of transformers; a `EvaluatedModel`. Each process has the whole model.

    Attributes:
        model: transformers' object.
        seq_len: tokens that it reads at most.
        notes: what its class cannot do, and what is done instead.
        can_score: True; see EvaluatedModel.
        tokens_computed: see EvaluatedModel; of all ranks together.
    """

    can_score = True

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        batch_tokens: int,
        autocast: bool = False,
    ) -> None:
        """Find out what the model's class can do, by a few short forward passes.

        Args:
            model: on its device; in evaluation mode from now on.
            tokenizer: the model's.
            seq_len: see above.
            batch_tokens: tokens in a forward pass, padding included; one row always goes.
            autocast: compute matrix products in bf16.
        """
        self.model, self.seq_len = model.eval(), seq_len
        self.notes: list[str] = []
        self.tokens_computed = 0
        self._tokenizer, self._batch_tokens, self._autocast = tokenizer, batch_tokens, autocast
        self._device = next(model.parameters()).device
        self._tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
        self._continuer: Continuer | None = None  # made by the first `generate`
        self._body, self._head = _split(model, random_tokens(model, tokenizer, 8))
        self._keeps = self._body is None and _keeps(model, random_tokens(model, tokenizer, 8))
        self._shares, self._proven = True, (0, 0)  # (row, request) lengths that were right
        self._try_branches()

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """A score for each request, in order; the same list on every rank.

        Which requests share a forward pass depends on neither rank nor number of ranks.
        """
        forest = _branched(tree.grow(requests, seq_len=self.seq_len))
        if self._shares and requests:
            self._prove(forest, requests)
        forest = forest if self._shares else _alone(forest)
        batches = _batches(forest.rows, self._batch_tokens)
        self.tokens_computed += sum(len(rows) * rows[0].used for rows in batches)
        sums: dict[int, list[float]] = {}
        for rows in dealt(batches):
            sums |= self._score(
                forest, rows, requests, shares=self._shares, autocast=self._autocast
            )
        sums = gathered(sums)
        assert len(sums) == len(requests), "every request is scored once"
        return [_read(sums[i]) for i in range(len(requests))]

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """The greedy continuation of each prompt, cut before its first stop; all on every rank.

        A text that reaches seq_len ends there.

        Raises:
            FloatingPointError: logits were not finite, so that nothing is the likeliest.
        """
        if self._continuer is None:
            self._continuer = Continuer(
                self.model,
                self._tokenizer,
                seq_len=self.seq_len,
                batch_tokens=self._batch_tokens,
                autocast=self._autocast,
                tolerance=self._tolerance,
            )
            self.notes += [self._continuer.note] if self._continuer.note else []
        self.tokens_computed += sum(len(prompt.tokens) for prompt in prompts)
        return self._continuer.generate(prompts)

    def _try_branches(self) -> None:
        """Whether the model's class takes rows of branches at all: a small tree of random text."""
        a = random_tokens(self.model, self._tokenizer, 40)
        texts = [a[:16], a[:8] + a[16:24], a[:8] + a[16:20] + a[24:32], a[32:], a[:4] + a[32:]]
        requests = [Request(tuple(text[:-1]), tuple(text[-4:]), "") for text in texts]
        forest = _branched(tree.grow(requests, seq_len=self.seq_len))
        try:
            worst = self._error(forest, forest.rows[0], requests)
        except Exception as error:  # a class that refuses masks or positions says so as it likes
            self._give_up(f"it refuses their mask ({' '.join(str(error).split())[:100]})")
            return
        if worst > self._tolerance:
            self._give_up(f"it ignores their mask or positions (off by {worst:.1g} nats)")

    def _prove(self, forest: Forest, requests: Sequence[Request]) -> None:
        """Check rows that are longer, or hold a longer request, than any before.

        What a class does by places in the row shows in the longest row, and what it does to texts
        far apart with the longest request.
        """
        fullest = max(forest.rows, key=lambda row: row.used)
        lengths = [max(map(len, forest.inputs[row.start : row.stop])) for row in forest.rows]
        longest = max(lengths)
        if fullest.used <= self._proven[0] and longest <= self._proven[1]:
            return
        rows = [fullest, forest.rows[lengths.index(longest)]]
        worst = max(self._error(forest, row, requests) for row in rows)
        if worst > self._tolerance:
            self._give_up(f"it limits attention in some way (off by {worst:.1g} nats)")
        self._proven = max(fullest.used, self._proven[0]), max(longest, self._proven[1])

    def _error(self, forest: Forest, row: TreeRow, requests: Sequence[Request]) -> float:
        """Nats in 8 tokens by which requests of a row differ from the same on their own, at most.

        Of many, SAMPLE are looked at: the longest, and others all along the row.
        """
        inside = range(row.start, row.stop)
        inputs = {max(inside, key=lambda i: len(forest.inputs[i]))}
        inputs |= set(inside[:: -max(1, -(-len(inside) // SAMPLE))])
        numbers = [forest.members[i][0] for i in inputs]
        sample = [requests[i] for i in numbers]
        alone = _alone(tree.grow(sample, seq_len=self.seq_len))
        expected: dict[int, list[float]] = {}
        for rows in _batches(alone.rows, self._batch_tokens):
            expected |= self._score(alone, rows, sample, shares=False, autocast=False)
        found = self._score(forest, [row], requests, shares=True, autocast=False)
        errors = [
            abs(found[number][0] - expected[i][0]) / max(1.0, len(sample[i].targets) / 8)
            for i, number in enumerate(numbers)
        ]
        # where a model is broken, not finite numbers are told of where its answers are graded
        return max((error for error in errors if not math.isnan(error)), default=0.0)

    def _give_up(self, why: str) -> None:
        self._shares = False
        self.notes.append(
            f"{type(self.model).__name__} takes no branches: {why}; each question is read anew for"
            " every choice, which is slower"
        )

    def _score(
        self,
        forest: Forest,
        rows: Sequence[TreeRow],
        requests: Sequence[Request],
        *,
        shares: bool,
        autocast: bool,
    ) -> dict[int, list[float]]:
        """What `judge` gives, summed over each request's targets; by the numbers of requests."""
        width = max(row.used for row in rows)
        shape = (len(rows), width)
        tokens, ends, table = write_rows(forest, rows, requests, shape=shape, fill=0)
        place, target, number = table.T
        inputs: dict[str, Any] = {"input_ids": tokens.to(self._device)}
        if shares:
            inputs["position_ids"] = Layout.from_ends(ends).positions.to(self._device)
            inputs["attention_mask"] = self._masks(ends.to(self._device), inputs["position_ids"])
        judged = self._judged(inputs, place, target, autocast=autocast)
        numbers, index = number.unique(return_inverse=True)
        sums = judged.new_zeros(len(numbers), 4).index_add_(0, index, judged)
        return dict(zip(numbers.tolist(), sums.tolist(), strict=True))

    def _masks(self, ends: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """(B, 1, T, T) who sees whom, added to scores; where layers' windows differ, by their kind.

        Classes take a mask as it is, and leave their windows to it.
        """
        at = torch.arange(ends.shape[1], device=ends.device)
        seen = (at[None, :] <= at[:, None]) & (at[None, :, None] < ends[:, None, :])  # (B, q, k)
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
        if not window or "sliding_attention" not in kinds:
            return _added(seen, self.model.dtype)
        near = _added(
            seen & (positions[:, :, None] - positions[:, None, :] < window), self.model.dtype
        )
        if kinds == {"sliding_attention"}:
            return near
        return {"full_attention": _added(seen, self.model.dtype), "sliding_attention": near}

    @torch.no_grad()
    def _judged(
        self, inputs: dict[str, Any], places: Tensor, targets: Tensor, *, autocast: bool
    ) -> Tensor:
        """`judge` of each target (S, 4), float64 on the host; each place goes to the head once."""
        width = inputs["input_ids"].shape[1]
        places, index = places.to(self._device).unique(return_inverse=True)
        targets = targets.to(self._device)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=autocast):
            if self._body is not None:
                found = self._body(**inputs, use_cache=False)[0].flatten(0, 1)[places]
            else:
                row, column = places // width, places % width
                kept: dict[str, Tensor] = {}
                if self._keeps:
                    kept["logits_to_keep"], column = column.unique(return_inverse=True)
                found = self.model(**inputs, **kept, use_cache=False).logits[row, column]
        judged = torch.zeros(len(targets), 4, device=self._device)
        for n, chunk in enumerate(found.float().split(HEAD_CHUNK)):
            mine = index // HEAD_CHUNK == n
            logits = chunk if self._head is None else self._head(chunk)
            judged[mine] = judge(logits, targets[mine], index[mine] % HEAD_CHUNK)
        return judged.double().cpu()


def _split(model: Any, tokens: list[int]) -> tuple[nn.Module | None, nn.Module | None]:
    """The model without its head, and the head in fp32; None twice if it is not just that.

    Between them, some classes scale or cap logits.
    """
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or not isinstance(head, nn.Linear):
        return None, None
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits.float()
        try:
            hidden = body(input_ids=ids, use_cache=False)[0]
        except Exception:  # a body that needs what only the whole gives it
            return None, None
        if hidden.shape[-1] != head.in_features or not torch.allclose(
            head(hidden).float(), whole, rtol=1e-5, atol=1e-6, equal_nan=True
        ):
            return None, None
    return body, head if head.weight.dtype == torch.float32 else copy.deepcopy(head).float()


def _keeps(model: Any, tokens: list[int]) -> bool:
    """Whether the class can compute logits in chosen columns only."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return False
    device = next(model.parameters()).device
    ids, columns = torch.tensor([tokens], device=device), torch.tensor([1, 3], device=device)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, columns]
        try:
            some = model(input_ids=ids, use_cache=False, logits_to_keep=columns).logits
        except Exception:  # some classes take a number only
            return False
    return some.shape == whole.shape and torch.allclose(some, whole, atol=1e-2, equal_nan=True)


def _branched(forest: Forest) -> Forest:
    """The forest in rows of about ROW tokens."""
    lengths = np.array([len(tokens) for tokens in forest.inputs], dtype=np.int64)
    longest = max(ROW, int(lengths.max(initial=0)))
    widths = [-(-longest * n // 16) for n in range(1, 17)]
    return replace(forest, rows=tree.cut(lengths, forest.shared, np.zeros_like(lengths), widths))


def _alone(forest: Forest) -> Forest:
    """The forest with a row for each input, and for those that are its beginning."""
    rows, start = [], 0
    for i, tokens in enumerate(forest.inputs, start=1):
        if i == len(forest.inputs) or forest.shared[i] < len(tokens):
            n = len(tokens)
            rows.append(TreeRow(start, i, n, n, n * (n + 1) // 2, 0))
            start = i
    return replace(forest, rows=rows)


def _batches(rows: Sequence[TreeRow], batch_tokens: int) -> list[list[TreeRow]]:
    """Rows of similar length, the longest first."""
    batches: list[list[TreeRow]] = []
    most = 0
    for row in sorted(rows, key=lambda row: (-row.used, row.start)):
        if not batches or len(batches[-1]) >= most:
            batches.append([])
            most = max(1, batch_tokens // row.used)
        batches[-1].append(row)
    return batches


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T) what attention scores need added so that only `seen` (B, T, T) counts."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _read(sums: list[float]) -> Score:
    """The score of a request from the sums of `judge`'s four numbers."""
    logprob, best, beaten, crowded = sums
    return Score(logprob, beaten == crowded == 0, beaten == 0 and crowded > 0, best)

"""`HuggingFaceModel`: scores and continuations by transformers' own class.

`hugging_face.py` makes it, for models that the decoder does not express. What a class can do with
masks, positions and caches is not asked: texts of a batch are padded behind their end, where no
causal model looks, and only prompts of one length are continued together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.gauntlet.metrics import until_stop
from llmfoundry.gauntlet.models.own import HEAD_CHUNK, score_targets
from llmfoundry.gauntlet.questions import Prompt, Request, Score

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

T = TypeVar("T")
Batch = TypeVar("Batch")


class HuggingFaceModel:
    """A causal LM of transformers; an EvaluatedModel. Each process has the whole model.

    Attributes:
        model: transformers' object.
        seq_len: tokens that it reads at most.
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
        """Take over the model.

        Its own settings of `generate` are replaced, all but the tokens that end a text: they may
        ask for sampling, or for penalties on repetition, which would not be greedy.

        Args:
            model: on its device; in evaluation mode from now on.
            tokenizer: the model's.
            seq_len: see above.
            batch_tokens: tokens in a forward pass, padding included; one row always goes.
            autocast: compute matrix products in bf16.
        """
        from transformers import GenerationConfig

        self.model, self.seq_len = model.eval(), seq_len
        self.tokens_computed = 0
        self._tokenizer, self._batch_tokens, self._autocast = tokenizer, batch_tokens, autocast
        self._device = next(model.parameters()).device
        self._end_ids = end_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        model.generation_config = GenerationConfig()
        keep = inspect.signature(model.forward).parameters.get("logits_to_keep")
        self._takes_columns = keep is not None and "Tensor" in str(keep.annotation)
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        # whose angles depend on the length of the whole row
        self._pads = rope.get("rope_type") not in ("dynamic", "longrope")

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """A score for each request, in order; the same list on every rank.

        Which texts share a forward pass depends on neither rank nor number of ranks.
        """
        readers: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            readers.setdefault(request.tokens, []).append(i)
        batches = list(self._batches(readers, len, pads=self._pads))
        self.tokens_computed += sum(len(batch) * len(batch[0]) for batch in batches)
        found: dict[int, Score] = {}
        with self._exact_head():
            for batch in _dealt(batches):
                asked = [(row, i) for row, tokens in enumerate(batch) for i in readers[tokens]]
                found |= self._score(batch, asked, requests)
        found = _gathered(found)
        assert len(found) == len(requests), "every request is scored once"
        return [found[i] for i in range(len(requests))]

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """The greedy continuation of each prompt, cut before its first stop; all on every rank.

        A text that reaches seq_len ends there.

        Raises:
            FloatingPointError: logits were not finite, so that nothing is the likeliest.
        """
        assert all(0 < len(p.tokens) <= self.seq_len for p in prompts), "prompts are cut before"
        self.tokens_computed += sum(len(prompt.tokens) for prompt in prompts)
        rooms = [min(p.max_new_tokens, self.seq_len - len(p.tokens)) for p in prompts]
        going = [i for i, room in enumerate(rooms) if room > 0]
        longest = max(rooms, default=0)
        batches = self._batches(going, lambda i: len(prompts[i].tokens), more=longest, pads=False)
        found: dict[int, str | None] = {}
        for batch in _dealt(list(batches)):
            texts = self._continue([prompts[i] for i in batch], [rooms[i] for i in batch])
            found |= dict(zip(batch, texts, strict=True))
        found = _gathered(found)
        if broken := sum(text is None for text in found.values()):
            raise FloatingPointError(
                f"the logits after {broken} of {len(prompts)} prompts, or after others in their"
                " batches, are not finite numbers"
            )
        return [found.get(i) or "" for i in range(len(prompts))]

    def _batches(
        self, items: Iterable[Batch], length: Callable[[Batch], int], *, pads: bool, more: int = 0
    ) -> Iterator[list[Batch]]:
        """Items of similar length, or of one where not `pads`, the longest first.

        A row takes `more` tokens beside its length.
        """
        batch: list[Batch] = []
        for item in sorted(items, key=length, reverse=True):
            width = length(batch[0]) if batch else 0
            is_full = (len(batch) + 1) * (width + more) > self._batch_tokens
            if batch and (is_full or (not pads and length(item) != width)):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    @contextmanager
    def _exact_head(self) -> Iterator[None]:
        """Logits are computed in fp32: those of bf16 are so coarse that the first two often tie."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            yield
            return
        weight = head.weight.float()
        bias = None if head.bias is None else head.bias.float()

        def forward(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                return nn.functional.linear(hidden.float(), weight, bias)

        head.forward = forward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del head.forward

    @torch.no_grad()
    def _score(
        self,
        batch: Sequence[tuple[int, ...]],
        asked: Sequence[tuple[int, int]],
        requests: Sequence[Request],
    ) -> dict[int, Score]:
        """Scores of requests by their numbers.

        Args:
            batch: texts, the longest first.
            asked: (row of the batch, number of a request that reads it) each.
            requests: all.
        """
        ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
        for row, tokens in zip(ids, batch, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        table = [
            (row, len(batch[row]) - len(requests[i].targets) + n, target)
            for row, i in asked
            for n, target in enumerate(requests[i].targets)
        ]
        rows, columns, targets = torch.tensor(table, device=self._device).T
        kept: dict[str, Tensor] = {}
        if self._takes_columns:
            kept["logits_to_keep"], columns = columns.unique(return_inverse=True)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            out = self.model(input_ids=ids.to(self._device), use_cache=False, **kept)
        judged = torch.cat(
            [
                score_targets(
                    out.logits[rows[part], columns[part]].float(),
                    targets[part],
                    torch.arange(len(part), device=self._device),
                )
                for part in torch.arange(len(table), device=self._device).split(HEAD_CHUNK)
            ]
        )
        each = judged.double().cpu().split([len(requests[i].targets) for _, i in asked])
        return {i: _read(found) for (_, i), found in zip(asked, each, strict=True)}

    def _continue(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> list[str | None]:
        """What follows each prompt; None for all where logits were not finite."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        ids = torch.tensor([prompt.tokens for prompt in prompts], device=self._device)
        start = ids.shape[1]
        watch = _Watch(prompts, rooms, start, self._tokenizer)
        greedy = GenerationConfig(
            max_new_tokens=max(rooms),
            do_sample=False,
            num_beams=1,
            pad_token_id=self._tokenizer.eos_id,
            eos_token_id=sorted(self._end_ids),
        )
        autocast = torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast)
        with torch.no_grad(), autocast:
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=greedy,
                stopping_criteria=StoppingCriteriaList([watch]),
                logits_processor=LogitsProcessorList([watch.look]),
            )
        if watch.is_broken:
            return [None] * len(prompts)
        texts: list[str | None] = []
        for row, prompt, room in zip(output[:, start:].tolist(), prompts, rooms, strict=True):
            end = next((n for n, t in enumerate(row[:room]) if t in self._end_ids), room)
            texts.append(until_stop(self._tokenizer.decode(row[:end]), prompt.stops))
        return texts


class _Watch:
    """Tells transformers' `generate` which rows are done: by a stop, or by their length."""

    def __init__(
        self, prompts: Sequence[Prompt], rooms: Sequence[int], start: int, tokenizer: Tokenizer
    ) -> None:
        self._stops, self._rooms, self._start = [p.stops for p in prompts], rooms, start
        self._tokenizer = tokenizer
        self._done = [False] * len(prompts)
        self.is_broken = False

    def look(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """A logits processor that changes nothing."""
        self.is_broken |= not bool(logits.amax(-1).isfinite().all())
        return logits

    def __call__(self, tokens: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows are done, (B,)."""
        for b, row in enumerate(tokens[:, self._start :].tolist()):
            if not self._done[b]:
                is_long = len(row) >= self._rooms[b]
                self._done[b] = self.is_broken or is_long or self._stopped(b, row)
        return torch.tensor(self._done, device=tokens.device)

    def _stopped(self, b: int, row: list[int]) -> bool:
        """Whether the newest token completed a stop; only as much is decoded as it can span.

        A token is a byte or more; a few more tokens, because some decoders drop the first space
        and characters may be in pieces.
        """
        if not self._stops[b]:
            return False
        span = max(len(stop.encode()) for stop in self._stops[b]) + 4
        tail = self._tokenizer.decode(row[-span:])
        return any(stop in tail for stop in self._stops[b])


def _read(judged: Tensor) -> Score:
    """The score of a request from `score_targets`'s four numbers of each target (n, 4)."""
    logprob, best, beaten, crowded = judged.sum(0).tolist()
    return Score(
        logprob,
        greedy=beaten == crowded == 0,
        tied=beaten == 0 and crowded > 0,
        best_logprob=best,
        mean_probability=float(judged[:, 0].exp().mean()),
        least_best=float(judged[:, 1].min().exp()),
    )


def end_ids(ids: Any, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: `eos_token_id` as transformers has it, and the tokenizer's."""
    own = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return {*own, tokenizer.eos_id}


def _dealt(batches: Sequence[T]) -> Sequence[T]:
    """This process's part: with batches sorted by cost, each has about as much to do.

    Of all processes, whatever the mesh, not of data ranks: each of them has the whole model.
    """
    if not dist.is_initialized():
        return batches
    return batches[dist.get_rank() :: dist.get_world_size()]


def _gathered(found: dict[int, T]) -> dict[int, T]:
    """What all ranks found."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return found
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return {number: value for part in parts for number, value in part.items()}

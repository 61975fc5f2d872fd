"""`HuggingFaceModel`: scores and continuations by transformers' own class.

For models that the decoder does not express. What is scored is padded
behind its end, where no causal model looks; what is written is the engine's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.gauntlet.models.own_decoder import (
    HEAD_CHUNK,
    RankGroup,
    generate_texts,
    score_targets,
)
from llmfoundry.gauntlet.questions import GenerationPrompt, Score, ScoreRequest
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.inference.hugging_face_slots import HuggingFaceSlots, angles_by_length, end_ids

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer


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

        Of its own settings of `generate` the tokens that end a text count alone: others may ask for
        sampling, or for penalties on repetition, which would not be greedy.

        Args:
            model: on its device; in evaluation mode from now on.
            tokenizer: the model's.
            seq_len: see above.
            batch_tokens: tokens in a forward pass, padding included; one row always goes.
            autocast: compute matrix products in bf16.
        """
        self.model, self.seq_len = model.eval(), seq_len
        self.tokens_computed = 0
        self._tokenizer, self._batch_tokens, self._autocast = tokenizer, batch_tokens, autocast
        self._device = next(model.parameters()).device
        self._end_ids = end_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        self._way: str | None = None  # how its engine runs it, once that was tried
        keep = inspect.signature(model.forward).parameters.get("logits_to_keep")
        self._takes_columns = keep is not None and "Tensor" in str(keep.annotation)
        self._pads = not angles_by_length(model.config)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """A score for each request, in order; the same list on every rank.

        Which texts share a forward pass depends on neither rank nor number of ranks.
        """
        readers: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            readers.setdefault(request.tokens, []).append(i)
        batches = list(self._batches(readers))
        self.tokens_computed += sum(len(batch) * len(batch[0]) for batch in batches)
        found: dict[int, Score] = {}
        ranks = _every_process(self._device)
        with self._exact_head():
            # sorted by cost, so that each process has about as much to do
            for batch in batches[ranks.rank :: ranks.size]:
                asked = [(row, i) for row, tokens in enumerate(batch) for i in readers[tokens]]
                found |= self._score(batch, asked, requests)
        found = ranks.all_of(found)
        assert len(found) == len(requests), "every request is scored once"
        return [found[i] for i in range(len(requests))]

    def generate(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
        """The greedy continuation of each prompt, cut before its first stop; all on every rank.

        A text that reaches seq_len ends there.

        Raises:
            FloatingPointError: logits were not finite, so that nothing is the likeliest.
        """
        assert all(0 < len(p.tokens) <= self.seq_len for p in prompts), "prompts are cut before"
        self.tokens_computed += sum(len(prompt.tokens) for prompt in prompts)
        cut = [
            replace(p, max_new_tokens=min(p.max_new_tokens, self.seq_len - len(p.tokens)))
            for p in prompts
        ]
        return generate_texts(
            cut,
            self._engine,
            tokenizer=self._tokenizer,
            end_ids=self._end_ids,
            batch_tokens=self._batch_tokens,
            ranks=_every_process(self._device),
            in_step=False,
        )

    def _engine(self, slots: int, length: int) -> SlotEngine:
        rows = HuggingFaceSlots(
            self.model, slots=slots, length=length, autocast=self._autocast, way=self._way
        )
        self._way = rows.way
        return SlotEngine(rows)

    def _batches(self, texts: Iterable[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Texts of similar length, or of one where padding changes angles, the longest first."""
        batch: list[tuple[int, ...]] = []
        for item in sorted(texts, key=len, reverse=True):
            width = len(batch[0]) if batch else 0
            is_full = (len(batch) + 1) * width > self._batch_tokens
            if batch and (is_full or (not self._pads and len(item) != width)):
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
        requests: Sequence[ScoreRequest],
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


def _every_process(device: torch.device) -> RankGroup:
    """All processes, whatever the mesh, not data ranks: each of them has the whole model."""
    if not dist.is_initialized():
        return RankGroup()
    return RankGroup(dist.get_rank(), dist.get_world_size(), None, device)

"""`OwnModel`: a model of this house as the gauntlet's subject, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmfoundry.gauntlet.models.generation import generate_texts
from llmfoundry.gauntlet.models.score import Autocast, score_requests
from llmfoundry.gauntlet.models.tree import Forest, grow
from llmfoundry.gauntlet.questions import Prompt, Request, Score

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer


class OwnModel:
    """A Subject.

    Attributes:
        can_score: True; see Subject.
        tokens_computed: see Subject.
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
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Take a model over, which may go on being trained.

        Args:
            root: `Root`, as it is or wrapped by DDP or FSDP.
            tokenizer: the model's.
            seq_len: longest input, in tokens.
            device: where the model is.
            batch_tokens: tokens in a forward pass at most, padding included; one row always goes.
            autocast: makes the context of the forward pass.
            rank: this process.
            world_size: number of processes, all of which must ask the same.
        """
        self.tokens_computed = 0
        self._root, self._tokenizer, self._seq_len = root, tokenizer, seq_len
        self._device, self._batch_tokens, self._autocast = device, batch_tokens, autocast
        self._rank, self._world_size = rank, world_size
        self._grown: tuple[Sequence[Request], Forest] | None = None

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """See Subject; the trees of the last list of requests are kept for the next time."""
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
            rank=self._rank,
            world_size=self._world_size,
            forest=forest,
        )

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """See Subject."""
        self.tokens_computed += sum(len(prompt.tokens) for prompt in prompts)
        return generate_texts(
            self._root,
            prompts,
            tokenizer=self._tokenizer,
            device=self._device,
            batch_tokens=self._batch_tokens,
            autocast=self._autocast,
            rank=self._rank,
            world_size=self._world_size,
        )

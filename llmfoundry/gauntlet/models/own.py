"""`OwnModel`: a model of this house as the gauntlet's subject, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
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
        data_rank: int = 0,
        data_size: int = 1,
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take a model over, which may go on being trained.

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
        """
        self.tokens_computed = 0
        self._root, self._tokenizer, self._seq_len = root, tokenizer, seq_len
        self._device, self._batch_tokens, self._autocast = device, batch_tokens, autocast
        self._data_rank, self._data_size, self._data_group = data_rank, data_size, data_group
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
            data_rank=self._data_rank,
            data_size=self._data_size,
            data_group=self._data_group,
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
            data_rank=self._data_rank,
            data_size=self._data_size,
            data_group=self._data_group,
        )

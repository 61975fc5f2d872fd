"""What generation keeps of a model of transformers: the tokens so far.

Classes differ in what they cache, and how; here every new token is computed with all before it, so
that what is generated is what the class says of the whole text, for every class there is.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RowCache:
    """Tokens of the rows so far, under the interface of `models.attention.KVCache`.

    Attributes:
        length: tokens of each row.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._tokens = torch.empty(batch, 0, dtype=torch.int64, device=device)

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return self._tokens.shape[1]

    def append(self, tokens: Tensor) -> Tensor:
        """Add tokens (B, T); all of them so far."""
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        return self._tokens

    def start_from(self, prefix: RowCache) -> None:
        """Begin every row with the tokens that the one row of another cache holds."""
        self._tokens = prefix._tokens.expand(len(self._tokens), -1)

    def keep(self, rows: list[int]) -> None:
        """Make row i what row rows[i] was, and give the others up."""
        self._tokens = self._tokens[rows]

"""Initial rows of new tokens from the pieces of their text (`model.new_rows: pieces`).

`builders/tokenizer.py` calls `settle_new_rows`, and `begin_adapter` calls `init_new_rows` once the
model has its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.models.adapter import adapted_layers, is_added, set_token_rows
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.shard_layout import assign_rows, full_rows
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe

Pieces = Mapping[int, Sequence[int]]
"""Ids of the tokens that the text of a new token consists of, by its id."""


def settle_new_rows(recipe: ResolvedFinetuneRecipe, pieces: Pieces) -> None:
    """Set `recipe.new_pieces` to the pieces of the tokens that the recipe has added.

    Raises:
        UserError: `model.new_rows` has no effect.
    """
    if recipe.base.new_rows != "pieces":
        return
    reason = None
    if recipe.adapter.pretrained is not None:
        reason = "with adapter.pretrained, whose folder has these rows"
    elif not pieces:
        reason = "as the recipe adds no tokens"
    if reason is not None:
        raise UserError(f"model.new_rows: pieces has no effect {reason}; remove it")
    recipe.new_pieces = {token: ids for token, ids in pieces.items() if ids}


@torch.no_grad()
def init_new_rows(model: Decoder, pieces: Pieces) -> None:
    """Set the rows of new tokens to the mean of the rows of their pieces. A collective call.

    If an adapter trains single rows of a table, it gets the change, and the base stays.
    """
    # in the base
    by_token = {name for name, _, _, lora in adapted_layers(model) if lora.tokens}
    for name in sorted(model.vocabulary()):
        if name.rpartition(".")[0] not in by_token and not is_added(name):
            table = model.get_parameter(name)
            assign_rows(table, [*pieces], _means(table, pieces))

    # in the adapter
    for _, module, _, lora in adapted_layers(model):
        if not lora.tokens:
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        rows, means = full_rows(weight, lora.tokens).float(), _means(weight, pieces)
        for token, mean in zip(pieces, means, strict=True):
            rows[lora.tokens.index(token)] = mean
        set_token_rows(module, rows)


def _means(table: Tensor, pieces: Pieces) -> Tensor:
    """Return the mean row of the pieces of each token, (len(pieces), ...), fp32."""
    lengths = [len(ids) for ids in pieces.values()]
    every_piece = [piece for ids in pieces.values() for piece in ids]
    rows = full_rows(table, every_piece).double()
    return torch.stack([part.mean(0) for part in rows.split(lengths)]).float()

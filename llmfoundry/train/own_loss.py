"""A loss that a plugin or a program defines, as an objective of the training step.

Entry point: `OwnLoss`. The function `loss(model, batch)` runs inside the forward pass of a
microbatch, in the recipe's precision. `model` is a `LossModel` and `batch` an
`ops.packed_layout.Batch`: tokens and labels (B, T), with label -100 where no token is predicted.
The function returns one of these forms:

- losses (B, T), one for each token: the loss is the mean over labeled tokens, by `batch.weights`
  if the batch has them. Values at other tokens are ignored.
- losses (B,), one for each sequence: the loss is the mean over sequences.
- (sum, count): any sum (), and the number that it is divided by.

The mean is exact over the global batch: sums and counts are added over microbatches and ranks
before one is divided by the other. A mean of one microbatch, (), is therefore refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout
from llmfoundry.train.objective import CROSS_ENTROPY, OWN_COUNT, Finish, Look

_FORMS = (
    "return losses (B, T) for tokens, losses (B,) for sequences, or (sum, count); a mean of one"
    " microbatch would not be the mean of the global batch"
)


class LossModel:
    """The model inside a training step.

    Attributes:
        module: the `Decoder`, with `head`, `loss` and `log_probs` of hidden states.
        hidden: (B, T, D), the hidden states of the microbatch's tokens.
    """

    def __init__(self, module: Decoder, hidden: Tensor, batch: Batch) -> None:
        self.module, self.hidden = module, hidden
        self._batch = batch

    def __call__(self, tokens: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return logits (B, T, V).

        For `batch.tokens` they are those of the forward pass of the step, in which packed documents
        attend as the recipe says. Other tokens take another forward pass; without a `layout` each
        of their sequences is one document. Routers' auxiliary losses are of the first pass alone.
        """
        if tokens is self._batch.tokens and (layout is None or layout is self._batch.layout):
            return self.module.head(self.hidden)
        hidden, _ = self.module.run(tokens, layout)
        return self.module.head(hidden)

    def log_probs(self) -> Tensor:
        """Return the log-probability (B, T) of each label; 0 where a label is -100.

        It holds the logits of a few tokens at a time, which saves memory.
        """
        return self.module.log_probs(self.hidden, self._batch.labels)


LossFunction: TypeAlias = Callable[[LossModel, Batch], "Tensor | tuple[Any, Any]"]
"""See the module's docstring."""


class OwnLoss:
    """Objective that minimizes a `LossFunction`.

    Attributes:
        name: name of the function, for messages.
    """

    is_cross_entropy = False

    def __init__(self, function: LossFunction, name: str) -> None:
        """Wrap a function."""
        self.name, self._function = name, function
        self._form = ""  # of the first result, which others must have, too

    def prepare(self, batch: Batch, look: Look, data_group: dist.ProcessGroup | None) -> Batch:
        """Return the batch unchanged."""
        return batch

    def count(self, batch: Batch) -> Tensor:
        """Return (), the labels: the divisor, which `OWN_COUNT` corrects after the step."""
        return CROSS_ENTROPY.count(batch)

    def of(self, batch: Batch) -> Finish:
        """Return the function that computes the sums of a microbatch."""

        def finish(model: Decoder, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            result = self._function(LossModel(model, hidden, batch), batch)
            form = self._form_of(result, batch)
            if self._form not in ("", form):
                raise self._error(f"returned {form}, and {self._form} before")
            self._form = form
            if form == "(B,)" and model.exchange is not None:
                raise self._error(
                    "returned losses (B,), but context parallelism shards sequences; return losses"
                    " (B, T), or (sum, count)"
                )
            return self._sums(form, result, batch, hidden)

        return finish

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return no metrics besides the loss."""
        return {}

    def _form_of(self, result: Any, batch: Batch) -> str:
        """Return which of the forms a result has.

        Raises:
            UserError: it has none of them.
        """
        if isinstance(result, tuple) and len(result) == 2:
            shapes = [(*torch.as_tensor(part).shape,) for part in result if _is_number(part)]
            if shapes == [(), ()]:
                return "(sum, count)"
        if isinstance(result, Tensor) and result.is_floating_point():
            if result.shape == batch.labels.shape:
                return "(B, T)"
            if result.shape == batch.labels.shape[:1]:
                return "(B,)"
        rows, width = batch.labels.shape
        raise self._error(f"returned {_described(result)} for B, T = {rows}, {width}; {_FORMS}")

    def _sums(
        self, form: str, result: Any, batch: Batch, hidden: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if form == "(B, T)":
            labeled = batch.labels != IGNORE
            losses = torch.where(labeled, self._trains(result).float(), 0.0)
            return (losses if batch.weights is None else losses * batch.weights).sum(), {}
        if form == "(B,)":
            total, count = self._trains(result).float().sum(), len(result)
        else:
            total, count = result
            if not isinstance(total, Tensor) and not total:
                total = 0.0 * hidden.sum()  # nothing to learn in this microbatch
            total = self._trains(total).float()
        counted = torch.as_tensor(count, dtype=torch.float32, device=hidden.device).detach()
        return total, {OWN_COUNT: counted}

    def _trains(self, losses: Any) -> Tensor:
        if torch.is_grad_enabled() and not (isinstance(losses, Tensor) and losses.requires_grad):
            raise self._error(
                "returned a loss that no weight has a gradient of; leave out .detach(), .item() and"
                " torch.no_grad()"
            )
        return losses

    def _error(self, why: str) -> UserError:
        return UserError(f"loss: {self.name} {why}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool)


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {tuple(result.shape)} of {str(result.dtype).removeprefix('torch.')}"
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_described, result))})"
    return f"a {type(result).__name__}"

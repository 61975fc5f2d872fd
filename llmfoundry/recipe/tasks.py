"""The recipes of the other scripts: what eval.py, convert.py, generate.py and prepare_data.py read.

Each takes a `checkpoint`: a run's folder (its newest whole checkpoint) or one checkpoint's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.bounds import NEW_TOKENS, PATH, ROWS, TEMPERATURE, Range, out_of_bounds
from llmfoundry.recipe.checks import inert, one_of
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.train import PRECISIONS, check_batch

FORMATS = ("hf",)
DTYPES = ("fp32", "bf16", "fp16")


def _needs_checkpoint(checkpoint: str | None) -> Iterator[str]:
    if checkpoint is None:
        yield "checkpoint: is required; write checkpoint=runs/NAME, a run's folder"


@dataclass
class EvalRecipe:
    """Evaluate checkpoints as their runs would, and models from elsewhere."""

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, or one checkpoint's."""
    models: Annotated[list[str], PATH] = field(default_factory=list)
    """Models beside it, each of: a run's or a checkpoint's folder; a folder that transformers
    saved, or hf:OWNER/NAME on the hub; ADDRESS#MODEL, an OpenAI-compatible server, such as
    http://localhost:8000/v1#my-model, or chat:ADDRESS#MODEL, for generation tasks."""
    output: Annotated[str | None, PATH] = None
    """Where results.json, rows.jsonl and gauntlet.html go; unset: beside the checkpoint's run,
    eval/<batch>/, for others runs/<name>/eval/."""
    precision: str | None = None
    """fp32, amp_bf16 or bf16; unset: the run's own, for others fp32."""
    device_eval_batch_size: Annotated[int | str, ROWS] = "auto"
    """Rows evaluated at a time."""
    eval: EvalConfig | None = None
    """What is measured (group eval/); unset: what the run measured."""
    logger: LoggerConfig | None = None
    """Where metrics go as well (group logger/); unset: MLflow where the run's went, for others
    nowhere."""
    cache_folder: Annotated[str, PATH] = "~/.cache/llmfoundry"
    """For models without a run: where tokenised prompts are kept."""

    def all_models(self) -> list[str]:
        """`checkpoint` and `models`."""
        return [*([self.checkpoint] if self.checkpoint is not None else []), *self.models]

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        if not self.models:
            yield from _needs_checkpoint(self.checkpoint)
        for model in {m for m in self.all_models() if self.all_models().count(m) > 1}:
            yield f"models: {model} is there more than once; name each once"
        if self.logger is not None:
            yield from self.logger.check()
        if self.eval is not None and self.eval.icl_max_fraction is not None:
            yield "eval.icl_max_fraction: is of a training run's time; write eval.icl_rows here"
        if self.precision is not None:
            yield from one_of("precision", self.precision, PRECISIONS)
        yield from check_batch("device_eval_batch_size", self.device_eval_batch_size)
        if self.eval is not None:
            yield from self.eval.check()

    def fill(self) -> None:
        """Nothing is derived before the checkpoint is read."""


@dataclass
class ConvertRecipe:
    """Turn a checkpoint into another format, or a Hugging Face model into a checkpoint."""

    checkpoint: Annotated[str | None, PATH] = None
    """What to read: a run's folder or one checkpoint's; with from=hf a hub id or its folder."""
    to: str | None = None
    """Format to write: hf, a folder that transformers loads."""
    from_: str | None = None
    """Format to read, written `from`: hf; the output is then a run's folder of ours."""
    output: Annotated[str | None, PATH] = None
    """The folder to write; must not exist, or be empty."""
    dtype: str | None = None
    """Only with to=hf: number format of the written weights, fp32, bf16 or fp16; fp32 there."""
    architecture: str | None = None
    """Only with to=hf: transformers' class to write (LlamaForCausalLM …), or llmfoundry, our own,
    which any model fits; unset: the first of transformers' that is exactly the model."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        yield from _needs_checkpoint(self.checkpoint)
        if self.to is None:
            yield from inert("", self, ["architecture", "dtype"], "without to=hf")
        if (self.to is None) == (self.from_ is None):
            yield "to: write either to=hf (export) or from=hf (import)"
        for key, value in (("to", self.to), ("from", self.from_)):
            if value is not None:
                yield from one_of(key, value, FORMATS)
        if self.output is None:
            yield "output: is required; write output=DIR, the folder to write"
        if self.dtype is not None:
            yield from one_of("dtype", self.dtype, DTYPES)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.to is not None:
            self.dtype = self.dtype or "fp32"


@dataclass
class GenerateRecipe:
    """Continue a prompt with a checkpoint's model."""

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, or one checkpoint's."""
    prompt: str = ""
    """Text to continue."""
    max_new_tokens: Annotated[int, NEW_TOKENS] = 128
    """Length of the continuation, in tokens, unless end-of-text comes first."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """0 takes the likeliest token; more is more random."""
    top_k: Annotated[int | None, Range(1)] = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together reach this probability."""
    seed: Annotated[int, Range(0)] = 17
    """Seed of the draws."""
    precision: str | None = None
    """fp32, amp_bf16 or bf16; unset: the run's own."""
    kv_cache: bool = True
    """Keep keys and values of earlier tokens; false computes them anew each time (slow)."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        yield from _needs_checkpoint(self.checkpoint)
        if self.precision is not None:
            yield from one_of("precision", self.precision, PRECISIONS)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p: {self.top_p}; write a number above 0, at most 1"
        if self.temperature == 0:
            yield from inert("", self, ["top_k", "top_p"], "with temperature: 0")

    def fill(self) -> None:
        """Nothing is derived."""

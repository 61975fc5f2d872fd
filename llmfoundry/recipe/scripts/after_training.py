"""The recipes of scripts that take a trained model: eval.py, convert.py, generate.py, chat.py.

Each takes a `checkpoint`: a run's folder (its newest complete checkpoint) or one checkpoint's
folder, or the URL of one, such as s3://bucket/runs/mine; all but convert.py a model from elsewhere
too (`builders/models.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.logger import DEFAULT_TOP_P, LoggerConfig
from llmfoundry.recipe.scripts.train import PRECISIONS
from llmfoundry.recipe.values.bounds import (
    AUTO_ROWS,
    CHAT_TEMPLATE,
    NEW_TOKENS,
    PATH,
    ROWS,
    TEMPERATURE,
    TOP_P,
    Range,
    choice,
    out_of_bounds,
)
from llmfoundry.recipe.values.checks import inert, set_defaults

FORMATS = ("hf",)
EXPORTS = ("hf", "gguf", "peft")
DTYPES = ("fp32", "bf16", "fp16", "q8_0")


def _needs_checkpoint(checkpoint: str | None) -> Iterator[str]:
    if checkpoint is None:
        yield "checkpoint: is required; write checkpoint=runs/NAME, a run's folder"


def _is_here(output: str | None) -> Iterator[str]:
    if output is not None and "://" in output:
        yield f"output: {output} is an address; write a folder of this machine"


@dataclass
class EvalRecipe:
    """Evaluate checkpoints as their runs would, and models from elsewhere."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, or one checkpoint's, or the URL of one."""
    models: Annotated[list[str], PATH] = field(default_factory=list)
    """Models beside it, each of: a run's or a checkpoint's folder or URL; an adapter's folder, as
    peft saves it; a folder that transformers saved, or hf:OWNER/NAME on the hub; ADDRESS#MODEL, an
    OpenAI-compatible server, such as http://localhost:8000/v1#my-model, or chat:ADDRESS#MODEL, for
    generation tasks."""
    output: Annotated[str | None, PATH] = None
    """Where results.json, rows.jsonl and gauntlet.html go; unset: beside the checkpoint's run,
    eval/<batch>/, for others runs/<name>/eval/."""
    precision: Annotated[str | None, choice(PRECISIONS)] = None
    """fp32, amp_bf16 or bf16; unset: the run's own, for others fp32."""
    device_eval_batch_size: Annotated[int | str, ROWS, AUTO_ROWS] = "auto"
    """Rows evaluated at a time."""
    eval: EvalConfig | None = None
    """What is measured (group eval/); unset: what the run measured, of models beside it too."""
    logger: LoggerConfig | None = None
    """Where metrics go as well (group logger/); unset: MLflow where the run's went, for others
    nowhere."""
    cache_folder: Annotated[str, PATH] = "~/.cache/llmfoundry"
    """For models without a run: where tokenized prompts are kept."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that what is opened here needs; its own recipe's are not imported."""

    def all_models(self) -> list[str]:
        """`checkpoint` and `models`."""
        return [*([self.checkpoint] if self.checkpoint is not None else []), *self.models]

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        yield from _is_here(self.output)
        if not self.models:
            yield from _needs_checkpoint(self.checkpoint)
        for model in {m for m in self.all_models() if self.all_models().count(m) > 1}:
            yield f"models: {model} is there more than once; name each once"
        if self.logger is not None:
            yield from self.logger.check()
        if self.eval is not None and self.eval.icl_max_fraction is not None:
            yield "eval.icl_max_fraction: is of a training run's time; write eval.icl_rows here"
        if self.eval is not None:
            yield from self.eval.check()

    def fill(self) -> None:
        """Nothing is derived before the checkpoint is read."""


@dataclass
class ConvertRecipe:
    """Turn a checkpoint into another format, or a Hugging Face model into a checkpoint."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """What to read: a run's folder or one checkpoint's, or the URL of one; with from=hf a hub id or
    its folder."""
    to: Annotated[str | None, choice(EXPORTS)] = None
    """Format to write: hf, a folder that transformers loads, an adapter merged into its base; gguf,
    the same as a file for llama.cpp and what is built on it; or peft, an adapter alone, for the hf
    folder of its base."""
    from_: Annotated[str | None, choice(FORMATS)] = None
    """Format to read, written `from`: hf; the output is then a run's folder of ours, or with
    to=gguf a file of that."""
    output: Annotated[str | None, PATH] = None
    """The folder to write; must not exist, or be empty. With to=gguf a file, NAME.gguf."""
    dtype: Annotated[str | None, choice(DTYPES)] = None
    """Only with to=hf or gguf: number format of the written weights, fp32, bf16, fp16, or of gguf
    q8_0 (8 bits, a scale every 32 numbers); unset: bf16 where the base is quantised, else fp32."""
    max_shard_gb: Annotated[float | None, Range(0.001)] = None
    """Only with to=hf: a weight file's size at most, in units of 1e9 bytes, though no tensor is
    split; unset: 5."""
    architecture: str | None = None
    """Only with to: transformers' class to write (LlamaForCausalLM …), or llmfoundry, our own,
    which any model fits; unset: the first of transformers' that is exactly the model."""
    adapter_experts: Annotated[str | None, choice(("stacked", "separate"))] = None
    """Only with to=peft: stacked, as peft's target_parameters, or separate, an adapter for each
    expert, since engines disagree on the stacked layout; default stacked."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that what is opened here needs; its own recipe's are not imported."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        yield from _needs_checkpoint(self.checkpoint)
        yield from _is_here(self.output)
        if self.to is None:
            yield from inert("", self, ["architecture"], "without to")
        if self.to not in ("hf", "gguf"):
            yield from inert("", self, ["dtype"], "without to=hf or to=gguf")
        if self.to != "hf":
            yield from inert("", self, ["max_shard_gb"], "without to=hf")
        if self.dtype == "q8_0" and self.to == "hf":
            yield "dtype: q8_0 is a format of GGUF; write to=gguf, or dtype=bf16"
        if self.to != "peft":
            yield from inert("", self, ["adapter_experts"], "without to=peft")
        if (self.to is None) == (self.from_ is None) and self.to != "gguf":
            yield "to: write either to=hf, to=gguf or to=peft (export), or from=hf (import)"
        if self.output is None:
            yield "output: is required; write output=DIR, the folder to write"
        elif self.to == "gguf" and not self.output.endswith(".gguf"):
            yield f"output: {self.output} is one file with to=gguf; write output=NAME.gguf"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.to == "peft":
            self.adapter_experts = self.adapter_experts or "stacked"


@dataclass
class DrawRecipe:
    """What a model that writes is asked with, whether it continues a text or answers."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, or one checkpoint's, or the URL of one; an adapter's folder, as peft saves
    it; a folder that transformers saved, or hf:OWNER/NAME on the hub."""
    max_new_tokens: Annotated[int, NEW_TOKENS] = 128
    """Length of what is written, in tokens, unless its end comes first."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """0 takes the likeliest token; more is more random."""
    top_k: Annotated[int | None, Range(1)] = None
    """Draw from the k likeliest tokens only."""
    top_p: Annotated[float | None, TOP_P] = None
    """Draw from the likeliest tokens that together reach this probability; 1: all. Default 0.9."""
    seed: Annotated[int, Range(0)] = 17
    """Seed of the draws."""
    precision: Annotated[str | None, choice(PRECISIONS)] = None
    """fp32, amp_bf16 or bf16; unset: the run's own, for others fp32."""
    kv_cache: bool = True
    """Keep keys and values of earlier tokens; false computes them again each time (slow)."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that what is opened here needs; its own recipe's are not imported."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        yield from _needs_checkpoint(self.checkpoint)
        if self.temperature == 0:
            yield from inert("", self, ["top_k", "top_p"], "with temperature: 0")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.temperature > 0:
            set_defaults(self, top_p=DEFAULT_TOP_P)


@dataclass
class GenerateRecipe(DrawRecipe):
    """Continue a prompt with a checkpoint's model, or answer a message."""

    prompt: str = ""
    """Text to continue."""
    message: str | None = None
    """In place of prompt: a user's message, which is answered by the model's chat template."""
    system: str | None = None
    """Only with message: the system's, before it."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """Only with message: chatml, llama3, zephyr, mpt or a Jinja file; unset: the tokenizer's."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from super().check()
        if self.message is None:
            yield from inert("", self, ["system", "chat_template"], "without message")
        elif not self.message.strip():
            yield "message: is empty; write what is to be answered"
        if self.message is not None and self.prompt:
            yield "prompt: has no effect with message; write one of the two"


@dataclass
class ChatRecipe(DrawRecipe):
    """Talk with a checkpoint's model on a terminal, or by lines of standard input."""

    max_new_tokens: Annotated[int, NEW_TOKENS] = 512
    """Longest answer, in tokens."""
    system: str | None = None
    """The system's message; /system changes it."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """chatml, llama3, zephyr, mpt or a Jinja file; unset: the tokenizer's own."""

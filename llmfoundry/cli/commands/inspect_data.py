"""Command of `scripts/inspect_data.py`: print the data that a run reads at a given time.

Entry point: `inspect_data`. It builds the loader of the run, without a model. Samples are a pure
function of the recipe, so earlier data is not read. If the run has checkpoints, the loader resumes
from the newest one up to that time, as the run itself does.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from llmfoundry.builders.data import RunData, open_data
from llmfoundry.builders.pretrained import open_base
from llmfoundry.builders.tokenizer import make_tokenizer
from llmfoundry.builders.trainer import build_clock, build_loader, build_phases
from llmfoundry.checkpoint.load import read_state
from llmfoundry.checkpoint.object_storage import find_run, is_url
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.checkpoint.verify import ChecksumSelection, find_checkpoint
from llmfoundry.data.batch import TrainingSequence
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.loader import Loader
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import printable
from llmfoundry.recipe.before_training import InspectRecipe
from llmfoundry.recipe.checks import Clock
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.redaction import public
from llmfoundry.terminal import columns

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
_SHOWN = 80  # characters of a text in the table


@dataclass(frozen=True)
class SegmentFacts:
    """Consecutive tokens of a document with the same loss weight.

    Attributes:
        document: number of the document in the sequence, from 0.
        side: 1 if the document is chosen or desirable, -1 if rejected or undesirable, else 0.
        weight: loss weight of each token; 0: not in the loss.
        tokens: number of tokens.
        text: their text.
    """

    document: int
    side: int
    weight: float
    tokens: int
    text: str


@dataclass(frozen=True)
class SequenceFacts:
    """Sequence of the batch.

    Attributes:
        slot: number of the sequence in the global batch.
        stream: name of its stream; `data` if there is only one.
        sample: number of the sequence in the order of the stream, from 0 at the start of the run.
        epoch: epoch of the stream, from 0.
        where: shard and position in it; for texts packed during training, the first document of
            the group.
        documents: number of tokens of each document.
        text: text of all tokens.
        parts: supervised data: parts inside and outside the loss, in order.
        padding: number of padding tokens.
    """

    slot: int
    stream: str
    sample: int
    epoch: int
    where: str
    documents: list[int]
    text: str
    parts: list[SegmentFacts] = field(default_factory=list)
    padding: int = 0


@dataclass(frozen=True)
class StreamFacts:
    """Consumption of a stream before the step.

    Attributes:
        stream: name of the stream.
        rows: number of sequences read.
        tokens: number of tokens in them, including padding.
        share: fraction of the sequences of all streams.
        epochs: number of passes over the stream.
        rows_of_run, epochs_of_run: the same at the end of the run.
    """

    stream: str
    rows: int
    tokens: int
    share: float
    epochs: float
    rows_of_run: int
    epochs_of_run: float


@dataclass(frozen=True)
class PhaseFacts:
    """Proportions of the streams from a step on.

    Attributes:
        at: start of the phase as in the recipe.
        step: first step of the phase.
        in_force: whether the inspected step is in this phase.
        proportions: fraction of each stream; they sum to 1.
    """

    at: str
    step: int
    in_force: bool
    proportions: dict[str, float]


def inspect_data(recipe: ResolvedTrainRecipe) -> None:
    """Print the sequences of a step, the consumption of the streams before it, and the phases.

    Raises:
        UserError: the time is after the end of the run, or the data cannot be read.
    """
    # build the loader of the run
    user_recipe, pretrained = recipe.user_recipe, None
    assert isinstance(user_recipe, InspectRecipe)
    if isinstance(recipe, ResolvedFinetuneRecipe):
        pretrained = open_base(recipe, ALONE, note=print)
    tokenizer = make_tokenizer(recipe, ALONE, pretrained)
    data = open_data(recipe, tokenizer, ALONE)
    clock = build_clock(recipe, data)
    step = step_of(user_recipe, clock)
    loader = build_loader(recipe, data, clock, tokenizer, ALONE)
    note = _resume(recipe, loader, step)

    # collect the facts of the step
    rows: list[SequenceFacts] = []
    if step < clock.total:
        rows = _rows(loader, tokenizer, step, user_recipe.n, recipe.max_seq_len)
    streams = _streams(loader, step, clock, recipe.max_seq_len)
    phases = _phases(recipe, data, clock, step)
    loader.close()

    # print them
    if user_recipe.json:
        facts = {"step": step, "steps_of_run": clock.total, "tokens": step * clock.tokens_per_batch}
        print(json.dumps({"kind": "step", **facts}))
        for kind, items in (("row", rows), ("stream", streams), ("phase", phases)):
            for item in items:
                print(json.dumps({"kind": kind, **asdict(item)}))
        return
    print(public("\n".join([*data.summary.splitlines(), *note])))
    print("\n".join(_page(clock, step, rows, streams, phases)))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print("\n".join(line for row in rows for line in learned_lines(row, color=color)))


def step_of(recipe: InspectRecipe, clock: Clock) -> int:
    """Return the step at the time `at`; the number of steps if it is the end of the run.

    Raises:
        UserError: the time is after the end of the run.
    """
    batches = clock.batches(recipe.at)
    if batches > clock.total:
        raise UserError(
            f"at: {recipe.at} lies beyond the run, which ends after {clock.total:,} steps of"
            f" {clock.tokens_per_batch:,} tokens (max_duration: {recipe.max_duration}); write 1dur"
            " or less"
        )
    return math.floor(batches + 1e-9)


def _resume(recipe: ResolvedTrainRecipe, loader: Loader, step: int) -> list[str]:
    """Resume the loader from the run's newest checkpoint up to `step`; return a line about it."""
    if not recipe.autoresume or recipe.save_overwrite:
        return []
    folder, options = recipe.save_folder, FetchOptions.from_config(recipe.data)
    is_remote = is_url(folder)
    run = find_run(folder, "save_folder", options=options) if is_remote else Storage(Path(folder))
    checkpoint = find_checkpoint(
        run, note=lambda line: None, sums=ChecksumSelection.RECORD, until=step
    )
    if checkpoint is None:
        return []
    state = read_state(checkpoint)
    loader.resume(state["order"], state["batch"])
    return [f"resuming from {checkpoint}"]


def _rows(
    loader: Loader, tokenizer: Tokenizer, step: int, n: int, seq_len: int
) -> list[SequenceFacts]:
    """Return the first `n` sequences of the step."""
    sources, samples = loader.mixture.plan(step, 0, min(n, loader.mixture.batch_size))
    rows = []
    for slot, (source, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
        stream = loader.streams[source]
        position = int(stream.locate(samples[slot : slot + 1])[0])
        row = stream.read(position)
        rows.append(
            SequenceFacts(
                slot=slot,
                stream=stream.name,
                sample=sample,
                epoch=sample // stream.n_rows,
                where=stream.where(position),
                documents=row.lengths,
                text=_text(tokenizer, row.ids[: sum(row.lengths)]),
                parts=_parts(tokenizer, row),
                padding=seq_len - sum(row.lengths),
            )
        )
    return rows


def _parts(tokenizer: Tokenizer, row: TrainingSequence) -> list[SegmentFacts]:
    """Split the documents of a supervised sequence where the loss weight changes."""
    if row.weights is None:
        return []
    parts, begin = [], 0
    for number, length in enumerate(row.lengths):
        weights = row.weights[begin : begin + length]
        borders = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), length]
        for start, stop in pairwise(borders):
            ids = row.ids[begin + start : begin + stop]
            side = row.sides[number] if row.sides is not None else 0
            # among documents with sides, one without is KTO's mismatched answer for the KL term
            is_reference = row.sides is not None and not side
            weight = 0.0 if is_reference else round(float(weights[start]), 6)
            parts.append(SegmentFacts(number, side, weight, stop - start, _text(tokenizer, ids)))
        begin += length
    return parts


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Decode ids; leave out ids without a token and prepend their number."""
    known = ids[(ids >= 0) & (ids < tokenizer.vocab_size)]
    n = len(ids) - len(known)
    return f"[{n} ids that no token has] " * bool(n) + tokenizer.decode(known.tolist())


def _streams(loader: Loader, step: int, clock: Clock, seq_len: int) -> list[StreamFacts]:
    """Return the consumption of each stream before the step and over the run."""
    before, total = loader.mixture.consumed(step), loader.mixture.consumed(clock.total)
    facts = []
    for stream, rows, rows_of_run in zip(loader.streams, before, total, strict=True):
        facts.append(
            StreamFacts(
                stream=stream.name,
                rows=rows,
                tokens=rows * seq_len,
                share=rows / max(1, sum(before)),
                epochs=rows / stream.n_rows,
                rows_of_run=rows_of_run,
                epochs_of_run=rows_of_run / stream.n_rows,
            )
        )
    return facts


def _phases(
    recipe: ResolvedTrainRecipe, data: RunData, clock: Clock, step: int
) -> list[PhaseFacts]:
    """Return the phases of the mixture."""
    names = [stream.name for stream in data.streams]
    times = ["0ba", *(phase.at for phase in recipe.data.phases)]
    phases = build_phases(recipe, data, clock)
    current = max(n for n, phase in enumerate(phases) if phase.step <= step)
    facts = []
    for n, (at, phase) in enumerate(zip(times, phases, strict=True)):
        fractions = [weight / sum(phase.weights) for weight in phase.weights]
        proportions = dict(zip(names, fractions, strict=True))
        facts.append(PhaseFacts(at, phase.step, n == current, proportions))
    return facts


def _page(
    clock: Clock,
    step: int,
    rows: Sequence[SequenceFacts],
    streams: Sequence[StreamFacts],
    phases: Sequence[PhaseFacts],
) -> list[str]:
    """Return the lines of the tables."""
    # headline
    lines = [""]
    if step == clock.total:
        lines.append(f"the run ends here, after {step:,} steps")
    else:
        lines.append(f"step {step:,} of {clock.total:,}, counted from 0")
    lines[-1] += f", {step * clock.tokens_per_batch:,} tokens"

    # sequences, streams, phases
    if rows:
        head = ["slot", "stream", "epoch", "shard and place", "documents", "text"]
        cells = [
            [f"{r.slot}", r.stream, f"{r.epoch}", r.where, f"{len(r.documents)}", _shown(r.text)]
            for r in rows
        ]
        lines += ["", *columns(head, cells, left=(1, 3, 5))]
    head = ["stream", "rows so far", "tokens so far", "share", "epochs", "epochs of the run"]
    cells = []
    for s in streams:
        counts = [f"{s.rows:,}", f"{s.tokens:,}", f"{s.share:.1%}"]
        cells.append([s.stream, *counts, f"{s.epochs:.2f}", f"{s.epochs_of_run:.2f}"])
    lines += ["", *columns(head, cells)]
    if len(streams) > 1:
        head = ["", "phase at", "first step", *phases[0].proportions]
        cells = [
            ["now" if p.in_force else "", p.at, f"{p.step:,}"]
            + [f"{part:.1%}" for part in p.proportions.values()]
            for p in phases
        ]
        cells.append(["", "end", f"{clock.total:,}", *[""] * len(streams)])
        lines += ["", *columns(head, cells, left=(0, 1))]
    return lines


_SIDES = {0: "", 1: ", chosen", -1: ", rejected"}


def learned_lines(row: SequenceFacts, *, color: bool) -> list[str]:
    """Return the text of a supervised sequence with marks around the text in the loss.

    Args:
        row: the sequence.
        color: text in the loss is green and other text grey; otherwise text in the loss is in
            {+ +}.
    """
    if not row.parts:
        return []
    lines = ["", f"slot {row.slot}: {row.where}"]
    for number, length in enumerate(row.documents):
        parts = [part for part in row.parts if part.document == number]
        n_in_loss = sum(part.tokens for part in parts if part.weight)
        lines.append(
            f"---- document {number + 1} of {len(row.documents)}{_SIDES[parts[0].side]}:"
            f" {length:,} tokens, {n_in_loss:,} learned ----"
        )
        lines += "".join(_marked(part, color=color) for part in parts).split("\n")
    if row.padding:
        lines.append(f"---- {row.padding:,} tokens of padding ----")
    return lines


def _marked(part: SegmentFacts, *, color: bool) -> str:
    text = "\n".join(printable(line) for line in part.text.split("\n"))
    if color:
        code = "32" if part.weight else "90"
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" for line in text.split("\n"))
    weight = "" if part.weight in (0, 1) else f"({part.weight:g})"
    return f"{{+{weight}{text}+}}" if part.weight else text


def _shown(text: str) -> str:
    """Return the beginning of a text on one line."""
    return printable(text[:_SHOWN].replace("\n", "\\n"))

"""`scripts/inspect_data.py`: what a run reads at some time, without a model.

The run's own loader is built and asked; samples are a pure function of the recipe, so nothing of
what lies before has to be read. Where the run has trained for a while, its newest checkpoint
up to that time says what each stream has given, as it does for the run itself.
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
from llmfoundry.builders.trainer import build_clock, build_loader, build_phases, make_tokenizer
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
_SHOWN = 80  # characters of a row's text


@dataclass(frozen=True)
class SegmentFacts:
    """Tokens of a document that weigh alike.

    Attributes:
        document: its number in the row, from 0.
        side: of the document: 1 chosen or desirable, -1 rejected or undesirable, 0 neither.
        weight: of each token as a label; 0: it is context.
        tokens: how many they are.
        text: of them.
    """

    document: int
    side: int
    weight: float
    tokens: int
    text: str


@dataclass(frozen=True)
class SequenceFacts:
    """A row of the step.

    Attributes:
        slot: its number in the global batch.
        stream: that it is from; data where there is only one.
        sample: its number in the stream's own order, from 0 at the run's start.
        epoch: of the stream, from 0.
        where: the shard and the place in it; of texts that are packed while training, the first
            document of its group.
        documents: tokens of each document in it.
        text: of its tokens.
        parts: of supervised rows: what is learned and what is not, in order.
        padding: tokens that fill the row up.
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
    """A stream until the step.

    Attributes:
        stream: its name.
        rows: that it gave.
        tokens: in these, padding with them.
        share: of all rows until then.
        epochs: how often they go through it.
        rows_of_run, epochs_of_run: the same, of the whole run.
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
    """Proportions that hold from a step on.

    Attributes:
        at: as in the recipe.
        step: the first.
        in_force: whether the step that is looked at lies in it.
        proportions: each stream's part; sum to 1.
    """

    at: str
    step: int
    in_force: bool
    proportions: dict[str, float]


def inspect_data(recipe: ResolvedTrainRecipe) -> None:
    """Print the rows of a step, the streams until it, and the phases.

    Raises:
        UserError: the time lies beyond the run, or the data cannot be read.
    """
    asked, pretrained = recipe.user_recipe, None
    assert isinstance(asked, InspectRecipe)
    if isinstance(recipe, ResolvedFinetuneRecipe):
        pretrained = open_base(recipe, ALONE, note=print)
    tokenizer = make_tokenizer(recipe, ALONE, pretrained)
    data = open_data(recipe, tokenizer, ALONE)
    clock = build_clock(recipe, data)
    step = step_of(asked, clock)
    loader = build_loader(recipe, data, clock, tokenizer, ALONE)
    note = _go_on(recipe, loader, step)
    rows = (
        [] if step == clock.total else _rows(loader, tokenizer, step, asked.n, recipe.max_seq_len)
    )
    streams = _streams(loader, step, clock, recipe.max_seq_len)
    phases = _phases(recipe, data, clock, step)
    loader.close()
    if asked.json:
        facts = {"step": step, "steps_of_run": clock.total, "tokens": step * clock.tokens_per_batch}
        print(json.dumps({"kind": "step", **facts}))
        for kind, found in (("row", rows), ("stream", streams), ("phase", phases)):
            for one in found:
                print(json.dumps({"kind": kind, **asdict(one)}))
        return
    print(public("\n".join([*data.summary.splitlines(), *note])))
    print("\n".join(_page(clock, step, rows, streams, phases)))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print("\n".join(line for row in rows for line in learned_lines(row, color=color)))


def step_of(recipe: InspectRecipe, clock: Clock) -> int:
    """The step that `at` falls in; the number of steps where it is the run's end.

    Raises:
        UserError: it lies beyond.
    """
    batches = clock.batches(recipe.at)
    if batches > clock.total:
        raise UserError(
            f"at: {recipe.at} lies beyond the run, which ends after {clock.total:,} steps of"
            f" {clock.tokens_per_batch:,} tokens (max_duration: {recipe.max_duration}); write 1dur"
            " or less"
        )
    return math.floor(batches + 1e-9)


def _go_on(recipe: ResolvedTrainRecipe, loader: Loader, step: int) -> list[str]:
    """Take over what the streams had given at the run's newest checkpoint up to `step`."""
    if not recipe.autoresume or recipe.save_overwrite:
        return []
    at, options = recipe.save_folder, FetchOptions.from_config(recipe.data)
    run = find_run(at, "save_folder", options=options) if is_url(at) else Storage(Path(at))
    found = find_checkpoint(run, note=lambda line: None, sums=ChecksumSelection.RECORD, until=step)
    if found is None:
        return []
    state = read_state(found)
    loader.resume(state["order"], state["batch"])
    return [f"resuming from {found}"]


def _rows(
    loader: Loader, tokenizer: Tokenizer, step: int, n: int, seq_len: int
) -> list[SequenceFacts]:
    """The first `n` rows of the step."""
    sources, samples = loader.mixture.plan(step, 0, min(n, loader.mixture.batch_size))
    found = []
    for slot, (source, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
        stream = loader.streams[source]
        place = int(stream.locate(samples[slot : slot + 1])[0])
        row = stream.read(place)
        found.append(
            SequenceFacts(
                slot=slot,
                stream=stream.name,
                sample=sample,
                epoch=sample // stream.n_rows,
                where=stream.where(place),
                documents=row.lengths,
                text=_text(tokenizer, row.ids[: sum(row.lengths)]),
                parts=_parts(tokenizer, row),
                padding=seq_len - sum(row.lengths),
            )
        )
    return found


def _parts(tokenizer: Tokenizer, row: TrainingSequence) -> list[SegmentFacts]:
    """The documents of a supervised row, cut where learned tokens begin and end."""
    if row.weights is None:
        return []
    found, begin = [], 0
    for number, length in enumerate(row.lengths):
        weights = row.weights[begin : begin + length]
        cuts = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), length]
        for start, stop in pairwise(cuts):
            ids = row.ids[begin + start : begin + stop]
            side = row.sides[number] if row.sides is not None else 0
            is_other = row.sides is not None and not side  # that KTO compares with
            weight = 0.0 if is_other else round(float(weights[start]), 6)
            found.append(SegmentFacts(number, side, weight, stop - start, _text(tokenizer, ids)))
        begin += length
    return found


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """What ids spell; those that no token has are left out, and said."""
    known = ids[(ids >= 0) & (ids < tokenizer.vocab_size)]
    n = len(ids) - len(known)
    return f"[{n} ids that no token has] " * bool(n) + tokenizer.decode(known.tolist())


def _streams(loader: Loader, step: int, clock: Clock, seq_len: int) -> list[StreamFacts]:
    given, total = loader.mixture.consumed(step), loader.mixture.consumed(clock.total)
    return [
        StreamFacts(
            stream=stream.name,
            rows=rows,
            tokens=rows * seq_len,
            share=rows / max(1, sum(given)),
            epochs=rows / stream.n_rows,
            rows_of_run=rows_of_run,
            epochs_of_run=rows_of_run / stream.n_rows,
        )
        for stream, rows, rows_of_run in zip(loader.streams, given, total, strict=True)
    ]


def _phases(
    recipe: ResolvedTrainRecipe, data: RunData, clock: Clock, step: int
) -> list[PhaseFacts]:
    names = [stream.name for stream in data.streams]
    times = ["0ba", *(phase.at for phase in recipe.data.phases)]
    phases = build_phases(recipe, data, clock)
    now = max(n for n, phase in enumerate(phases) if phase.step <= step)
    found = []
    for n, (at, phase) in enumerate(zip(times, phases, strict=True)):
        parts = (weight / sum(phase.weights) for weight in phase.weights)
        found.append(PhaseFacts(at, phase.step, n == now, dict(zip(names, parts, strict=True))))
    return found


def _page(
    clock: Clock,
    step: int,
    rows: Sequence[SequenceFacts],
    streams: Sequence[StreamFacts],
    phases: Sequence[PhaseFacts],
) -> list[str]:
    """The tables."""
    lines = [""]
    if step == clock.total:
        lines.append(f"the run ends here, after {step:,} steps")
    else:
        lines.append(f"step {step:,} of {clock.total:,}, counted from 0")
    lines[-1] += f", {step * clock.tokens_per_batch:,} tokens"
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
    """The text of a supervised row, what is learned of it marked, its documents apart.

    Args:
        row: to show.
        color: learned text is green and context grey; otherwise learned text stands in {+ +}.
    """
    if not row.parts:
        return []
    lines = ["", f"slot {row.slot}: {row.where}"]
    for number, length in enumerate(row.documents):
        parts = [part for part in row.parts if part.document == number]
        learned = sum(part.tokens for part in parts if part.weight)
        lines.append(
            f"---- document {number + 1} of {len(row.documents)}{_SIDES[parts[0].side]}:"
            f" {length:,} tokens, {learned:,} learned ----"
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
    """The beginning of a text, on one line."""
    return printable(text[:_SHOWN].replace("\n", "\\n"))

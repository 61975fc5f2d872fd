"""Evaluators side by side: this gauntlet, lm-evaluation-harness, and rows padded to the maximum.

    python -m benchmarks.evaluation [--rows 900]

All answer the same requests, token by token, with the same weights of 9 M parameters (the harness
with transformers' LlamaForCausalLM), on one thread; the table has the largest difference of their
log-probabilities from ours. Time is CPU time, which other work on the machine disturbs least.
Tokenization is left out for all. Rows padded to the maximum are so slow that a few batches are
timed and extrapolated. lm-evaluation-harness is the extra `eval`; without it its line is missing.

Requests have the shape of the gauntlet's: tokens are random; the numbers of rows, worked examples,
choices and tokens are those of nine tasks of v0.3 (mean tokens of a byte-level BPE of 8k tokens on
the real rows). Each row is evaluated twice: with the task's fixed worked examples (`native`), and
with some drawn for the row (LLM Foundry's way), which share far less.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from llmfoundry.gauntlet.models.own_decoder import score_requests
from llmfoundry.gauntlet.models.tree import grow
from llmfoundry.gauntlet.questions import ScoreRequest
from llmfoundry.hf.config_keys import write_settings
from llmfoundry.hf.tensor_names import MAPS, to_theirs
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import Problem, build

VOCAB = 8192
EOS = 0


@dataclass(frozen=True)
class TaskShape:
    """A task: mean numbers of tokens.

    Attributes:
        shots: worked examples.
        question: tokens of a question, in `schema` of a context.
        answer: tokens of a choice, in `schema` of what follows the contexts.
        choices: options of a row; 1: the answer is written freely.
        schema: the options are contexts, which differ in their last two tokens.
        letters: the choices are the same for all rows, one token each.
    """

    shots: int
    question: int
    answer: int
    choices: int
    schema: bool = False
    letters: bool = False


SHAPES = {
    "arc_easy": TaskShape(3, 45, 8, 4),
    "boolq": TaskShape(0, 224, 1, 2, letters=True),
    "winogrande": TaskShape(5, 23, 14, 2, schema=True),
    "winograd": TaskShape(3, 24, 8, 2, schema=True),
    "commonsense_qa": TaskShape(0, 65, 1, 4, letters=True),
    "piqa": TaskShape(0, 19, 39, 2),
    "lambada": TaskShape(0, 120, 2, 1),
    "copa": TaskShape(0, 15, 10, 2),
    "arithmetic": TaskShape(5, 6, 2, 1),
}


@dataclass(frozen=True)
class _Row:
    contexts: list[list[int]]
    choices: list[list[int]]


def requests(n_rows: int, *, fixed: bool, seed: int = 0) -> list[ScoreRequest]:
    """All rows' requests.

    Args:
        n_rows: of all tasks together, equally many of each.
        fixed: the same worked examples for all rows of a task; else each row has its own.
        seed: of lengths and tokens, which do not depend on `fixed`.
    """
    found: list[ScoreRequest] = []
    for name, shape in SHAPES.items():
        lengths, draws = random.Random(f"{seed} {name}"), random.Random(f"{seed} {name} shots")
        rows = [_row(shape, lengths) for _ in range(n_rows // len(SHAPES))]
        kept = draws.sample(range(len(rows)), shape.shots + 1)
        for i, row in enumerate(rows):
            pool = kept if fixed else draws.sample(range(len(rows)), shape.shots + 1)
            examples = [rows[j] for j in pool if j != i][: shape.shots]
            found += _asked(row, examples)
    return found


def _row(shape: TaskShape, rng: random.Random) -> _Row:
    question = _tokens(rng, shape.question)
    if shape.schema:
        contexts = [[*question, *_tokens(rng, 2)] for _ in range(shape.choices)]
        return _Row(contexts, [_tokens(rng, shape.answer)])
    if shape.letters:
        return _Row([question], [[1 + letter] for letter in range(shape.choices)])
    return _Row([question], [_tokens(rng, shape.answer) for _ in range(shape.choices)])


def _tokens(rng: random.Random, mean: int) -> list[int]:
    n = max(1, round(rng.gauss(mean, mean / 3)))
    return [rng.randrange(16, VOCAB) for _ in range(n)]


def _asked(row: _Row, examples: list[_Row]) -> Iterator[ScoreRequest]:
    """A request for each option, after the worked examples with their first option."""
    before = [EOS, *(t for e in examples for t in (*e.contexts[0], *e.choices[0]))]
    for context in row.contexts:
        for choice in row.choices:
            yield ScoreRequest((*before, *context, *choice[:-1]), tuple(choice), "")


SEQ = 2048
BATCH_TOKENS = 4096
HARNESS_BATCH = 16
PADDED_BATCH, PADDED_BATCHES = 4, 4  # rows a batch; batches that are timed, the first one is not
LLAMA = "LlamaForCausalLM"
OURS, HARNESS = "ours", "lm-evaluation-harness"
PADDED = "padded to 2048"  # LLM Foundry's layout
KINDS = {"fixed for a task (native)": True, "drawn for each row": False}
MODEL = {
    "d_model": 256,
    "n_heads": 4,
    "n_layers": 8,
    "vocab_size": VOCAB,
    "max_seq_len": SEQ,
    "no_bias": True,
    "norm_type": "rmsnorm",
    "attn_config": {"rope": True},
    "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 768, "ffn_act_fn": {"name": "silu"}},
}


@dataclass(frozen=True)
class Ran:
    """What an evaluator did.

    Attributes:
        tokens: that went through the model, padding with them.
        seconds: of CPU time.
        logprobs: by request; only those that were computed.
    """

    tokens: int
    seconds: float
    logprobs: dict[int, float]


def main() -> None:
    """Run all, print the tables, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=900, help="of all tasks together")
    rows = parser.parse_args().rows // len(SHAPES) * len(SHAPES)
    torch.set_num_threads(1)
    model = _model()
    size = sum(p.numel() for p in model.parameters())
    print(f"{rows} rows of {len(SHAPES)} generated tasks; {size:,} parameters, one thread")
    with_harness = importlib.util.find_spec("lm_eval") is not None
    if not with_harness:
        print("lm_eval is not installed (pip install 'llmfoundry-recipes[eval]'): left out")
    found: list[dict[str, Any]] = []
    for kind, fixed in KINDS.items():
        asked = requests(rows, fixed=fixed)
        _ours(model, asked[:64])  # warm
        done = {OURS: _ours(model, asked)}
        if with_harness:
            done[HARNESS] = _harness(model, asked)
        done[PADDED] = _padded(model, asked)
        unshared = sum(len(request.tokens) for request in asked)
        print(f"\nworked examples {kind}: {len(asked):,} requests of {unshared:,} tokens")
        print("\n".join(table(done, rows)), flush=True)
        found += [{"worked examples": kind} | row for row in measured(done, rows)]
    timed = PADDED_BATCH * PADDED_BATCHES
    print(f"\nPadded: {timed} requests, extrapolated.")
    settings = {"rows": rows, "parameters": size, "threads": 1}
    print(f"written to {harness.write('evaluation', found, settings)}")


COLUMNS = {
    "evaluator": "{}",
    "tokens": "{:,}",
    "CPU-s": "{:.1f}",
    "rows/CPU-s": "{:.1f}",
    "of harness, speed": "{:.2f}",
    "of padded, tokens: 1 /": "{:.1f}",
    "max |diff|": "{:.1e}",
}


def table(done: dict[str, Ran], rows: int) -> list[str]:
    """A line for each evaluator."""
    return harness.table(measured(done, rows), COLUMNS)


def measured(done: dict[str, Ran], rows: int) -> list[dict[str, Any]]:
    """A row for each evaluator, beside the harness's time and the padded rows' tokens."""
    found = []
    for name, ran in done.items():
        facts: list[Any] = [name, ran.tokens, ran.seconds, rows / ran.seconds]
        facts.append(done[HARNESS].seconds / ran.seconds if HARNESS in done else None)
        facts.append(done[PADDED].tokens / ran.tokens)
        facts.append(max(abs(value - done[OURS].logprobs[i]) for i, value in ran.logprobs.items()))
        found.append(dict(zip(COLUMNS, facts, strict=True)))
    return found


def _model() -> Decoder:
    problems: list[Problem] = []
    config = build(ModelConfig, MODEL, problems)
    assert not problems, problems
    model = Decoder(config.resolve(max_seq_len=SEQ))
    model.init_weights(seed=0)
    return model.eval()


def _ours(model: Decoder, asked: Sequence[ScoreRequest]) -> Ran:
    """The gauntlet's own scoring; the time to grow the tree is counted."""
    started = time.process_time()
    forest = grow(asked, seq_len=SEQ)
    scores = score_requests(
        Root(model),
        asked,
        seq_len=SEQ,
        eos_id=EOS,
        device=torch.device("cpu"),
        batch_tokens=BATCH_TOKENS,
        autocast=nullcontext,
        forest=forest,
    )
    seconds = time.process_time() - started
    return Ran(forest.tokens_computed, seconds, dict(enumerate(s.logprob for s in scores)))


def _harness(model: Decoder, asked: Sequence[ScoreRequest]) -> Ran:
    """The harness's own batching, padding and log-softmax, given tokens in place of texts."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of models given as objects
    words = WordLevel({str(i): i for i in range(VOCAB)}, unk_token=str(EOS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=str(EOS))
    tokens = 0

    def count(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal tokens
        tokens += (inputs[0] if inputs else options["input_ids"]).numel()

    theirs = _transformers_model(model)
    theirs.register_forward_pre_hook(count, with_kwargs=True)
    lm = HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=HARNESS_BATCH, max_length=SEQ)
    entries = []
    for i, request in enumerate(asked):
        context = request.tokens[: len(request.tokens) - len(request.targets) + 1]
        entries.append((("", str(i)), list(context), list(request.targets)))
    started = time.process_time()
    answers = lm._loglikelihood_tokens(entries, disable_tqdm=True)
    seconds = time.process_time() - started
    return Ran(tokens, seconds, dict(enumerate(logprob for logprob, _ in answers)))


def _transformers_model(model: Decoder) -> Any:
    """The same weights in transformers' class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**write_settings(model.config, LLAMA))
    theirs = AutoModelForCausalLM.from_config(settings)
    ours = model.state_dict()
    tensors = to_theirs(MAPS[LLAMA], model.config, ours, ours.__getitem__)
    state = {tensor.name: tensor.read() for tensor in tensors}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # it is tied
    return theirs.eval()


@torch.no_grad()
def _padded(model: Decoder, asked: Sequence[ScoreRequest]) -> Ran:
    """LLM Foundry's layout: each request a row of the longest length, logits of all places."""
    n = PADDED_BATCH * (PADDED_BATCHES + 1)
    chosen = torch.linspace(0, len(asked) - 1, n).long().tolist()
    logprobs: dict[int, float] = {}
    seconds = 0.0
    for start in range(0, n, PADDED_BATCH):
        started = time.process_time()
        batch = chosen[start : start + PADDED_BATCH]
        tokens = torch.full((len(batch), SEQ), EOS)
        for row, i in zip(tokens, batch, strict=True):
            row[: len(asked[i].tokens)] = torch.tensor(asked[i].tokens)
        logits = model.head(model(tokens))
        for row, i in zip(logits, batch, strict=True):
            stop, targets = len(asked[i].tokens), torch.tensor(asked[i].targets)
            found = row[stop - len(targets) : stop].log_softmax(-1)
            logprobs[i] = float(found.gather(1, targets[:, None]).sum())
        if start:  # the first batch warms up
            seconds += time.process_time() - started
    each = seconds / (PADDED_BATCH * PADDED_BATCHES)
    return Ran(len(asked) * SEQ, each * len(asked), logprobs)


if __name__ == "__main__":
    main()

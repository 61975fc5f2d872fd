"""Callbacks of a recipe, by one function for each entry of the table `CALLBACKS`.

Entry point: `build_callbacks`. `build_samples` generates continuations of prompts, and answers to
validation prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from llmfoundry.builders.run_context import RunContext
from llmfoundry.data.held_out import Chain, HeldOut
from llmfoundry.data.supervised.packed_examples import HeldOutPrompt, SupervisedHeldOut
from llmfoundry.errors import UserError
from llmfoundry.inference.decoder_slots import DecoderSlots, first_process
from llmfoundry.inference.engine import SlotEngine, check_length, draw_all
from llmfoundry.inference.requests import Sampling, SequenceRequest
from llmfoundry.inference.text import stream_text
from llmfoundry.models.attention import longest_document
from llmfoundry.models.counts import peak_flops, trained_flops_per_token
from llmfoundry.recipe.choice_table import load_code
from llmfoundry.recipe.logger import CALLBACKS
from llmfoundry.recipe.source import SourceConfig
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.train.callbacks import (
    EarlyStopper,
    GarbageCollection,
    GenerateSamples,
    LRMonitor,
    MemoryMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    StepTimes,
)
from llmfoundry.train.profiler import MemorySnapshots, ProfileFiles, Tracer
from llmfoundry.train.trainer import Callback


def build_callbacks(job: RunContext) -> list[Callback]:
    """Return the callbacks of the recipe, in the order in which they are called."""
    config = job.recipe.callbacks
    callbacks: list[Callback] = []
    for name in config.chosen():
        make = load_code(CALLBACKS[name].make, MAKERS.get(name))
        callbacks.append(make(job, **(config.plugins.get(name) or {})))
    return [*callbacks, *profilers(job)]  # last, so that traces include other callbacks of the step


def check_callbacks(recipe: ResolvedTrainRecipe, n_ranks: int) -> None:
    """Check the settings of callbacks and profiler that need no data.

    Args:
        recipe: recipe of the run.
        n_ranks: number of its processes.

    Raises:
        UserError: a rank to profile does not exist, or there are no supervised rows to answer.
    """
    profile = recipe.profile
    ranks = [rank for rank in profile.ranks or [] if isinstance(rank, int)]
    beyond = [rank for rank in ranks if rank >= n_ranks]
    if profile.is_on and beyond:
        raise UserError(
            f"profile.ranks: {beyond[0]}, but the run has ranks 0 to {n_ranks - 1}; write one"
            " of those, or all"
        )
    n_prompts = recipe.callbacks.generate.from_validation if recipe.callbacks.generate else 0
    data = recipe.data
    sources: list[SourceConfig] = [*data.streams.values()] or [data]
    sources += [data.validation] if data.validation is not None else []
    if n_prompts and not any(source.is_supervised for source in sources):
        raise _no_prompts(n_prompts)


def profilers(job: RunContext) -> Iterator[Callback]:
    """Yield the callbacks for traces of steps and for memory snapshots."""
    config, world = job.recipe.profile, job.world
    if not config.is_on:
        return
    files = ProfileFiles(job.run.folder, world, max_gib=config.max_gib)
    if config.trace:
        yield Tracer(config, files)
    if config.memory_snapshot:
        yield MemorySnapshots(config, files)


def speed_monitor(job: RunContext) -> Callback:
    """Return the callback for throughput, from the FLOPs of trained parameters."""
    flops = trained_flops_per_token(job.root.model, job.recipe.max_seq_len)
    window, peak = job.recipe.callbacks.speed_window, peak_flops(job.world.device)
    if job.recipe.fp8_recipe is not None:
        peak = None  # the bf16 peak does not apply to fp8, which only some matmuls use
    return SpeedMonitor(window=window, flops_per_token=flops, peak_flops=peak)


def step_times(job: RunContext) -> Callback:
    """Return the callback for the components of step time."""
    return StepTimes(job.world.device)


def lr_monitor(job: RunContext) -> Callback:
    """Return the callback for learning rates."""
    return LRMonitor()


def optimizer_monitor(job: RunContext) -> Callback:
    """Return the callback for norms of parameters, gradients and optimizer state."""
    return OptimizerMonitor()


def memory_monitor(job: RunContext) -> Callback:
    """Return the callback for peak memory."""
    return MemoryMonitor()


def runtime_estimator(job: RunContext) -> Callback:
    """Return the callback for the remaining time."""
    return RuntimeEstimator()


def generate_samples(job: RunContext) -> Callback:
    """Return the callback for text samples."""
    return GenerateSamples(job.recipe.callbacks.generate, build_samples(job))


def early_stopper(job: RunContext) -> Callback:
    """Return the callback that ends a run which no longer improves."""
    return EarlyStopper(job.recipe.callbacks.early_stopper)


def garbage_collection(job: RunContext) -> Callback:
    """Return the callback that collects garbage in the same step on all ranks."""
    return GarbageCollection(job.recipe.callbacks.gc_interval)


SLOTS = 8
"""Maximum number of samples generated at once, with at most the tokens of a microbatch."""
Sample = tuple[str, ...]
"""Prompt and generated text; for validation prompts also the reference answer."""


MAKERS: dict[str, Callable[..., Callback]] = {
    "speed_monitor": speed_monitor,
    "step_times": step_times,
    "lr_monitor": lr_monitor,
    "optimizer_monitor": optimizer_monitor,
    "memory_monitor": memory_monitor,
    "runtime_estimator": runtime_estimator,
    "generate": generate_samples,
    "early_stopper": early_stopper,
    "gc_interval": garbage_collection,
}
"""Functions of the CALLBACKS that the project defines. `watch` belongs to a higher package;
`cli/commands/train.py` registers it."""


def build_samples(job: RunContext) -> Callable[[int], list[Sample]]:
    """Return a function that continues the prompts and answers the first validation prompts."""
    config = job.recipe.callbacks.generate
    validation_prompts = _asked(job, config.from_validation) if config.from_validation else []

    def write(batch: int) -> list[Sample]:
        tokenizer = job.tokenizer
        prompts = [tokenizer.encode_prompt(prompt) for prompt in config.prompts]
        prompts += [
            [int(i) for i in example.prompt] or list(tokenizer.document_start)
            for example in validation_prompts
        ]
        drawn = _drawn(job, prompts, batch)
        written: list[Sample] = [
            (prompt, "".join(stream_text(tokens, tokenizer.decode, prompt=ids)))
            for prompt, ids, tokens in zip(config.prompts, prompts, drawn, strict=False)
        ]
        answers = zip(
            validation_prompts, prompts[len(written) :], drawn[len(written) :], strict=True
        )
        return [*written, *(_answered(job, *answer) for answer in answers)]

    return write


def draw_seed(seed: int, batch: int, place: int) -> int:
    """Return the seed of one sample, a function of batch and place, also after a resume.

    Samples with the same seed would use the same quantile at each token: all prompts and times
    would have their unlikely tokens at the same positions.
    """
    digest = blake2b(f"{seed}/{batch}/{place}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _asked(job: RunContext, n: int) -> list[HeldOutPrompt]:
    prompts: list[HeldOutPrompt] = []
    for part in _parts(job.prepared.validation):
        if isinstance(part, SupervisedHeldOut):
            prompts += part.prompts(n - len(prompts))
    if not prompts:
        raise _no_prompts(n)
    return prompts


def _no_prompts(n: int) -> UserError:
    return UserError(
        f"callbacks.generate.from_validation: {n}, but no supervised rows are held out; write"
        " 0, a data.format other than text, or a larger data.validation_fraction"
    )


def _parts(held_out: HeldOut) -> Iterable[HeldOut]:
    return held_out.parts if isinstance(held_out, Chain) else [held_out]


def _answered(
    job: RunContext, example: HeldOutPrompt, prompt: list[int], drawn: list[int]
) -> Sample:
    """Return an answer up to the end of its turn, if the tokenizer's template marks it."""
    tokenizer = job.tokenizer
    end = tokenizer.chat.end_of_turn if tokenizer.has_chat else tokenizer.eos
    pieces = stream_text(drawn, tokenizer.decode, stops=[end])
    expected = tokenizer.decode(example.answer.tolist()).split(end)[0]
    return tokenizer.decode(prompt), "".join(pieces), expected.rstrip()


def _drawn(job: RunContext, prompts: list[list[int]], batch: int) -> list[list[int]]:
    """Return the generated tokens after each prompt, the same on all ranks."""
    config, device = job.recipe.callbacks.generate, job.world.device
    length = max(map(len, prompts), default=0) + config.max_new_tokens
    for prompt in prompts:
        check_length(longest_document(job.root.model.config), len(prompt), config.max_new_tokens)
    fit = job.microbatch * job.recipe.max_seq_len // length
    rows = DecoderSlots(
        job.root,
        slots=max(1, min(len(prompts), SLOTS, fit)),
        length=length,
        n_tokens=job.root.model.config.vocab_size,
        device=device,
        autocast=job.autocast,
    )
    requests = [
        SequenceRequest(
            tuple(prompt),
            config.max_new_tokens,
            Sampling(
                config.temperature, top_p=config.top_p, seed=draw_seed(job.recipe.seed, batch, n)
            ),
            frozenset(job.tokenizer.end_ids),
        )
        for n, prompt in enumerate(prompts)
    ]
    return draw_all(SlotEngine(rows, agree=first_process(device)), requests)

"""What ours is compared with: every contender is a function, run in a process of its own.

    python -m benchmarks.contenders bare_loop '{"precision": "fp32", "steps": 20}'

`harness.contender` writes that command. A contender that trains prints `step N SECONDS` lines,
which the harness times as they come. At the top this module imports only torch and numpy, and each
contender what else it needs: none adds to another's memory or start, and the loaders run in an
interpreter without this project. `accelerate` and `trl` are in the extra `bench`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, LAYERS, VOCAB, SEQ, ROWS = 256, 4, 6, 8192, 512, 8


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch; unset: the benchmark's."""

    d: int = D
    heads: int = HEADS
    layers: int = LAYERS
    vocab: int = VOCAB
    seq: int = SEQ
    rows: int = ROWS


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d, self.sizes = sizes.d, sizes
        self.norm_1, self.norm_2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Update x (B, T, D)."""
        q, k, v = (
            part.view(self.sizes.rows, self.sizes.seq, self.sizes.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """6,950,144 parameters at the benchmark's sizes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(sizes.vocab, sizes.d), nn.Embedding(sizes.seq, sizes.d)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.d, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.wte.weight.T


def bare_steps(
    sizes: Sizes, *, precision: str, steps: int, compiled: bool, device: str = "cpu"
) -> Iterator[None]:
    """Train on random tokens, which are there before a step begins; yields after each step."""
    with torch.device(device):
        model = Model(sizes)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    low = precision == "amp_bf16"
    for _ in range(steps):
        tokens = torch.randint(0, sizes.vocab, (sizes.rows, sizes.seq + 1), device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def bare_loop(*, precision: str, steps: int, compiled: bool = False) -> None:
    """The benchmark's model in the shortest PyTorch loop one would write.

    Learned positions, pre-norm blocks without biases, exact GELU, a tied head, AdamW, clipping; all
    rows causal, one document each. No checkpoints, no logging, no data.
    """
    run = bare_steps(Sizes(), precision=precision, steps=steps, compiled=compiled)
    started = time.perf_counter()
    for step, _ in enumerate(run, 1):
        print(f"step {step} {time.perf_counter() - started:.6f}", flush=True)
        started = time.perf_counter()


def hf_trainer(*, precision: str, steps: int) -> None:
    """Transformers' MPT under its Trainer: ALiBi (6.82M parameters), its own eager attention."""
    import transformers

    config = transformers.MptConfig(
        d_model=D,
        n_heads=HEADS,
        n_layers=LAYERS,
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        use_cache=False,
    )
    _train_by_hf(transformers.MptForCausalLM(config), precision=precision, steps=steps)


def _train_by_hf(model: Any, *, precision: str, steps: int) -> None:
    """Train on random tokens, with amp_bf16 under autocast."""
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(0, VOCAB, (ROWS * steps, SEQ))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            max_steps=steps,
            bf16=precision == "amp_bf16",
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=6e-4,
            max_grad_norm=1.0,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, settings, train_dataset=data, callbacks=[_stopwatch()]).train()


def _stopwatch() -> Any:
    """A callback of transformers' Trainer that prints each step's time."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seconds = time.perf_counter() - self.started
            print(f"step {state.global_step} {seconds:.6f}", flush=True)

    return Stopwatch()


EXPERTS, TOP_K = 16, 4
CLIP, THETA, INIT_STD = 8.0, 5e5, 0.02
BALANCE = 0.01  # the load-balancing loss where all experts are equally loaded


@dataclass(frozen=True)
class Size:
    """A mixture of experts that `make bench-moe` trains, of DBRX's kind: transformers has the same.

    Grouped queries, rotary positions, clipped projections, layer norms without biases, gated
    experts, untied embeddings.

    Attributes:
        d: width of a token.
        f: inner width of an expert.
        layers: blocks.
        heads: query heads.
        kv_heads: key-value heads.
    """

    d: int
    f: int
    layers: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"d {self.d}, {self.layers} layers, f {self.f}, {EXPERTS} experts choose {TOP_K}"

    @property
    def recipe(self) -> str:
        """The `model` section."""
        return f"""
model:
  d_model: {self.d}
  n_layers: {self.layers}
  n_heads: {self.heads}
  no_bias: true
  tie_word_embeddings: false
  attn_config:
    attn_type: grouped_query_attention
    kv_n_heads: {self.kv_heads}
    clip_qkv: {CLIP}
    rope: true
    rope_theta: {THETA}
  ffn_config:
    ffn_type: dmoe
    mlp_type: glu
    ffn_act_fn: silu
    ffn_hidden_size: {self.f}
    moe_num_experts: {EXPERTS}
    moe_top_k: {TOP_K}
    moe_normalize_expert_weights: 1
    moe_loss_weight: {BALANCE}
  init_config: {{name: baseline_, init_std: {INIT_STD}}}
"""


SIZES = {
    "large": Size(d=512, f=1024, layers=4, heads=8, kv_heads=4),
    "small": Size(
        d=256, f=512, layers=6, heads=4, kv_heads=2
    ),  # where a loop over experts is cheap
}


def dbrx(size: Size) -> Any:
    """Transformers' `DbrxConfig` of this size."""
    from transformers import DbrxConfig

    return DbrxConfig(
        d_model=size.d,
        n_heads=size.heads,
        n_layers=size.layers,
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        initializer_range=INIT_STD,
        output_router_logits=True,  # without it there is no balancing loss
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        # it fails without this rope_theta, which it does not use
        attn_config={"clip_qkv": CLIP, "kv_n_heads": size.kv_heads, "rope_theta": THETA},
        ffn_config={
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": size.f,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
            "moe_normalize_expert_weights": 1.0,
            "moe_loss_weight": BALANCE / TOP_K,  # theirs is TOP_K where loads are equal
        },
        use_cache=False,
    )


def hf_dbrx(*, size: str, precision: str, steps: int) -> None:
    """Transformers' DBRX under its Trainer; prints its number of parameters first.

    It loops over experts, and has the same load-balancing loss. In bf16 its weights are bf16 too:
    its loop fails under autocast (index_add_ of two types).
    """
    from transformers import AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = AutoModelForCausalLM.from_config(dbrx(SIZES[size]), dtype=dtype)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    _train_by_hf(model, precision=precision, steps=steps)


def trl_sft(
    *,
    model: str,
    rows: str,
    precision: str,
    length: int,
    batch: int,
    packed: bool = False,
    lora_rank: int | None = None,
) -> None:
    """TRL's SFTTrainer for one epoch, with its defaults but for gradient checkpointing.

    Args:
        model: folder of weights and tokenizer.
        rows: JSON lines of prompts and completions.
        precision: fp32 or amp_bf16.
        length: most tokens of a sequence.
        batch: sequences of a step.
        packed: whether several rows share a sequence.
        lora_rank: None: all parameters are trained.
    """
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    adapter = None
    if lora_rank is not None:
        from peft import LoraConfig

        adapter = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=batch,
            max_length=length,
            packing=packed,
            bf16=precision == "amp_bf16",
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            gradient_checkpointing=False,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        SFTTrainer(
            model,
            args=settings,
            train_dataset=load_dataset("json", data_files=rows, split="train"),
            peft_config=adapter,
            callbacks=[_stopwatch()],
        ).train()


SAMPLES, SAMPLE_TOKENS = 20_000, 2048
EOS, _IDS = 0, 50_000
_EOS_EVERY = 500  # tokens of a document, on average
_AHEAD = 8192  # samples that mosaicml-streaming reads ahead at its best; by itself 8 batches

Batches = Iterator[tuple[Tensor, Tensor]]  # int64 tokens and labels, what training needs
Make = Callable[[int, int], Batches]  # of the number of workers and of rows in a batch


def samples() -> Iterator[np.ndarray]:
    """The same for all: (SEQ,) int32, in which EOS begins a document."""
    draw = np.random.default_rng(17)
    for _ in range(SAMPLES):
        ids = draw.integers(1, _IDS, SAMPLE_TOKENS, dtype=np.int32)
        ids[draw.integers(0, _EOS_EVERY, SAMPLE_TOKENS) == 0] = EOS
        yield ids


def our_loader(folder: Path, *, apart: bool = False) -> Make:
    """This project's loader, as a run on a CPU has it; `apart`: with documents' places."""
    from llmfoundry.data.loader import BatchPrefetcher, Loader, SequenceFormat
    from llmfoundry.data.order import ONLY, Mixture, Order, Phase
    from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder
    from llmfoundry.data.shard_index import read_index
    from llmfoundry.data.sources import MDSTexts, OrderedStream, SequenceOptions, open_source
    from llmfoundry.ops.devices import keep_memory

    keep_memory()

    def make(workers: int, rows: int) -> Batches:
        shards = ShardFolder.open(None, str(folder), FetchOptions())
        reading = SequenceOptions(seq_len=SAMPLE_TOKENS, tokenizer="", eos_id=EOS, apart=apart)
        source = open_source(ONLY, ONLY, shards, read_index(shards), reading)
        assert not isinstance(source, MDSTexts)
        loader = Loader(
            [OrderedStream(source, Order(source.sizes, seed=17, shuffle=True))],
            Mixture([ONLY], [Phase(0, (1.0,))], batch_size=rows),
            SequenceFormat(SAMPLE_TOKENS, EOS, _IDS, attend_across_documents=not apart),
            workers=workers,
        )
        with closing(BatchPrefetcher(loader, 0)) as batches:
            for batch in batches:
                yield batch.tokens, batch.labels

    return make


def streaming(folder: Path, predownload: int | None = None) -> Make:
    """mosaicml-streaming, on MDS that this project wrote."""
    from streaming import StreamingDataset

    def make(workers: int, rows: int) -> Batches:
        data = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=rows, predownload=predownload
        )
        loader = torch.utils.data.DataLoader(data, batch_size=rows, num_workers=workers)
        return (_with_labels(batch["tokens"]) for batch in loader)

    return make


def litdata(folder: Path, *, as_dict: bool) -> Make:
    """Its own format: a dictionary a sample, or a stream of tokens cut into blocks."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.cache import Cache

    def item_loader() -> Any:
        return None if as_dict else TokensLoader(SAMPLE_TOKENS)

    path = str(folder / ("litdata" if as_dict else "litdata-tokens"))
    cache = Cache(path, chunk_bytes="64MB", item_loader=item_loader())
    for n, ids in enumerate(samples()):
        tokens = torch.from_numpy(ids)
        cache[n] = {"tokens": tokens} if as_dict else tokens
    cache.done()
    cache.merge()

    def make(workers: int, rows: int) -> Batches:
        data = StreamingDataset(path, shuffle=True, item_loader=item_loader())
        loader = StreamingDataLoader(data, batch_size=rows, num_workers=workers)
        return (_with_labels(batch["tokens"] if as_dict else batch) for batch in loader)

    return make


def _with_labels(ids: Tensor) -> tuple[Tensor, Tensor]:
    """As LLM Foundry's collator does; here after the workers, which costs the rivals least."""
    tokens = ids.long()
    return tokens, tokens.clone()


def time_batches(make: Make, workers: int, rows: int, seconds: float) -> dict[str, float]:
    """Read an epoch, or as much of it as `seconds` allow.

    Returns:
        first: seconds from nothing to the first batch; rate: samples a second after it.
    """
    begun = time.perf_counter()
    batches = make(workers, rows)
    assert all(t.shape == (rows, SAMPLE_TOKENS) and t.dtype == torch.int64 for t in next(batches))
    first = now = time.perf_counter()
    read = 0
    while now < first + seconds and read + 2 * rows <= SAMPLES:
        read += len(next(batches)[0])
        now = time.perf_counter()
    del batches  # ends its workers
    return {"first": first - begun, "rate": read / (now - first)}


LOADERS: dict[str, Callable[[Path], Make]] = {
    "mds": lambda folder: our_loader(folder / "mds"),
    "tokens": lambda folder: our_loader(folder / "tokens"),
    "mds-apart": lambda folder: our_loader(folder / "mds", apart=True),
    "streaming": streaming,
    "streaming-ahead": lambda folder: streaming(folder, _AHEAD),
    "litdata": lambda folder: litdata(folder, as_dict=True),
    "litdata-tokens": lambda folder: litdata(folder, as_dict=False),
}
_PACKAGES = {"streaming": "mosaicml-streaming", "litdata": "litdata"}


def loader(*, name: str, folder: str) -> None:
    """A loader: a line of JSON with a setting comes in, a line with what was measured goes out.

    `data.Contender` starts one process for each and interleaves them. The first line says that it
    is ready, with its library's version.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    torch.set_num_threads(1)
    make = LOADERS[name](Path(folder))
    package = _PACKAGES.get(name.split("-")[0])
    ready = {"version": importlib.metadata.version(package) if package else ""}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(time_batches(make, *json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))

"""Model card (README.md) of an exported folder: properties, loading, engines and scores.

Entry point: `write_card`. Engine support was measured with transformers 5.23, vLLM 0.32 and
llama.cpp 0.5; `tests/hf/test_engines.py` repeats the measurement for transformers. An engine that
generates wrong tokens without an error is listed as unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmfoundry.files import atomic_write
from llmfoundry.hf.architecture import OWN
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.gguf.architectures import SHAPES
from llmfoundry.recipe.model import ModelConfig

_LOAD = """\
import torch
{first}from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
{ask}"""
_TEXT = """\
text = tokenizer("{prompt}", return_tensors="pt", add_special_tokens=False)
document_start = torch.tensor([[model.config.bos_token_id]])  # as in training
tokens = torch.cat([document_start, text.input_ids], dim=1)
print(tokenizer.decode(model.generate(tokens, max_new_tokens=64)[0]))
"""
_CHAT = """\
chat = [{{"role": "user", "content": "{prompt}"}}]
asked = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**asked, max_new_tokens=64)[0, asked.input_ids.shape[1]:]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""


@dataclass(frozen=True)
class CardScore:
    """A measured result.

    Attributes:
        name: description of the measurement.
        value: formatted score.
        within: formatted 95 % interval or standard error; empty: unknown.
        chance: formatted score of guessing; empty: unknown or not applicable.
    """

    name: str
    value: str
    within: str = ""
    chance: str = ""


@dataclass(frozen=True)
class CardInfo:
    """Content of the card in addition to the model's settings.

    Attributes:
        name: name of the model, used as the title.
        parameters, active: number of parameters, and number of active parameters per token.
        data: one line about the training data.
        settings: important training settings by recipe key.
        trained: length of the training, such as `20000 batches, 2.6e9 tokens`.
        scores: measured results.
        prompt: example prompt.
        base: model that was fine-tuned; empty: trained from scratch.
        is_chat: whether the model was trained on conversations with its tokenizer's template.
    """

    name: str
    data: str
    parameters: int
    active: int
    settings: Mapping[str, str] = field(default_factory=dict)
    trained: str = ""
    scores: Sequence[CardScore] = ()
    prompt: str = "Once upon a time"
    base: str = ""
    is_chat: bool = False


def write_card(
    path: Path,
    card: CardInfo,
    config: ModelConfig,
    architecture: str,
    dtype: str,
    unkept: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> None:
    """Write the card to `path`.

    Args:
        path: README.md.
        card: content in addition to the model's settings.
        config: the resolved `model` section.
        architecture: class of transformers.
        dtype: dtype of the written weights.
        unkept: lines about settings that config.json does not contain.
        remarks: lines about differences in transformers.
    """
    lines = [*_lines(card, config, architecture, dtype)]
    lines += [*_list("Engines", engines(config, architecture)), *_list("In transformers", remarks)]
    lines += [*_training(card), *_list("Settings that config.json does not keep", unkept)]
    atomic_write(path, "\n".join(lines) + "\n")


def _lines(card: CardInfo, config: ModelConfig, architecture: str, dtype: str) -> Iterator[str]:
    """Yield the lines of metadata, properties, example code and scores."""
    # metadata and title
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield "license: unknown # yours to choose, as the texts it was trained on allow"
    yield from ("tags:", "- llmfoundry", "---", "", f"# {_cell(card.name)}", "")

    # properties
    parameters = f"{card.parameters:,}"
    if card.active != card.parameters:
        parameters += f", {card.active:,} active"
    shape = f"{config.n_layers} layers, width {config.d_model}, {config.n_heads} heads"
    rows = {
        "Parameters": f"{parameters} ({shape})",
        "Architecture": "our own, `llmfoundry.hf`" if architecture == OWN else architecture,
        "Weights": dtype,
        "Vocabulary": f"{config.vocab_size:,} rows",
        "Context": f"{config.max_seq_len:,} tokens",
        "Fine-tuned from": card.base,
        "Data": card.data,
        "Trained": card.trained,
        "Licence": "not chosen; write it here and above (`license:`)",
    }
    yield from ("| property | value |", "|---|---|")
    yield from (f"| {name} | {_cell(value)} |" for name, value in rows.items() if value)

    # example code; the prompt becomes a Python string
    yield from ("", "## How to load", "", "```python")
    first = "import llmfoundry.hf  # registers the model's class\n" if architecture == OWN else ""
    prompt = card.prompt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    ask = (_CHAT if card.is_chat else _TEXT).format(prompt=prompt)
    program = _LOAD.format(first=first, name=card.name, ask=ask)
    if card.is_chat:
        program = program.removeprefix("import torch\n")  # only the code without chat uses torch
    yield program + "```"

    # scores
    if card.scores:
        yield from ("", "## Scores", "", "| measured | score | 95 % interval | chance |")
        yield "|---|---:|---:|---:|"
        for score in card.scores:
            yield f"| {_cell(score.name)} | {score.value} | {score.within} | {score.chance} |"


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield a section with a list; nothing for an empty list."""
    if lines:
        yield from ("", f"## {title}", "")
        yield from (f"- {line}" for line in lines)


def _training(card: CardInfo) -> Iterator[str]:
    """Yield the section of training settings."""
    if card.settings:
        yield from ("", "## Training", "", "| recipe key | value |", "|---|---|")
        yield from (f"| `{key}` | {_cell(value)} |" for key, value in card.settings.items())


def _cell(text: str) -> str:
    """Escape a text so that it fits in one table cell or heading."""
    line = " ".join(text.split())
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


BATCHING = "transformers' continuous batching (`generate_batch`, `transformers serve`)"
BATCHES_WRONGLY = {"MptForCausalLM"}
BATCHES = {
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Starcoder2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DbrxForCausalLM",
    "GptOssForCausalLM",
}
CANNOT_BATCH = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"}
VLLM = {
    "MptForCausalLM": "vLLM: up to 0.28, the last release with MPT",
    "Starcoder2ForCausalLM": "vLLM, through its Transformers backend",
}


def engines(config: ModelConfig, architecture: str) -> list[str]:
    """Return a line for each inference engine.

    Args:
        config: the resolved `model` section.
        architecture: class of transformers, or `llmfoundry`.
    """
    is_own = architecture == OWN
    lines = ["transformers: `generate`" + (", after `import llmfoundry.hf`" if is_own else "")]
    if architecture in BATCHES_WRONGLY:
        lines.append(f"**not** {BATCHING}: wrong tokens without an error, as it leaves ALiBi out")
    elif architecture in BATCHES:
        lines.append(BATCHING)
    elif architecture in CANNOT_BATCH:
        lines.append(f"not {BATCHING}: its cache cannot hold latent attention, and requests fail")
    elif is_own and config.attn_config.alibi:
        lines.append(f"not {BATCHING}, which cannot attend with ALiBi and is refused")
    elif is_own:
        lines.append(f"{BATCHING}, or an error where it cannot attend as the model does")
    if architecture in ARCHITECTURES and architecture != "GPTNeoForCausalLM":
        lines.append(VLLM.get(architecture, "vLLM"))
    if architecture in SHAPES:
        lines.append("llama.cpp, and what is built on it: `scripts/convert.py to=gguf`")
    return [*lines, "`llmfoundry serve`"]

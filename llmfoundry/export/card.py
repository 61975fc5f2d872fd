"""The model card, README.md of an exported folder: what the model is and how to load it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmfoundry.export.settings import OWN
from llmfoundry.models.counts import active_parameter_count
from llmfoundry.models.decoder import Decoder

_LOAD = """\
import torch
{first}from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
tokens = tokenizer("{prompt}", return_tensors="pt", add_special_tokens=False).input_ids
document_start = torch.tensor([[model.config.bos_token_id]])  # as in training
tokens = torch.cat([document_start, tokens], dim=1)
print(tokenizer.decode(model.generate(tokens, max_new_tokens=64)[0]))
"""


@dataclass(frozen=True)
class CardInfo:
    """What the card says beyond what the model itself shows.

    Attributes:
        name: the model's name, its title.
        recipe: the run's recipe, YAML.
        data: what text it was trained on, a line.
        trained: how long, a line such as `20000 batches, 2.6e9 tokens`.
        scores: measured results, by metric name.
        prompt: an example to continue.
    """

    name: str
    recipe: str
    data: str
    trained: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    prompt: str = "Once upon a time"


def write_card(
    path: Path,
    card: CardInfo,
    model: Decoder,
    *,
    architecture: str,
    dtype: str,
    unkept: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> None:
    """Write the card to `path`.

    Args:
        path: README.md.
        card: what the model itself does not show.
        model: with its weights.
        architecture: transformers' class.
        dtype: of the written weights.
        unkept: lines about settings that config.json leaves out.
        remarks: lines about what is different in transformers.
    """
    lines = [*_lines(card, model, architecture, dtype), *_list("In transformers", remarks)]
    lines += _recipe(card, unkept)
    path.write_text("\n".join(lines) + "\n")


def _lines(card: CardInfo, model: Decoder, architecture: str, dtype: str) -> Iterator[str]:
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield from ("tags:", "- llmfoundry", "---", "", f"# {card.name}", "")
    parameters = sum(p.numel() for p in model.parameters())
    config = model.config
    active = active_parameter_count(config)
    share = "" if active == parameters else f", of which a token visits {active:,}"
    wide = f"{config.n_layers} layers, width {config.d_model}, {config.n_heads} heads"
    rows = {
        "Parameters": f"{parameters:,}{share} ({wide})",
        "Architecture": "our own, `llmfoundry.hf`" if architecture == OWN else architecture,
        "Weights": dtype,
        "Vocabulary": f"{config.vocab_size:,} rows",
        "Context": f"{config.max_seq_len:,} tokens",
        "Data": card.data,
        "Trained": card.trained,
    }
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in rows.items() if value)
    yield from ("", "## How to load", "", "```python")
    first = "import llmfoundry.hf  # registers the model's class\n" if architecture == OWN else ""
    prompt = card.prompt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    yield _LOAD.format(first=first, name=card.name, prompt=prompt) + "```"
    if card.scores:
        yield from ("", "## Scores", "", "| metric | value |", "|---|---|")
        yield from (f"| {name} | {value:.4f} |" for name, value in card.scores.items())


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"## {title}", "")
        yield from (f"- {line}" for line in lines)


def _recipe(card: CardInfo, unkept: Sequence[str]) -> Iterator[str]:
    yield from ("", "## Recipe", "", "```yaml", card.recipe.rstrip(), "```")
    if unkept:
        yield from ("", "Settings of the recipe that config.json does not keep:", "")
        yield from (f"- {line}" for line in unkept)

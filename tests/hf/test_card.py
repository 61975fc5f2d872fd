"""README.md of an exported folder."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from llmfoundry.hf.card import CardInfo, CardScore, write_card
from tests.hf.random_models import card_of, decoder, settings, to_hf, write_tokenizer


def export(folder: Path, architecture: str | None = None) -> str:
    config = settings()
    card = replace(
        card_of(config),
        data="two thousand | words",
        settings={"optimizer.lr": "0.001"},
        trained="300 batches, 1.2e6 tokens",
        scores=[CardScore("copa, 0-shot", "54.3%", "4.3", "50.0%")],
        prompt="w3 w4",
    )
    model, tokenizer = decoder(config), write_tokenizer(folder / "tokenizer")
    out = folder / "small"
    to_hf(model, tokenizer, out, dtype="bf16", card=card, architecture=architecture)
    return (out / "README.md").read_text()


def test_the_card_says_what_the_model_is_and_how_it_came_about(tmp_path: Path) -> None:
    text = export(tmp_path)
    header = yaml.safe_load(text.split("---")[1])
    assert header["library_name"] == "transformers" and "llmfoundry" in header["tags"]
    # 128 x 32 tokens, 24 x 32 positions, two blocks of 4+8 squares of 32 with biases, norms
    block = 12 * 32**2 + (3 + 1 + 4 + 1) * 32 + 4 * 32
    assert f"{128 * 32 + 24 * 32 + 2 * block + 64:,}" in text
    for said in ("two thousand \\| words", "300 batches", "GPT2LMHeadModel", "bf16", "24 tokens"):
        assert said in text
    assert "| copa, 0-shot | 54.3% | 4.3 | 50.0% |" in text
    assert header["license"] == "unknown" and "| Licence | not chosen" in text
    assert "| `optimizer.lr` | 0.001 |" in text and "```yaml" not in text


def test_every_file_of_an_export_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    export(tmp_path)
    before = os.umask(0o027)
    try:
        (tmp_path / "strict").mkdir()
        export(tmp_path / "strict")
    finally:
        os.umask(before)
    for folder, mode in ((tmp_path / "small", 0o666 & ~before), (tmp_path / "strict/small", 0o640)):
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert set(modes.values()) == {mode}, modes


@pytest.mark.parametrize("architecture", [None, "llmfoundry"])
def test_the_cards_program_runs(
    architecture: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = re.search(r"```python\n(.*?)```", export(tmp_path, architecture), re.DOTALL)
    assert program
    assert ("import llmfoundry.hf" in program[1]) == (architecture == "llmfoundry")
    monkeypatch.chdir(tmp_path)
    shorter = program[1].replace("max_new_tokens=64", "max_new_tokens=8")
    exec(shorter, {})
    words = capsys.readouterr().out.split()
    assert words[:3] == ["<|endoftext|>", "w3", "w4"] and len(words) > 3


def test_the_card_of_a_model_that_talks_asks_it_by_its_template(tmp_path: Path) -> None:
    talks = CardInfo("talks", "chats", 1, 1, base="runs/a", is_chat=True, prompt='Say "a"')
    write_card(tmp_path / "README.md", talks, settings(), architecture="X", dtype="fp32")
    text = (tmp_path / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert program and "import torch\n" not in program[1]
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder)
    asked: list[str] = []
    template = "{% for m in messages %}w1 {{ m.content }} w2{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(folder, chat_template=template)

    class Model:
        def generate(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
            asked.append(tokenizer.decode(input_ids[0]))
            return torch.cat([input_ids, input_ids[:, :1]], dim=1)

    lines = program[1].splitlines()
    body = "\n".join(
        line for line in lines if "from_pretrained" not in line and "import" not in line
    )
    exec(body, {"tokenizer": tokenizer, "model": Model()})
    assert len(asked) == 1 and asked[0].startswith("w1") and asked[0].endswith("w2")
    assert "| Fine-tuned from | runs/a |" in text and "| | |" not in text
    assert max(map(len, program[1].splitlines())) <= 88  # no bar to scroll by on the hub's pages

"""precision: bf16 keeps weights, gradients and optimizer in bfloat16, from start to export."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from llmfoundry.api.conversion import convert
from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.builders.model import build_root
from llmfoundry.builders.open_model import of_run
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.inference.decoder_slots import stream_tokens
from llmfoundry.inference.engine import stream
from llmfoundry.inference.requests import SequenceRequest
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepHooks, StepSettings, train_step
from tests.tiny import losses, write_recipe
from tests.train.here import dtypes, rows, train_here
from tests.train.test_step import make_batch, make_root

ALONE = World(0, 1, 0, torch.device("cpu"))
BF16 = "precision=bf16"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml and a run of 8 batches in bf16, saved after 4."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("precision")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("whole", BF16, "max_duration=8ba")
        yield folder


def test_weights_and_moments_are_bfloat16_on_the_disk(place: Path) -> None:
    found = dtypes(place / "runs/whole/checkpoints/ba0000008")
    wide = {name for name, dtype in found.items() if dtype != "torch.bfloat16"}
    assert any(name.endswith("exp_avg_sq") for name in found)
    assert wide == {name for name in found if name.endswith(".step")}


def test_weights_begin_as_those_of_fp32_rounded(place: Path) -> None:
    roots = {}
    for precision in ("fp32", "bf16"):
        recipe = checked(TrainRecipe, "tiny.yaml", [f"precision={precision}"]).resolve()
        recipe.model.fill(vocab_size=257)
        roots[precision] = build_root(recipe).to_empty(device="cpu")
        roots[precision].model.init_weights(17)
    pairs = zip(roots["fp32"].parameters(), roots["bf16"].parameters(), strict=True)
    assert all(torch.equal(wide.bfloat16(), low) for wide, low in pairs)


def test_losses_stay_near_fp32(place: Path) -> None:
    train_here("fp32", "max_duration=8ba", "eval=off")
    assert losses(Path("runs/whole")) == pytest.approx(losses(Path("runs/fp32")), abs=0.05)
    assert losses(Path("runs/whole")) != losses(Path("runs/fp32"))


def test_a_resume_repeats_the_run_bit_for_bit(place: Path) -> None:
    shutil.copytree("runs/whole", "runs/resumed")
    shutil.rmtree("runs/resumed/checkpoints/ba0000008")
    train_here("resumed", BF16, "max_duration=8ba")
    assert losses(Path("runs/resumed")) == losses(Path("runs/whole"))
    metric = "metrics/eval/bits_per_byte"
    ends = [rows(Path("runs") / name, metric)[8][metric] for name in ("resumed", "whole")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("then", "now"), [("bf16", "fp32"), ("amp_bf16", "bf16")])
def test_a_run_does_not_continue_with_weights_of_another_dtype(
    place: Path, then: str, now: str
) -> None:
    name = f"{then}-{now}"
    train_here(name, f"precision={then}", "max_duration=1ba", "eval=off")
    with pytest.raises(UserError, match=r"^precision: .*, but checkpoint .*write that, or another"):
        train_here(name, f"precision={now}", "max_duration=2ba", "eval=off")
    arguments = (f"load_path=runs/{name}", "load_weights_only=true", f"precision={now}")
    train_here(f"{name}-weights", *arguments, "max_duration=1ba", "eval=off")


def test_fp32_resumes_as_amp_bf16_whose_weights_are_the_same(place: Path) -> None:
    train_here("mixed", "precision=fp32", "max_duration=1ba", "eval=off")
    train_here("mixed", "precision=amp_bf16", "max_duration=2ba", "eval=off")
    assert sorted(losses(Path("runs/mixed"))) == [1, 2]


def test_a_processor_without_bf16_computes_in_fp32_and_says_so(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("max_duration=2ba", "eval=off")
    train_here("asked", "precision=fp32", *arguments)
    capsys.readouterr()
    monkeypatch.setattr("llmfoundry.ops.devices.HAS_BF16", False)
    train_here("served", "precision=amp_bf16", *arguments)
    assert losses(Path("runs/served")) == losses(Path("runs/asked"))
    assert capsys.readouterr().out.count("precision: fp32 in place of amp_bf16") == 1
    notes: list[str] = []
    assert load_checkpoint("runs/served", ALONE, note=notes.append).recipe.precision == "fp32"
    assert [note.split(";")[0] for note in notes] == ["precision: fp32 in place of amp_bf16"]
    monkeypatch.setattr("llmfoundry.ops.devices.HAS_BF16", True)
    train_here("served", "precision=amp_bf16", "max_duration=3ba", "eval=off")
    reported = "precision: fp32 until ba0000002, amp_bf16 from here on"
    assert reported in capsys.readouterr().out


def test_evaluation_may_ask_for_wider_weights(place: Path) -> None:
    tokens = torch.arange(40)[None]
    logits = {}
    for precision in (None, "fp32"):
        loaded = load_checkpoint("runs/whole", ALONE, note=print, precision=precision)
        with torch.no_grad():
            logits[precision] = loaded.root(tokens, None, lambda model, x: model.head(x))
    assert logits[None].dtype == torch.bfloat16 and logits["fp32"].dtype == torch.float32
    apart = (logits[None].float() - logits["fp32"]).norm() / logits["fp32"].norm()
    assert 0 < apart < 0.02  # each product rounds to 8 bits: processors differ in where


def test_it_generates_with_and_without_a_cache(place: Path) -> None:
    loaded = load_checkpoint("runs/whole", ALONE, note=print)
    prompt = (loaded.tokenizer.eos_id, *loaded.tokenizer.encode("line"))
    request = SequenceRequest(prompt, 12, stop_ids=frozenset({loaded.tokenizer.eos_id}))
    anew = stream_tokens(loaded.root, request, device=ALONE.device, autocast=nullcontext)
    engine = of_run(loaded, ALONE).engine(slots=1, length=100)
    texts = [[*anew], [*stream(engine, request)]]
    assert len(texts[0]) > 4 and texts[0][:4] == texts[1][:4]  # later, two logits may be as good


def test_export_writes_the_very_weights(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load_checkpoint("runs/whole", ALONE, note=print, precision="fp32").root.model
    for dtype in ("fp32", "bf16"):
        convert(
            checked(
                ConvertRecipe,
                None,
                ["checkpoint=runs/whole", "to=hf", f"output={dtype}", f"dtype={dtype}"],
            )
        )
        theirs = AutoModelForCausalLM.from_pretrained(dtype, dtype=torch.float32)
        tokens = torch.arange(40)[None]
        with torch.no_grad():
            torch.testing.assert_close(theirs(tokens).logits, model.head(model(tokens)))


def test_the_gradients_norm_is_summed_in_fp32() -> None:
    root, batch = make_root(), make_batch()
    root.to(torch.bfloat16)
    seen: list[torch.Tensor] = []
    config = OptimizerConfig(name="adamw")
    config.fill()
    result = train_step(
        root,
        build_optimizer(root.model, config),
        batch,
        StepSettings(
            microbatch=6, autocast=nullcontext, clipping=GradientClippingConfig("norm", 1e9)
        ),
        number=0,
        guard=Guard(ALONE.device),
        hooks=StepHooks(
            on_gradients=lambda: seen.extend(
                p.grad for p in root.parameters() if p.grad is not None
            )
        ),
    )
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in seen))
    assert {grad.dtype for grad in seen} == {torch.bfloat16}
    assert result.grad_norm.dtype == torch.float32
    assert result.grad_norm.item() == pytest.approx(exact, rel=1e-5)  # bf16 itself has 4e-3

"""Runs that train an adapter: what they save, how they resume, and what is made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import llmfoundry as lf
from llmfoundry.api.conversion import convert, streamed_state
from llmfoundry.builders.checkpoint import load_checkpoint, open_checkpoint
from llmfoundry.builders.pretrained import open_pretrained
from llmfoundry.cli.commands.train import train
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.adapter import PretrainedConfig
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe, load_run
from llmfoundry.recipe.load import checked
from tests.selection import slow_but
from tests.tiny import finetune_recipe, losses, write_recipe
from tests.train.here import dtypes, train_here

FOLDER_S = ("adapter.r=null", "adapter.use_dora=null")  # what adapter.pretrained decides
RESIZE = "model.resize_embeddings=true"
TOKENS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(4))


def finetune_here(name: str, *overrides: str) -> Path:
    """Fine-tune runs/<name> of finetune.yaml; its folder."""
    train(checked(FinetuneRecipe, "finetune.yaml", [f"run_name={name}", *overrides]).resolve())
    return Path("runs") / name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/base and runs/lora, an adapter of it, saved after 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("adapters")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("base", "max_duration=2ba", "eval=off")
        finetune_recipe(
            folder,
            max_duration="4ba",
            save_interval="2ba",
            model={"pretrained": "runs/base"},
            adapter={"name": "lora", "r": 4, "lora_dropout": 0.1, "use_dora": True},
            eval={"validation": False},
        )
        finetune_here("lora")
        yield folder


def logits(path: str) -> torch.Tensor:
    model = load_checkpoint(path, ALONE, note=print).root.model
    with torch.no_grad():
        return model.head(model(TOKENS))


def to(kind: str, output: str, checkpoint: str = "runs/lora") -> Path:
    convert(checked(ConvertRecipe, None, [f"checkpoint={checkpoint}", f"to={kind}",
                                          f"output={output}"]))  # fmt: skip
    return Path(output)


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(place: Path) -> None:
    names = list(dtypes(Path("runs/lora/checkpoints/ba0000004")))
    model = [n for n in names if n.startswith("model.")]
    assert len(model) == 2 * 4 * 3  # blocks, layers; A, B and magnitude
    assert all(n.rpartition(".")[2].startswith("lora_") for n in model)
    moments = {n for n in names if n.endswith(("exp_avg", "exp_avg_sq"))}
    assert len(moments) == 2 * len(model)


def test_a_run_that_was_copied_with_its_base_is_opened_from_anywhere(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits("runs/lora")
    for name in ("base", "lora"):
        shutil.copytree(f"runs/{name}", tmp_path / "there/runs" / name)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits("there/runs/lora"), expected)
    shutil.copytree("there/runs/lora", "alone")
    with pytest.raises(UserError, match=r"^model\.pretrained: nothing at runs/base"):
        logits("alone")


def test_a_resumed_run_takes_the_same_steps_bit_for_bit(place: Path) -> None:
    shutil.copytree("runs/lora", "runs/again")
    shutil.rmtree("runs/again/checkpoints/ba0000004")
    finetune_here("again", "autoresume=true")
    assert losses(Path("runs/again")) == losses(Path("runs/lora"))
    one, other = (
        load_file(f"runs/{name}/checkpoints/ba0000004/adapter/adapter_model.safetensors")
        for name in ("again", "lora")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_merged_and_as_an_adapter_it_is_the_same_model_elsewhere(place: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    expected, before = logits("runs/lora"), logits("runs/base")
    assert (expected - before).abs().max() > 1e-3
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged, base = load(to("hf", "merged")), load(to("hf", "plain", "runs/base"))
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)
        adapted = peft.PeftModel.from_pretrained(base, to("peft", "alone"))
        torch.testing.assert_close(adapted(TOKENS).logits, expected, rtol=0, atol=1e-5)
    files = {path.name for path in Path("alone").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "base.json"}


def test_what_is_streamed_is_what_a_loaded_model_is_merged_to(place: Path) -> None:
    nested = ("model.pretrained=runs/lora", "adapter.use_dora=false", "max_duration=1ba")
    finetune_here("nested", *nested)
    for run in ("runs/lora", "runs/nested"):
        expected = MergedState(load_checkpoint(run, ALONE, note=print).root.model)
        loaded, _ = open_checkpoint(run, ALONE, note=print)
        state = streamed_state(loaded, note=print)
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_an_adapter_goes_out_without_its_base(place: Path, tmp_path: Path) -> None:
    shutil.copytree("runs/lora", tmp_path / "lora")
    expected = load_file(to("peft", "with-base") / "adapter_model.safetensors")
    alone = load_file(to("peft", "without", str(tmp_path / "lora")) / "adapter_model.safetensors")
    assert all(torch.equal(alone[name], expected[name]) for name in expected)


def test_a_run_begins_with_an_adapter_or_with_it_merged(place: Path) -> None:
    steps = ("max_duration=1ba", "optimizer.lr=1e-12")  # the loss of the first step, and no change
    lora = "runs/lora/checkpoints/ba0000004/adapter"
    on = finetune_here(
        "on", f"adapter.pretrained={lora}", *steps, *FOLDER_S, "adapter.lora_dropout=0"
    )
    merged = finetune_here("merged", "model.pretrained=runs/lora", "adapter=none", *steps)
    assert losses(on) == pytest.approx(losses(merged), abs=1e-6)
    torch.testing.assert_close(logits("runs/on"), logits("runs/lora"), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits("runs/merged"), logits("runs/lora"), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        None,
        pytest.param("adapter=none", marks=pytest.mark.slow),
        "adapter.modules_to_save=[wte]",
    ],
)
def test_rows_for_new_tokens_are_added_to_a_run_s(place: Path, more: str | None) -> None:
    """To a plain one's, to a fine-tuned one's, and to what an adapter's is merged to."""
    run, rows = Path("runs/base"), 320
    if more is not None:
        plain = ("adapter.use_dora=false", "adapter.lora_dropout=0") if "none" not in more else ()
        run = finetune_here(f"rows-{len(more)}", more, *plain, "max_duration=1ba")
    asked = PretrainedConfig(pretrained=str(run), resize_embeddings=True)
    before, after = (open_pretrained(asked, ALONE, note=print) for _ in range(2))
    after.config.vocab_size = rows + 64  # as `fit_vocabulary` changes it
    models = [Decoder(before.config), Decoder(after.config)]
    for found, model in zip((before, after), models, strict=True):
        found.fill(model)
    own, grown = (model.state_dict() for model in models)
    table, wider = own.pop("wte.weight"), grown.pop("wte.weight")
    assert len(table) == rows and torch.equal(wider[:rows], table)
    expected = table.double().mean(0).float().expand(64, -1)
    torch.testing.assert_close(wider[rows:], expected)
    assert all(torch.equal(own[name], grown[name]) for name in own | grown)


def test_a_run_with_more_tokens_than_its_beginning_is_saved_and_loaded(place: Path) -> None:
    """From a run, with the rows of one tokenizer more; and from the one that has them."""
    backend = bytes_backend()
    backend.add_special_tokens([f"<{n}>" for n in range(100)])
    Tokenizer(backend, END_OF_TEXT).save(Path("bigger"))
    words = ("tokenizer={name: huggingface, path: bigger}", "max_duration=1ba")
    with pytest.raises(UserError, match=r"resize_embeddings: the tokenizer has 357 tokens, and"):
        finetune_here("bigger", *words)
    run = finetune_here("bigger", *words, "model.resize_embeddings=true", "adapter.use_dora=false")
    found = load_checkpoint(str(run), ALONE, note=print).root.model
    assert len(found.wte.weight) == 384
    on = finetune_here("bigger-on", "model.pretrained=runs/bigger", "max_duration=1ba")
    assert len(load_checkpoint(str(on), ALONE, note=print).root.model.wte.weight) == 384


def test_rows_of_tokens_that_a_template_adds_train_beside_an_adapter_and_go_out(
    place: Path,
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    train_here("full-rows", "max_duration=1ba", "eval=off", "model.vocab_size=257")
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    Path("chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 16)
    chats = ("data.paths=[chats.jsonl]", "data.validation_fraction=0", "max_duration=2ba",
             "data.format=chat", "tokenizer.chat_template=chatml", "optimizer.lr=1e-2")  # fmt: skip
    with pytest.raises(UserError, match="resize_embeddings"):
        finetune_here("chatml", "model.pretrained=runs/full-rows", *chats)
    run = finetune_here("chatml", "model.pretrained=runs/full-rows", *chats, RESIZE)
    assert load_run(run / "recipe.yaml").adapter.modules_to_save == ["wte"]
    expected = logits(str(run))
    tokenizer = Tokenizer.load(run / "tokenizer")
    start, end = (tokenizer.encode_chat(token)[0] for token in ("<|im_start|>", "<|im_end|>"))
    assert tokenizer.end_ids == (tokenizer.eos_id, end)
    # Both rows began as the same mean.
    merged = to("hf", "chatml-hf", str(run))
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    rows = model.get_input_embeddings().weight
    assert (rows[start] - rows[end]).abs().max() > 1e-3
    assert model.generation_config.eos_token_id == [tokenizer.eos_id, end]
    assert transformers.AutoTokenizer.from_pretrained(merged)("<|im_end|>").input_ids == [end]
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(to("peft", "chatml-peft", str(run)))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(adapted(TOKENS).logits, expected, rtol=0, atol=1e-5)
    # A checkpoint's own folder names a base with fewer rows.
    own = json.loads((run / "checkpoints/ba0000002/adapter/adapter_config.json").read_text())
    assert own["peft_type"] == "LLMFOUNDRY_LORA"
    with pytest.raises(UserError, match="freeze: wte gains rows for new tokens"):
        finetune_here("frozen", "model.pretrained=runs/full-rows", *chats, RESIZE,
                      "adapter=none", "freeze=[wte]")  # fmt: skip


CALLS = ("data.paths=[calls.jsonl]", "data.validation_fraction=0", "data.format=prompt_response",
         "max_duration=2ba", "tokenizer.add_tokens=['<|call|>','<|result|>']",
         "optimizer.lr=1e-2")  # fmt: skip


ALONE_ROWS = "adapter.trainable_token_indices=new"
TWO_ROWS = "adapter.trainable_token_indices=[101,50]"


@pytest.mark.parametrize(
    "trained", slow_but(["tied-rows"], ["tied", "tables", "rows", "tied-rows"])
)
def test_tokens_of_a_recipe_gain_rows_that_train_and_go_out(place: Path, trained: str) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base, name = f"rows-{trained}", f"calls-{trained}"
    tied, is_rows = trained.startswith("tied"), trained.endswith("rows")
    words = ("model.vocab_size=257", f"model.tie_word_embeddings={tied}")
    train_here(base, "max_duration=1ba", "eval=off", *words)
    rows = {"prompt": "1+1?", "response": "<|call|>1+1<|result|>2"}
    Path("calls.jsonl").write_text((json.dumps(rows) + "\n") * 16)
    calls = (f"model.pretrained=runs/{base}", *CALLS, "tokenizer.split_special_tokens=false")
    with pytest.raises(
        UserError, match="tokens need as many rows, and the model has 0 free; write"
    ):
        finetune_here(name, *calls)
    rows_alone = (ALONE_ROWS, "adapter.use_dora=false") if is_rows else ()
    calls = (*calls, RESIZE, "save_interval=1ba", *rows_alone)
    run = finetune_here(name, *calls)
    adapter = load_run(run / "recipe.yaml").adapter
    tables = {"tied": ["wte"], "tables": ["wte", "lm_head"]}.get(trained, [])
    assert adapter.modules_to_save == tables
    assert adapter.trainable_token_indices == ([257, 258] if is_rows else None)
    # The new rows trained, each by itself.
    merged = to("hf", f"{name}-hf", str(run))
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    call, result = tokenizer("<|call|><|result|>").input_ids
    assert (call, result) == (257, 258)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert (table.weight[call] - table.weight[result]).abs().max() > 1e-3
    if is_rows:  # no other row moved, and no table is saved
        before = load_checkpoint(f"runs/{base}", ALONE, note=print).root.model
        assert torch.equal(model.get_input_embeddings().weight[:257], before.wte.weight)
        assert torch.equal(model.get_output_embeddings().weight[:257], before.head_weight)
        saved = dtypes(run / "checkpoints/ba0000002")
        assert not {"model.wte.weight", "model.lm_head.weight"} & {*saved}
    # The adapter is the same model in peft.
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(to("peft", f"{name}-peft", str(run)))
    tokens = torch.cat([TOKENS, torch.tensor([[call], [result]])], 1)
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
    # A resumed run takes the same step.
    again = shutil.copytree(run, f"runs/{name}-again")
    shutil.rmtree(f"{again}/checkpoints/ba0000002")
    finetune_here(f"{name}-again", *calls, "autoresume=true")
    one, other = (
        load_file(folder / "checkpoints/ba0000002/adapter/adapter_model.safetensors")
        for folder in (run, Path(again))
    )
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    if is_rows:
        _check_continued(base, run, calls)
    # A run that begins with this one has the tokens.
    with pytest.raises(
        UserError, match=r"<\|call\|> is a token of the tokenizer already \(id 257\)"
    ):
        finetune_here("calls-on", *calls, f"model.pretrained={run}")


def _check_continued(base: str, run: Path, calls: tuple[str, ...]) -> None:
    """A run that continues an adapter moves the same rows, and no others."""
    folder = run / "checkpoints/ba0000002/adapter"
    decided = ("adapter.r=null", "adapter.use_dora=null", "adapter.trainable_token_indices=null")
    words = (*calls, f"adapter.pretrained={folder}", *decided)
    for tokens, message in {
        "['<|result|>','<|call|>']": r"<\|result\|> gets the id 257, but it has the id 258 in adap",
        "['<|x|>','<|result|>']": r"<\|x\|> gets the id 257, but another token has it in adapter",
    }.items():
        with pytest.raises(UserError, match=message):
            finetune_here(f"{run.name}-other", *words, f"tokenizer.add_tokens={tokens}")
    model = load_checkpoint(str(finetune_here(f"{run.name}-on", *words)), ALONE, note=print).root
    before, after = (load_checkpoint(str(run), ALONE, note=print).root.model, model.model)
    rows = [MergedState(one)["wte.weight"] for one in (before, after)]
    moved = (rows[0] != rows[1]).any(1).nonzero().flatten().tolist()
    assert moved == [257, 258]
    assert torch.equal(after.wte.weight, before.wte.weight)


def test_rows_that_cannot_train_alone_are_refused(place: Path) -> None:
    rows = {"prompt": "1+1?", "response": "2"}
    Path("alone.jsonl").write_text((json.dumps(rows) + "\n") * 16)
    calls = (*CALLS, "data.paths=[alone.jsonl]", "adapter.use_dora=false")
    train_here("untied", "max_duration=1ba", "eval=off", "model.tie_word_embeddings=false")
    untied = (*calls, "model.pretrained=runs/untied")
    for words, message in {
        (*untied, ALONE_ROWS, "tokenizer.add_tokens=[]"): "new, but the recipe adds no tokens",
        (*untied, "adapter.trainable_token_indices=[5]"): "leaves out the new token 257",
        (*untied, "adapter.trainable_token_indices=[5,5]"): "write each id once",
        (*untied, "adapter.trainable_token_indices=all"): "all; write new, or a list of ids",
        (*untied, "adapter.trainable_token_indices=[]"): "names no token; write new",
        (
            *untied,
            "model.new_rows=pieces",
            "adapter.target_modules=[wte,Wqkv]",
            "adapter.lora_dropout=0",
        ): "model.new_rows: pieces sets rows of wte, which is frozen below",
        (*untied, ALONE_ROWS, "adapter.use_dora=true"): "have no magnitude",
        (
            *untied,
            ALONE_ROWS,
            "adapter.target_modules=[wte,Wqkv]",
            "adapter.lora_dropout=0",
        ): "wte has an adapter already",
    }.items():
        with pytest.raises(UserError, match=message):
            finetune_here("refused", *words)
    one = finetune_here("old-rows", *untied, "tokenizer.add_tokens=[]",
                        "adapter.trainable_token_indices=[50]")  # fmt: skip
    after = load_checkpoint(str(one), ALONE, note=print).root.model
    moved = MergedState(after)["wte.weight"] != after.wte.weight
    assert moved.any(1).nonzero().flatten().tolist() == [50]


def test_tokens_take_rows_that_the_model_has(place: Path) -> None:
    """A vocabulary that is padded to a multiple has 63 free, and needs no resizing."""
    rows = {"prompt": "1+1?", "response": "<|call|>1+1<|result|>2"}
    Path("padded.jsonl").write_text((json.dumps(rows) + "\n") * 16)
    calls = (*CALLS, "data.paths=[padded.jsonl]")
    with pytest.raises(
        UserError, match="resize_embeddings: has no effect, as the embedding has 320"
    ):
        finetune_here("padded", *calls, RESIZE)
    run = finetune_here("padded", *calls)
    assert load_run(run / "recipe.yaml").adapter.modules_to_save == ["wte"]
    assert len(load_checkpoint(str(run), ALONE, note=print).root.model.wte.weight) == 320


@pytest.mark.parametrize("adapter", ["none", "tables", "rows"])
@pytest.mark.parametrize("base", ["base", "pieces"])  # with free rows and tied; without, untied
def test_new_rows_begin_as_the_mean_of_their_pieces(place: Path, base: str, adapter: str) -> None:
    if base != "base" and not Path("runs/pieces").exists():
        words = ("model.vocab_size=257", "model.tie_word_embeddings=false")
        train_here("pieces", "max_duration=1ba", "eval=off", *words)
    before = load_checkpoint(f"runs/{base}", ALONE, note=print).root.model
    words = {
        "none": ("adapter=none",),
        "tables": (),
        "rows": (ALONE_ROWS, "adapter.use_dora=false"),
    }[adapter]
    words += (f"model.pretrained=runs/{base}", *CALLS[3:], "model.new_rows=pieces")
    words += () if base == "base" else (RESIZE,)
    built = lf.build("finetune.yaml", [f"run_name=built-{base}-{adapter}", *words])
    model = built.module
    state = MergedState(model)
    tables = {"wte.weight": before.wte.weight, "lm_head.weight": before.head_weight}
    for name in model.vocabulary():
        table, old = state[name], tables[name]
        for token, text in ((257, b"<|call|>"), (258, b"<|result|>")):  # bytes are their own ids
            expected = old[list(text)].double().mean(0).float()
            torch.testing.assert_close(table[token], expected, rtol=0, atol=1e-6)
        assert torch.equal(table[:257], old[:257])
    for change, message in {
        "tokenizer.add_tokens=[]": "pieces has no effect as the recipe adds no tokens; remove it",
        "adapter.pretrained=runs/lora/checkpoints/ba0000004/adapter": "with adapter.pretrained",
    }.items():
        with pytest.raises(UserError, match=message):
            words = ("model.pretrained=runs/base", "model.new_rows=pieces", *FOLDER_S, change)
            lf.build("finetune.yaml", [*words, "tokenizer.chat_template=zephyr"])


def test_an_adapter_of_another_base_is_refused(place: Path) -> None:
    lora = "adapter.pretrained=runs/lora/checkpoints/ba0000004/adapter"
    with pytest.raises(UserError, match=r"made for another base model \(blocks.*differs\)"):
        finetune_here("other", "model.pretrained=runs/lora", lora, *FOLDER_S)
    shutil.copytree("runs/lora/checkpoints/ba0000004/adapter", "broken")
    config = json.loads(Path("broken/adapter_config.json").read_text())
    for change, said in {
        "peft_type": "peft_type IA3; the decoder reads LORA",
        "bias": "bias all; the decoder reads none",
    }.items():
        value = {"peft_type": "IA3", "bias": "all"}[change]
        Path("broken/adapter_config.json").write_text(json.dumps(config | {change: value}))
        with pytest.raises(UserError, match=said):
            finetune_here("other", "adapter.pretrained=broken", *FOLDER_S)
    with pytest.raises(UserError, match=r"is an adapter; write it as adapter\.pretrained"):
        finetune_here("other", "model.pretrained=broken")
    gone = [f"adapter.{key}=null" for key in ("r", "use_dora", "lora_dropout")]
    with pytest.raises(UserError) as caught:
        finetune_here("lora", "adapter.name=none", *gone)
    (line,) = caught.value.problems  # not one for each key that went with it
    assert line.startswith("adapter.name: none, but checkpoint ") and "trained with lora" in line
    with pytest.raises(UserError, match=r"adapter\.use_dora: has no effect with adapter\.pretr"):
        finetune_here("other", lora)
    assert not Path("runs/other").exists()


@pytest.mark.parametrize(
    "optimizer",
    [
        "decoupled_adamw",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("decoupled_lionw", "muon")),
    ],
)
def test_lora_plus_trains_b_faster(place: Path, optimizer: str) -> None:
    words = (f"optimizer={optimizer}", "optimizer.lr=1e-3", "max_duration=2ba", "eval_interval=0ba")
    words += ("adapter.use_dora=false", "schedule.t_warmup=0ba", "adapter.lora_dropout=0")
    slow = finetune_here(f"{optimizer}-1", *words)
    fast = finetune_here(f"{optimizer}-16", *words, "adapter.lora_plus_ratio=16")

    def sizes(run: Path, side: str) -> float:
        file = run / "checkpoints/ba0000002/adapter/adapter_model.safetensors"
        tensors = load_file(file)
        return sum(t.norm().item() for n, t in tensors.items() if f"lora_{side}" in n)

    assert sizes(fast, "B") > 8 * sizes(slow, "B")
    assert sizes(fast, "A") == pytest.approx(sizes(slow, "A"), rel=0.2)


def test_frozen_parts_stay_and_a_typo_is_refused(place: Path) -> None:
    words = ("adapter=none", "max_duration=1ba", "schedule.t_warmup=0ba")
    finetune_here("frozen", *words, 'freeze=[wte,"blocks.0-0","*.ffn"]')
    before = load_checkpoint("runs/base", ALONE, note=print).root.model.state_dict()
    after = load_checkpoint("runs/frozen", ALONE, note=print).root.model.state_dict()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and all(
        n.startswith(("blocks.1.attn", "blocks.1.norm", "norm_f")) for n in changed
    )
    with pytest.raises(UserError, match=r"freeze\[0\]: 'wtf' matches nothing; the nearest are wte"):
        finetune_here("typo", *words, "freeze=[wtf]")


@pytest.mark.parametrize("kind", ["GPTNeoX", pytest.param("Qwen2Moe", marks=pytest.mark.slow)])
def test_on_transformers_class_peft_serves_it(place: Path, kind: str) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 256}
    shape |= {"num_attention_heads": 2, "intermediate_size": 48, "bos_token_id": 256}
    if kind == "Qwen2Moe":
        shape |= {"num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts": 4}
        shape |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 24}
    config = getattr(transformers, f"{kind}Config")(**shape, max_position_embeddings=64)
    folder = Path(kind)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    load_checkpoint("runs/base", ALONE, note=print).tokenizer.save(folder)
    dora = kind == "GPTNeoX"  # peft has none on stacked experts
    words = (f"model.pretrained={kind}", f"adapter.use_dora={dora}", "adapter.lora_dropout=0")
    run = finetune_here(kind, *words)
    shutil.copytree(run, f"{run}-2")
    shutil.rmtree(f"{run}-2/checkpoints/ba0000004")
    assert losses(finetune_here(f"{kind}-2", *words, "autoresume=true")) == losses(run)
    model = load_checkpoint(str(run), ALONE, note=print).root.model
    with torch.no_grad():
        expected = model.head(model.run(TOKENS)[0])
        load = transformers.AutoModelForCausalLM.from_pretrained
        merged, base = load(to("hf", f"{kind}-merged", str(run))), load(folder)
        assert (base(TOKENS).logits - expected).abs().max() > 1e-3
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)
        adapted = peft.PeftModel.from_pretrained(base, run / "checkpoints/ba0000004/adapter")
        torch.testing.assert_close(adapted(TOKENS).logits, expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="'q_prj' matches nothing; the nearest are"):
        finetune_here("typo", *words, "adapter.target_modules=[q_prj]")


@pytest.mark.parametrize(
    ("kind", "tied", "words"),
    [
        pytest.param("GPTNeoX", False, (TWO_ROWS,), marks=pytest.mark.slow),
        # scales its embedding
        pytest.param("Gemma3Text", True, (TWO_ROWS,), marks=pytest.mark.slow),
        ("Llama", True, (ALONE_ROWS, RESIZE, "tokenizer.add_tokens=['<|call|>','<|result|>']")),
    ],
)
def test_rows_of_tokens_of_transformers_class(
    place: Path, kind: str, tied: bool, words: tuple[str, ...]
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 256}
    shape |= {"num_attention_heads": 2, "intermediate_size": 48, "bos_token_id": 256}
    shape |= {"num_key_value_heads": 2, "head_dim": 16} if tied else {}
    name, folder = kind.removesuffix("Text"), Path(f"{kind}-rows")
    config = getattr(transformers, f"{kind}Config")(
        **shape, max_position_embeddings=64, tie_word_embeddings=tied, pad_token_id=0
    )
    base = getattr(transformers, f"{name}ForCausalLM")(config)
    base.save_pretrained(folder)
    load_checkpoint("runs/base", ALONE, note=print).tokenizer.save(folder)
    is_new = RESIZE in words
    ids = [257, 258] if is_new else [101, 50]
    words = (*words, f"model.pretrained={folder}", "model.name=hf_causal_lm", "optimizer.lr=1e-2",
             "adapter.use_dora=false", "adapter.lora_dropout=0")  # fmt: skip
    run = finetune_here(f"{kind}-rows", *words)
    shutil.copytree(run, f"{run}-2")
    shutil.rmtree(f"{run}-2/checkpoints/ba0000004")
    assert losses(finetune_here(f"{kind}-rows-2", *words, "autoresume=true")) == losses(run)
    model = load_checkpoint(str(run), ALONE, note=print).root.model
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        to("hf", f"{kind}-rows-merged", str(run))
    )
    tokens = torch.cat([TOKENS, torch.tensor([ids[:1], ids[1:]])], 1)
    own = run / "checkpoints/ba0000004/adapter"
    with torch.no_grad():
        expected = model.head(model.run(tokens)[0])
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-5)
        before, after = (m.get_input_embeddings().weight for m in (base, merged))
        moved = (before != after[:257]).any(1).nonzero().flatten().tolist()
        assert moved == ([] if is_new else [50, 101])
        if is_new:  # peft would put it on a base with fewer rows
            assert json.loads((own / "adapter_config.json").read_text())["peft_type"] != "LORA"
        else:
            adapted = peft.PeftModel.from_pretrained(
                base, to("peft", f"{kind}-rows-peft", str(run))
            )
            torch.testing.assert_close(adapted(tokens).logits, expected, rtol=0, atol=1e-5)
    # A run that continues the adapter moves the same rows.
    decided = ("adapter.r=null", "adapter.use_dora=null", "adapter.trainable_token_indices=null")
    on = finetune_here(f"{kind}-rows-on", *words, f"adapter.pretrained={own}", *decided)
    further = transformers.AutoModelForCausalLM.from_pretrained(
        to("hf", f"{kind}-rows-on-merged", str(on))
    )
    later = further.get_input_embeddings().weight
    assert (later != after).any(1).nonzero().flatten().tolist() == sorted(ids)

"""`scripts/convert.py`: a checkpoint to a Hugging Face folder or a GGUF file, or the other way."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from llmfoundry.builders.adapter import export_adapter, has_adapter
from llmfoundry.builders.job import build_root, with_defaults
from llmfoundry.builders.resume import Loaded, model_identity, open_checkpoint
from llmfoundry.builders.streamed import fill_adapter_alone, streamed_state
from llmfoundry.checkpoint.commit import COMMIT
from llmfoundry.checkpoint.run_folder import read_record
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.checkpoint.streamed import StreamedTensor, write_streamed
from llmfoundry.commands.card_scores import card_scores
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write
from llmfoundry.gauntlet.prompts.settings import DOCUMENT_START
from llmfoundry.hf.card import CardInfo
from llmfoundry.hf.gguf.write import GGUFModel, check_output, to_gguf
from llmfoundry.hf.read import HFFolder, hf_folder, open_hf
from llmfoundry.hf.write import Export, TokenizerFiles, to_hf, whole_or_nothing
from llmfoundry.models.counts import active_parameter_count, parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.quantized import is_quantized
from llmfoundry.recipe.architecture.hf_model import HFModelConfig
from llmfoundry.recipe.front.paths import show
from llmfoundry.recipe.front.typed import as_written, flat, to_yaml
from llmfoundry.recipe.scripts.after_training import ConvertRecipe
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe, load_run
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.source import TEXT
from llmfoundry.recipe.tokenizer import TokenizerConfig
from llmfoundry.redaction import public
from llmfoundry.resumable import refuse_used, resumable_folder

# What tells one training from another, where the recipe has it.
_REPORTED = (
    "max_duration",
    "max_seq_len",
    "global_train_batch_size",
    "precision",
    "optimizer.name",
    "optimizer.lr",
    "schedule.name",
    "preference.name",
    "adapter.name",
    "seed",
)

DTYPE_OF = {"fp32": "fp32", "amp_bf16": "bf16"}  # of a file, by what most of a folder is stored in
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def convert(recipe: ConvertRecipe) -> None:
    """Convert a checked recipe's checkpoint, on the CPU."""
    recipe.fill()
    if recipe.to == "gguf":
        _export_gguf(recipe)
    elif recipe.to == "peft":
        _export_adapter(recipe)
    elif recipe.to is not None:
        _export(recipe)
    else:
        _import(recipe)


def _export(recipe: ConvertRecipe) -> None:
    assert recipe.checkpoint and recipe.output
    loaded, fill = open_checkpoint(recipe.checkpoint, ALONE, note=print)
    output = Path(recipe.output).expanduser()
    refuse_used(output)
    if isinstance(loaded.recipe.model, HFModelConfig):
        fill()
        _export_class(loaded, output, recipe)
        return
    state, model = streamed_state(loaded, note=print), loaded.root.model
    export = Export(
        dtype=recipe.dtype or ("bf16" if is_quantized(model) else "fp32"),
        card=_card(loaded),
        architecture=recipe.architecture,
        is_trained=loaded.is_trained,
        shard_bytes=None if recipe.max_shard_gb is None else round(recipe.max_shard_gb * 1e9),
        source=_source(loaded),
    )
    architecture = to_hf(model.config, state, _tokenizer_files(loaded), output, export)
    print(f"{loaded.checkpoint} is {architecture} in {show(output)}")


def _export_gguf(recipe: ConvertRecipe) -> None:
    """A checkpoint, or with from=hf a folder of Hugging Face's, as a file of llama.cpp's."""
    assert recipe.checkpoint and recipe.output
    output = Path(recipe.output).expanduser()
    check_output(output)
    if recipe.from_ is not None:
        _gguf_of_folder(recipe, output)
        return
    loaded, _ = open_checkpoint(recipe.checkpoint, ALONE, note=print)
    if isinstance(loaded.recipe.model, HFModelConfig):
        raise UserError(
            "to: gguf takes the decoder's own models, and this is a class of transformers; write"
            " to=hf, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    state = streamed_state(loaded, note=print)
    files = _tokenizer_files(loaded)
    model = GGUFModel(
        str(loaded.recipe.run_name),
        loaded.root.model.config,
        state.shapes(),
        state.__getitem__,
        loaded.tokenizer,
        starts=bool(loaded.tokenizer.bos_ids) or (loaded.is_trained and not _is_chat(loaded)),
        stops=files.stops if isinstance(files.stops, list) else [files.stops],
    )
    dtype = recipe.dtype or ("bf16" if is_quantized(loaded.root.model) else "fp32")
    name = to_gguf(model, output, dtype=dtype, architecture=recipe.architecture)
    print(f"{loaded.checkpoint} is {name} of llama.cpp in {show(output)}")


def _gguf_of_folder(recipe: ConvertRecipe, output: Path) -> None:
    folder = hf_folder(str(recipe.checkpoint))
    tokenizer = Tokenizer.load(folder)
    stops = TokenizerFiles.of(tokenizer, folder).stops
    is_trained = DOCUMENT_START in json.loads((folder / "config.json").read_text())
    with open_hf(folder) as opened:
        state = {tensor.name: tensor for tensor in opened.tensors()}
        model = GGUFModel(
            folder.name,
            opened.config,
            {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()},
            lambda name: state[name].read().clone(),  # or its file stays mapped beside the next
            tokenizer,
            starts=bool(tokenizer.bos_ids) or (is_trained and not tokenizer.has_chat),
            stops=stops if isinstance(stops, list) else [stops],
        )
        dtype = recipe.dtype or DTYPE_OF[_precision(opened)]
        name = to_gguf(model, output, dtype=dtype, architecture=recipe.architecture)
    print(f"{public(str(recipe.checkpoint))} is {name} of llama.cpp in {show(output)}")


def _source(loaded: Loaded) -> str:
    """What an export's weights are, by checksums; of an adapter's base by its files' times."""
    own = (loaded.folder / COMMIT).read_text()
    return "\n".join([own, *_stamps(Path(_base(loaded) or "/nowhere"))])


def _export_adapter(recipe: ConvertRecipe) -> None:
    """An adapter alone; its base is neither read nor needed."""
    assert recipe.checkpoint and recipe.output and recipe.adapter_experts
    loaded, fill = open_checkpoint(recipe.checkpoint, ALONE, note=print)
    if isinstance(loaded.recipe.model, HFModelConfig):
        fill()
    elif has_adapter(loaded.recipe):
        fill_adapter_alone(loaded)
    output = Path(recipe.output).expanduser()
    with whole_or_nothing(output) as folder:
        architecture = export_adapter(
            loaded, folder, architecture=recipe.architecture, experts=recipe.adapter_experts
        )
    print(f"{loaded.checkpoint} is an adapter of {architecture} in {show(output)}")


def _export_class(loaded: Loaded, output: Path, recipe: ConvertRecipe) -> None:
    """A model of transformers' own class, which is what it stays."""
    from llmfoundry.hf.causal_lm import HFCausalLM
    from llmfoundry.hf.peft.class_adapter import merge_peft
    from llmfoundry.hf.write import save_class

    if recipe.architecture is not None:
        raise UserError("architecture: has no effect on a model of transformers' class; remove it")
    model: object = loaded.root.model
    assert isinstance(model, HFCausalLM)
    merge_peft(model)
    tokenizer = _tokenizer_files(loaded)
    name = save_class(model, tokenizer, output, dtype=recipe.dtype or "fp32", card=_card(loaded))
    print(f"{loaded.checkpoint} is {name} in {show(output)}")


def _tokenizer_files(loaded: Loaded) -> TokenizerFiles:
    return TokenizerFiles.of(loaded.tokenizer, loaded.folder / "tokenizer")


def _card(loaded: Loaded) -> CardInfo:
    """What the model card reports of the run."""
    recipe, batch = loaded.recipe, int(loaded.state["batch"])
    read_record(loaded.checkpoint.storage, ALONE, print)
    written = as_written(recipe)
    tokens = batch * recipe.global_train_batch_size * recipe.max_seq_len
    data, settings = written["data"], dict(flat(written))
    is_chat = _is_chat(loaded)
    return CardInfo(
        name=str(recipe.run_name),
        data=", ".join(map(_published, [data["dataset"] or data["name"], *data["paths"]])),
        parameters=parameter_count(recipe.model),
        active=active_parameter_count(recipe.model),
        settings={key: str(settings[key]) for key in _REPORTED if settings.get(key) is not None},
        trained=f"{batch:,} batches, {tokens:,} tokens",
        scores=card_scores(loaded.folder, batch),
        base=_published(_base(loaded) or ""),
        is_chat=is_chat,
        prompt="What can you do?" if is_chat else "Once upon a time",
    )


def _is_chat(loaded: Loaded) -> bool:
    """Whether it was trained on conversations, by its tokenizer's template."""
    kinds = {form for _, form in loaded.recipe.data.formats()}
    return loaded.tokenizer.has_chat and not kinds <= {TEXT}


def _published(place: str) -> str:
    """What a card may say of a place: a local path's last part, as the rest is this machine's.

    An address or a hub id stays, without secrets.
    """
    is_local = "://" not in place and (
        place.startswith((".", "/", "~", "runs/")) or place.count("/") > 1 or Path(place).exists()
    )
    return Path(place).name if is_local else public(place)


def _base(loaded: Loaded) -> str | None:
    """What a fine-tuned run began with."""
    written = load_run(loaded.folder / "recipe.yaml")
    return written.model.pretrained if isinstance(written, FinetuneRecipe) else None


def _import(recipe: ConvertRecipe) -> None:
    assert recipe.checkpoint and recipe.output
    output = Path(recipe.output).expanduser()
    refuse_used(output)
    folder = hf_folder(recipe.checkpoint)
    tokenizer = Tokenizer.load(folder)
    is_trained = DOCUMENT_START in json.loads((folder / "config.json").read_text())
    with open_hf(folder) as opened:
        written = _imported_recipe(opened, output)
        tensors = _streamed(opened, build_root(with_defaults(written)).model)
        print(f"precision: {written.precision}, as the weights are stored")
        files = {"recipe.yaml": to_yaml(written)}
        files |= {f"tokenizer/{name}": text for name, text in tokenizer.files().items()}
        state = {"batch": 0, "identity": model_identity(opened.config), "is_trained": is_trained}
        identity = repr((files, state, _stamps(folder)))
        with resumable_folder(output, identity, note=print) as (run, journal):
            atomic_write(run / "recipe.yaml", files["recipe.yaml"])
            tokenizer.save(run / "tokenizer")
            place = Storage(run).checkpoint_folder(0)
            place.mkdir(parents=True, exist_ok=True)
            n_bytes = write_streamed(place, tensors, state, files, journal)
    saved = Storage(output).checkpoint_folder(0)
    print(f"{public(recipe.checkpoint)} is {show(saved)} ({n_bytes / 1e6:,.1f} MB)")


def _imported_recipe(opened: HFFolder, output: Path) -> TrainRecipe:
    """Of a run that would train the model on."""
    return TrainRecipe(
        run_name=output.name,
        save_folder=str(output),
        max_seq_len=opened.config.max_seq_len or 2048,
        precision=_precision(opened),
        model=opened.config,
        tokenizer=TokenizerConfig(name="huggingface", path=str(output / "tokenizer")),
    )


def _streamed(opened: HFFolder, model: Decoder) -> list[StreamedTensor]:
    """All of a model's tensors, as they are read from a folder."""
    like = model.state_dict()
    return [StreamedTensor(t.name, like[t.name], t.read) for t in opened.tensors()]


def _stamps(folder: Path) -> list[str]:
    """What tells a folder's weights from others: names, sizes and times of the files."""
    patterns = (COMMIT, "*.safetensors", "*.bin")
    files = sorted(f for p in patterns for f in folder.rglob(p)) if folder.is_dir() else []
    return [f"{f} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files]


def _precision(opened: HFFolder) -> str:
    """amp_bf16 where most of the numbers are stored in bf16; otherwise fp32, which keeps them."""
    numbers = opened.weights.numbers_by_dtype()
    return "amp_bf16" if 2 * numbers.get(torch.bfloat16, 0) > sum(numbers.values()) else "fp32"

"""`scripts/convert.py`: a checkpoint to a Hugging Face folder or a GGUF file, or the other way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.builders.adapter import FOLDER, BaseCheck, adapt, has_adapter
from llmfoundry.builders.checkpoint import LoadedCheckpoint, model_identity, open_checkpoint
from llmfoundry.builders.model import build_root
from llmfoundry.builders.pretrained import base_of, check_rows, fill_tensor, open_pretrained
from llmfoundry.builders.registry import (
    Tag,
    address_of,
    check_registry,
    find_address,
    register_export,
)
from llmfoundry.checkpoint.commit import COMMIT
from llmfoundry.checkpoint.load import check_weights, load_tensors, read_table
from llmfoundry.checkpoint.record_sync import read_record
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.checkpoint.streamed import write_streamed
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, read_object_if_there, refuse_used, resumable_folder
from llmfoundry.hf.architecture import DOCUMENT_START
from llmfoundry.hf.card import CardInfo, CardScore
from llmfoundry.hf.gguf.write import GGUFModel, check_output, to_gguf
from llmfoundry.hf.read_folder import HFFolder, hf_folder, open_hf, read_folder_config
from llmfoundry.hf.write_folder import Export, TokenizerFiles, to_hf, whole_or_nothing
from llmfoundry.loggers.metrics_file import BATCH, read_metrics
from llmfoundry.loggers.pages.score_tables import ShownScore, in_parts, percents, written
from llmfoundry.loggers.pages.titles import LOSS, title
from llmfoundry.models.adapter import (
    BASE,
    BASE_ROWS,
    MergedState,
    adapted_layers,
    is_added,
    saved_names,
)
from llmfoundry.models.counts import active_parameter_count, parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.lazy_tensors import LazyTensor
from llmfoundry.models.quantized import is_quantized
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.data import TokenizerConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.source import TEXT
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, flat, to_yaml
from llmfoundry.redaction import public

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

_MORE_ROWS = "fine-tune it with model.resize_embeddings=true, which adds rows"

DTYPE_OF = {"fp32": "fp32", "amp_bf16": "bf16"}  # of a file, by what most of a folder is stored in


def convert(recipe: ConvertRecipe) -> None:
    """Convert a checked recipe's checkpoint, on the CPU."""
    recipe.fill()
    check_destination(recipe)
    check_registry(recipe.registry)
    name, uri = str(recipe.checkpoint), recipe.registry.uri
    recipe = replace(recipe, checkpoint=find_address(name, "checkpoint", uri=uri, note=print))
    if recipe.to is None:
        _import(recipe)
        return
    export = {"gguf": _export_gguf, "peft": _export_adapter}.get(recipe.to, _export)
    _register(recipe, export(recipe))


def check_destination(recipe: ConvertRecipe) -> None:
    """Refuse an output that cannot be written, before a checkpoint is looked for or read.

    Raises:
        UserError: the output exists, or is no path of a file of its kind.
    """
    output = Path(str(recipe.output)).expanduser()
    if recipe.to == "gguf":
        check_output(output)
    else:
        refuse_used(output)


def _register(recipe: ConvertRecipe, loaded: LoadedCheckpoint | None) -> None:
    """Make what was written a version of a registered model, where that is asked for."""
    assert recipe.to is not None
    facts, output = {}, Path(str(recipe.output)).expanduser()
    if loaded is not None:
        facts = {Tag.RUN: str(loaded.recipe.run_name), Tag.STEP: str(loaded.state["batch"])}
        facts[Tag.SOURCE] = public(address_of(loaded.checkpoint.storage, loaded.folder))
    source = None if loaded is None else loaded.checkpoint
    if line := register_export(recipe.registry, recipe.to, output, source, facts):
        print(f"{show(output)} is {line}")


def _export(recipe: ConvertRecipe) -> LoadedCheckpoint:
    assert recipe.checkpoint and recipe.output
    loaded, fill = _open(recipe)
    output = Path(recipe.output).expanduser()
    if isinstance(loaded.recipe.model, HFModelConfig):
        fill()
        _export_class(loaded, output, recipe)
        return loaded
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
    return loaded


def _open(recipe: ConvertRecipe) -> tuple[LoadedCheckpoint, Callable[[], None]]:
    """Open the checkpoint of a recipe, without its weights."""
    assert recipe.checkpoint is not None
    return open_checkpoint(recipe.checkpoint, ALONE, note=print, weights=recipe.weights)


def _export_gguf(recipe: ConvertRecipe) -> LoadedCheckpoint | None:
    """A checkpoint, or with from=hf a folder of Hugging Face's, as a file of llama.cpp's."""
    assert recipe.checkpoint and recipe.output
    output = Path(recipe.output).expanduser()
    if recipe.from_ is not None:
        _gguf_of_folder(recipe, output)
        return None
    loaded, _ = _open(recipe)
    if isinstance(loaded.recipe.model, HFModelConfig):
        raise UserError(
            "to: gguf takes the decoder's own models, and this is a class of transformers; write"
            " to=hf, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    state = streamed_state(loaded, note=print)
    model = GGUFModel(
        str(loaded.recipe.run_name),
        loaded.root.model.config,
        state.shapes(),
        state.__getitem__,
        loaded.tokenizer,
        starts=bool(loaded.tokenizer.bos_ids) or (loaded.is_trained and not _is_chat(loaded)),
        stops=loaded.tokenizer.end_ids,
    )
    dtype = recipe.dtype or ("bf16" if is_quantized(loaded.root.model) else "fp32")
    name = to_gguf(model, output, dtype=dtype, architecture=recipe.architecture)
    print(f"{loaded.checkpoint} is {name} of llama.cpp in {show(output)}")
    return loaded


def _gguf_of_folder(recipe: ConvertRecipe, output: Path) -> None:
    folder = hf_folder(str(recipe.checkpoint))
    tokenizer = Tokenizer.load(folder)
    is_trained = DOCUMENT_START in read_folder_config(folder)
    with open_hf(folder) as opened:
        state = {tensor.name: tensor for tensor in opened.tensors()}
        model = GGUFModel(
            folder.name,
            opened.config,
            {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()},
            lambda name: state[name].read().clone(),  # or its file stays mapped beside the next
            tokenizer,
            starts=bool(tokenizer.bos_ids) or (is_trained and not tokenizer.has_chat),
            stops=tokenizer.end_ids,
        )
        dtype = recipe.dtype or DTYPE_OF[_precision(opened)]
        name = to_gguf(model, output, dtype=dtype, architecture=recipe.architecture)
    print(f"{public(str(recipe.checkpoint))} is {name} of llama.cpp in {show(output)}")


def _source(loaded: LoadedCheckpoint) -> str:
    """What an export's weights are, by checksums; of an adapter's base by its files' times."""
    own = f"{loaded.weights}\n{(loaded.folder / COMMIT).read_text()}"
    return "\n".join([own, *_stamps(Path(_base(loaded) or "/nowhere"))])


def _export_adapter(recipe: ConvertRecipe) -> LoadedCheckpoint:
    """An adapter alone; its base is neither read nor needed."""
    assert recipe.checkpoint and recipe.output and recipe.adapter_experts
    loaded, fill = _open(recipe)
    if isinstance(loaded.recipe.model, HFModelConfig):
        fill()
    elif has_adapter(loaded.recipe):
        fill_adapter_alone(loaded)
    output = Path(recipe.output).expanduser()
    with whole_or_nothing(output) as folder:
        architecture = export_adapter(
            loaded,
            folder,
            architecture=recipe.architecture,
            experts=recipe.adapter_experts,
            base=_write_resized_base(loaded, folder, recipe),
        )
    print(f"{loaded.checkpoint} is an adapter of {architecture} in {show(output)}")
    return loaded


def _write_resized_base(loaded: LoadedCheckpoint, folder: Path, asked: ConvertRecipe) -> str | None:
    """Write a base that gained rows beside its adapter; its later name, or None: it gained none."""
    recipe = loaded.recipe
    if not isinstance(recipe, ResolvedFinetuneRecipe) or not recipe.base.resize_embeddings:
        return None
    if isinstance(loaded.recipe.model, HFModelConfig):
        raise UserError(
            f"to: peft would put the adapter on {recipe.base.pretrained}, which has fewer rows"
            " than the model that was trained; write to=hf, which merges it"
        )
    read = open_pretrained(base_of(recipe.base, loaded.folder), ALONE, note=print).read
    assert read is not None, "only of transformers' class"
    with torch.device("meta"):
        model = Decoder(loaded.root.model.config)
    export = Export(
        dtype="fp32",
        card=_card(loaded),
        architecture=asked.architecture,
        is_trained=loaded.is_trained,
    )
    state = StreamedState(model, partial(read, model))
    to_hf(model.config, state, _tokenizer_files(loaded), folder / "base", export)
    (folder / "base" / "README.md").unlink()  # it reports the run that made the adapter
    name = f"{asked.output}/base"
    print(f"{recipe.base.pretrained} with rows for new tokens is in {show(Path(name))}")
    return name


def _export_class(loaded: LoadedCheckpoint, output: Path, recipe: ConvertRecipe) -> None:
    """A model of transformers' own class, which is what it stays."""
    from llmfoundry.hf.causal_lm import HFCausalLM
    from llmfoundry.hf.peft.class_adapter import merge_peft
    from llmfoundry.hf.write_folder import save_class

    if recipe.architecture is not None:
        raise UserError("architecture: has no effect on a model of transformers' class; remove it")
    model: object = loaded.root.model
    assert isinstance(model, HFCausalLM)
    merge_peft(model)
    tokenizer = _tokenizer_files(loaded)
    name = save_class(model, tokenizer, output, dtype=recipe.dtype or "fp32", card=_card(loaded))
    print(f"{loaded.checkpoint} is {name} in {show(output)}")


def _tokenizer_files(loaded: LoadedCheckpoint) -> TokenizerFiles:
    return TokenizerFiles.of(loaded.tokenizer, loaded.folder / "tokenizer")


def _card(loaded: LoadedCheckpoint) -> CardInfo:
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
        scores=card_scores(loaded.folder, batch, name=loaded.score_name),
        base=_published(_base(loaded) or ""),
        is_chat=is_chat,
        prompt="What can you do?" if is_chat else "Once upon a time",
    )


def _is_chat(loaded: LoadedCheckpoint) -> bool:
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


def _base(loaded: LoadedCheckpoint) -> str | None:
    """What a fine-tuned run began with."""
    recipe = loaded.recipe
    return recipe.base.pretrained if isinstance(recipe, ResolvedFinetuneRecipe) else None


def _import(recipe: ConvertRecipe) -> None:
    assert recipe.checkpoint and recipe.output
    output = Path(recipe.output).expanduser()
    folder = hf_folder(recipe.checkpoint)
    tokenizer = Tokenizer.load(folder)
    is_trained = DOCUMENT_START in read_folder_config(folder)
    with open_hf(folder) as opened:
        shown = public(recipe.checkpoint)
        check_rows(opened.config, tokenizer, shown, _MORE_ROWS)
        user_recipe = _imported_recipe(opened, output)
        tensors = _streamed(opened, build_root(user_recipe.resolve()).model)
        print(f"precision: {user_recipe.precision}, as the weights are stored")
        files = {"recipe.yaml": to_yaml(user_recipe)}
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


def _streamed(opened: HFFolder, model: Decoder) -> list[LazyTensor]:
    """All of a model's tensors, in its dtypes, as they are read from a folder."""
    like = model.state_dict()
    return [
        replace(t, shape=like[t.name].shape, dtype=like[t.name].dtype) for t in opened.tensors()
    ]


def _stamps(folder: Path) -> list[str]:
    """What tells a folder's weights from others: names, sizes and times of the files."""
    patterns = (COMMIT, "*.safetensors", "*.bin")
    files = sorted(f for p in patterns for f in folder.rglob(p)) if folder.is_dir() else []
    return [f"{f} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files]


def _precision(opened: HFFolder) -> str:
    """amp_bf16 where most of the numbers are stored in bf16; otherwise fp32, which keeps them."""
    numbers = opened.weights.numbers_by_dtype()
    return "amp_bf16" if 2 * numbers.get(torch.bfloat16, 0) > sum(numbers.values()) else "fp32"


def export_adapter(
    loaded: LoadedCheckpoint,
    folder: Path,
    *,
    architecture: str | None,
    experts: str,
    base: str | None = None,
) -> str:
    """Write a loaded run's adapter in peft's format; the architecture whose names it has.

    `base` is what it is to stand on; None: what the run began with.

    Raises:
        UserError: the run has no adapter, or peft cannot serve it.
    """
    from llmfoundry.hf.peft.names import OWN_TYPE, read_config
    from llmfoundry.hf.peft.write import target_matrices, write_adapter

    model, parameters = loaded.root.model, dict(loaded.root.model.named_parameters())
    own = loaded.folder / FOLDER
    is_class = isinstance(loaded.recipe.model, HFModelConfig)
    if own.is_dir() and is_class:
        if loaded.checkpoint.averaged:
            raise UserError(
                "weights: ema of an adapter on a model of transformers' class is not written in"
                " peft's format; write to=hf, which merges it, or weights=trained"
            )
        if architecture is not None or experts != "stacked":
            raise UserError(
                "architecture, adapter_experts: have no effect on a model of transformers' class;"
                " remove them"
            )
        shutil.copytree(own, folder, dirs_exist_ok=True)
        (folder / BASE_ROWS).unlink(missing_ok=True)
        return str(model.config.name)
    plan = {name: lora for name, _, _, lora in adapted_layers(model)}
    if not plan:
        raise UserError(f"checkpoint: {loaded.folder} has no adapter; write to=hf")
    experts_per_layer = model.config.ffn_config.moe_num_experts or 1
    rows_file = own / BASE_ROWS
    from safetensors.torch import load_file  # a slow import

    base_rows = load_file(rows_file) if rows_file.exists() else {}
    name = write_adapter(
        folder,
        model.config,
        target_matrices(plan, parameters, experts_per_layer, base_rows),
        whole={n: p for n, p in parameters.items() if p.requires_grad and not is_added(n)},
        base=base or read_config(loaded.folder / FOLDER).get("base_model_name_or_path"),
        architecture=architecture,
        experts=experts,
    )
    if read_config(folder)["peft_type"] == OWN_TYPE:
        raise UserError(
            f"to: peft cannot apply all of this adapter to {name} (weights are read past the"
            " modules that it wraps); merge it by to=hf"
        )
    shutil.copyfile(loaded.folder / FOLDER / BASE, folder / BASE)
    return name


ReadParameter = Callable[[str], Tensor]
"""Gives a parameter or buffer of a model that is on the meta device, in its shape and dtype."""


def streamed_state(loaded: LoadedCheckpoint, *, note: Callable[[str], None]) -> StreamedState:
    """The weights of the plain decoder that does what a checkpoint's model does.

    Args:
        loaded: `open_checkpoint`'s, without its weights; an adapter is added to its model.
        note: reports what an adapter's base is.

    Raises:
        UserError: the checkpoint is not of its recipe's model, or an adapter's base is not there.
    """
    read = _adapted(loaded, note) if has_adapter(loaded.recipe) else read_plain(loaded)
    return StreamedState(loaded.root.model, read)


def fill_adapter_alone(loaded: LoadedCheckpoint) -> None:
    """Add an adapter's parameters, with their values, to a model that stays without weights.

    Raises:
        UserError: the checkpoint lacks one.
    """
    model = loaded.root.model
    adapt(model, loaded.recipe, checkpoint=loaded.folder)
    own = set(saved_names(model))
    like = {name: p for name, p in model.named_parameters() if name in own}
    tensors = {name: torch.empty_like(p, device="cpu") for name, p in like.items()}
    load_tensors({"model": tensors}, loaded.checkpoint)
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=like[name].requires_grad)
        model.get_submodule(path)._parameters[last] = parameter


class StreamedState(MergedState):
    """`MergedState` of a model on the meta device, whose layers have weights while one is made."""

    def __init__(self, model: Decoder, read: ReadParameter) -> None:
        super().__init__(model)
        self._read = read

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        make = self._compute(name)
        if make is None:
            return self._read(name)
        with self._with_weights(name):
            return make()

    @contextmanager
    def _with_weights(self, name: str) -> Iterator[None]:
        """The parameters of a layer that the weight `name` is made of have their values."""
        path, _, kind = name.rpartition(".")
        module = self._model.get_submodule(path)
        stacked = f"{kind}_"  # an expert stack's adapter is called after it
        mine = {
            key: parameter
            for key, parameter in module._parameters.items()
            if key == kind or (is_added(key) and (key.startswith((stacked, "lora_"))))
        }
        try:
            for key in mine:
                value = self._read(f"{path}.{key}")
                module._parameters[key] = nn.Parameter(value, requires_grad=False)
            yield
        finally:
            module._parameters |= mine


def read_plain(loaded: LoadedCheckpoint) -> ReadParameter:
    """Parameters of a checkpoint that holds all of its model."""
    checkpoint, model = loaded.checkpoint, loaded.root.model
    table = check_weights(checkpoint, model)
    like = model.state_dict()

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(like[name], device="cpu")
        load_tensors({"model": {name: tensor}}, checkpoint, table=table)
        return tensor

    return read


def _adapted(loaded: LoadedCheckpoint, note: Callable[[str], None]) -> ReadParameter:
    """Parameters of an adapter's checkpoint, and of the base that it was trained on."""
    folder, model, recipe = loaded.folder, loaded.root.model, loaded.recipe
    assert isinstance(recipe, ResolvedFinetuneRecipe)
    adapt(model, recipe, checkpoint=folder)
    own, like = set(saved_names(model)), model.state_dict()
    base = open_pretrained(base_of(recipe.base, folder), ALONE, note=note)
    check, table = BaseCheck(folder / FOLDER, "model.pretrained"), read_table(loaded.checkpoint)
    read_base = base.read
    assert read_base is not None
    check.check_names(like.keys() - own)

    def read(name: str) -> Tensor:
        if name in own:
            tensor = torch.empty_like(like[name], device="cpu")
            load_tensors({"model": {name: tensor}}, loaded.checkpoint, table=table)
            return tensor
        value = _held(model, name, read_base(model, name))
        check.compare_tensor(name, value)
        return value

    return read


def _held(model: Decoder, name: str, tensor: Tensor) -> Tensor:
    """A tensor as the model holds it: in its dtype, or in 4 bits."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    values: dict[str, Any] = module._parameters if last in module._parameters else module._buffers
    like = values[last]
    if (tensor.dtype, tensor.shape) == (like.dtype, like.shape):
        return tensor
    try:
        values[last] = nn.Parameter(torch.empty_like(like, device="cpu"), requires_grad=False)
        fill_tensor(model, name, tensor)
        return values[last].detach()
    finally:
        values[last] = like


def card_scores(checkpoint: Path, batch: int, *, name: str | None = None) -> list[CardScore]:
    """Losses of held-out text, averages, categories and tasks of a checkpoint's weights.

    Args:
        checkpoint: its folder.
        batch: of the checkpoint; measurements of others are not its.
        name: `LoadedCheckpoint.score_name`; the run has not measured other weights than its
            default; None: the checkpoint's name.
    """
    run_folder, name = checkpoint.parents[1], name or checkpoint.name
    asked = read_object_if_there(run_folder / "eval" / name / "results.json")
    result = asked.get("gauntlet") or read_object_if_there(run_folder / "eval" / f"{name}.json")
    metrics = asked.get("metrics")
    if not metrics and name == checkpoint.name:
        metrics = _logged(run_folder / "metrics.jsonl", batch)
    metrics = metrics or {}
    return [*_losses(metrics), *_categories(result), *_tasks(result)]


def _logged(path: Path, batch: int) -> dict[str, Any]:
    rows = read_metrics(path) if path.exists() else []
    return {key: value for row in rows if row[BATCH] == batch for key, value in row.items()}


def _losses(metrics: Mapping[str, Any]) -> Iterator[CardScore]:
    for name, value in metrics.items():
        known = title(name)
        if name.startswith("metrics/eval/") and known.group == LOSS:
            yield CardScore(known.text, f"{value:.4f}")


def _categories(result: Mapping[str, Any]) -> Iterator[CardScore]:
    """Averages, then categories, in which guessing counts as nothing."""
    errors, intervals = (result.get(key) or {} for key in ("stderrs", "intervals"))
    for kind in ("averages", "categories"):
        for name, value in (result.get(kind) or {}).items():
            score, within = in_parts(
                written(ShownScore(value, errors.get(name), intervals.get(name)))
            )
            yield CardScore(name.replace("_", " "), score, within, "0")


def _tasks(result: Mapping[str, Any]) -> Iterator[CardScore]:
    for task in result.get("tasks", ()):
        accuracy = ShownScore(task["accuracy"], task["stderr"], task.get("interval"))
        yield CardScore(
            f"{task['label']}, {task['num_fewshot']}-shot, {task['n']} questions",
            *in_parts(percents(accuracy)),
            f"{100 * task['chance']:.1f}%",
        )

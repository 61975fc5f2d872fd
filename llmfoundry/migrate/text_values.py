"""Converters of LLM Foundry values: data, tokenizers, tasks, evaluated models, loggers, commands.

`values.py` has the converters of all other settings. A converter gets the value and the whole file,
and returns a `MigratedSetting`. Commands are shell commands in an MCLI file that start LLM
Foundry's scripts.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llmfoundry.errors import UserError
from llmfoundry.migrate.entry import (
    CHANGED,
    MISSING,
    ForeignConfig,
    MigratedSetting,
    Take,
    changed,
    idle,
    refused,
)
from llmfoundry.migrate.values import SERVERS, duration, is_supervised, keyword
from llmfoundry.recipe.yaml_file import read_yaml

_CALL = re.compile(r"(\w+)\.py$")  # the name of a Python file at the end of a word
MOUNTED = "/mnt/config/parameters.yaml"
"""File to which MCLI writes `parameters`."""


def calls(command: str) -> list[tuple[str, list[str]]]:
    """Return the scripts that a shell command starts, with their arguments.

    A line with unbalanced quotes is split at spaces.
    """
    scripts = []
    for line in command.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        # the first word that is a Python file is the script
        for i, word in enumerate(words):
            match = _CALL.search(word)
            if match is not None:
                scripts.append((match[1], words[i + 1 :]))
                break
    return scripts


def commands_of(command: str) -> str:
    """Return the scripts of this project for the same work; their settings are not translated."""
    scripts = [_OURS[name] for name, _ in calls(command) if name in _OURS]
    here = ", then ".join(f"`python scripts/{script}.py`" for script in scripts)
    if not here:
        return "starts nothing of LLM Foundry's that is here"
    return f"here {here}; --help lists the settings"


_OURS = {
    "train": "train",
    "eval": "eval",
    "convert_dataset_hf": "prepare_data",
    "convert_composer_to_hf": "convert",
    "hf_generate": "generate",
    "hf_chat": "chat",
    "benchmark": "generate",
}
"""Script of this project for the same work as each script of LLM Foundry."""


# data


FORMATS = {
    "mosaicml/dolly_hhrlhf": "prompt_response",
    "mosaicml/instruct-v3": "prompt_response",
    "tatsu-lab/alpaca": "alpaca",
    "HuggingFaceH4/databricks_dolly_15k": "dolly",
    "databricks/databricks-dolly-15k": "dolly",
    "bigscience/P3": "p3",
    "Muennighoff/P3": "p3",
    "Muennighoff/flan": "flan",
    "teknium/OpenHermes-2.5": "openhermes",
    "math-ai/StackMathQA": "stackmathqa",
    "AI-MO/NuminaMath-CoT": "numina",
}
"""Format of each data set for which LLM Foundry registers a preprocessing function."""
ROWS = "prompt_response"
_FORMAT_NOTE = "is for rows of prompt and response; write chat if they have messages"


def loader_name(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert train_loader.name: the kind and the source of the data."""
    if value == "text":
        return MigratedSetting({"data.name": _source(theirs, "train_loader")})
    if value != "finetuning":
        return refused(f"{value}: such rows are not trained on here; keep LLM Foundry for it")
    source, form = _source(theirs, "train_loader"), _format(theirs, "train_loader")
    values = {"data.name": source}
    if source == "mixture":
        values |= {f"data.streams.{n}.format": form for n in _streams(theirs, "train_loader")}
    else:
        values["data.format"] = form
    if str(theirs.get("train_loader.dataset.hf_name")) in FORMATS:
        return MigratedSetting(values)
    return MigratedSetting(values, f"data.format: {form} {_FORMAT_NOTE}", CHANGED)


def _format(theirs: ForeignConfig, loader: str) -> str:
    """Return the format of supervised examples in a loader."""
    if theirs.get(f"{loader}.dataset.preprocessing_fn"):
        return ROWS
    return FORMATS.get(str(theirs.get(f"{loader}.dataset.hf_name")), ROWS)


def eval_loader_name(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert eval_loader.name: the source of the validation set."""
    if value != theirs.get("train_loader.name", value):
        return refused("held-out rows are of the kind that is trained on; write data.validation")
    source, names = _source(theirs, "eval_loader"), [*_streams(theirs, "eval_loader")]
    values = {"data.validation.name": "shards" if names else source}
    if value == "finetuning":
        values["data.validation.format"] = _format(theirs, "eval_loader")
    if len(names) > 1:
        return MigratedSetting(values, f"held-out text is of one stream here, {names[-1]}", CHANGED)
    return MigratedSetting(values)


def _streams(theirs: ForeignConfig, loader: str) -> dict[str, Any]:
    """Return the streams of a loader."""
    return theirs.get(f"{loader}.dataset.streams", {})


def _source(theirs: ForeignConfig, loader: str) -> str:
    """Return the name of our data source for a loader."""
    dataset = theirs.get(f"{loader}.dataset", {})
    if dataset.get("streams"):
        return "mixture"
    if dataset.get("hf_name") is None:
        return "shards"
    return "files" if _is_file(str(dataset["hf_name"])) else "huggingface"


def _is_file(name: str) -> bool:
    """Return whether `hf_name` refers to files: a folder, a URL, or a file format of `datasets`."""
    return name in ("json", "csv", "parquet", "text") or "://" in name or name[:1] in "./~"


def hf_name(loader: str) -> Take:
    """Return the converter of hf_name: a hub id, or a folder with a file for each split."""
    data = "data" if loader == "train_loader" else "data.validation"

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        # a data set of the hub
        name, split = str(value), theirs.get(f"{loader}.dataset.split", "train")
        if not _is_file(name):
            return MigratedSetting({f"{data}.dataset": name})

        # a file format, whose files are in hf_kwargs
        kwargs = theirs.get(f"{loader}.dataset.hf_kwargs", {})
        if name in ("json", "csv", "parquet", "text"):
            has_files = "data_files" in kwargs or "data_dir" in kwargs
            if has_files:
                return idle("files are read by their suffix")
            return refused("names no files", **{keyword(f"{data}.paths"): [MISSING]})

        # a folder or URL with a file for each split; a URL cannot be searched by a pattern
        file_name = f"{split}.jsonl" if "://" in name else f"{split}*"
        path = f"{name.rstrip('/')}/{file_name}"
        return MigratedSetting({f"{data}.paths": [path]}, "the split's file in the folder", CHANGED)

    return take


def data_dir(loader: str) -> Take:
    """Return the converter of data_dir: `datasets` reads the files named after the split."""
    data = "data" if loader == "train_loader" else "data.validation"

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if not _is_file(theirs.get(f"{loader}.dataset.hf_name", "")):
            why = f"a folder of a data set: copy it, and write {data}.paths"
            return refused(why) if value else idle("has no value")
        split = theirs.get(f"{loader}.dataset.split", "train")
        paths = [f"{str(value).rstrip('/')}/{split}*"]
        return MigratedSetting(
            {f"{data}.paths": paths}, f"files whose names begin with {split}", CHANGED
        )

    return take


def data_files(loader: str) -> Take:
    """Return the converter of data_files: a file or a list of files."""
    data = "data" if loader == "train_loader" else "data.validation"

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        return MigratedSetting({f"{data}.paths": value if isinstance(value, list) else [value]})

    return take


def files_of_split(loader: str) -> Take:
    """Return the converter of data_files by split: only the loader's split is used."""
    take = data_files(loader)

    def of_split(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if theirs.name != theirs.get(f"{loader}.dataset.split", "train"):
            return idle("is of another split")
        return take(value, theirs)

    return of_split


def split(loader: str) -> Take:
    """Return the converter of split: a split of the hub or the folder of shards."""
    data = "data" if loader == "train_loader" else "data.validation"

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        source = _source(theirs, loader)
        if value is None or source == "files":
            return idle("is in data.paths" if value else "has no value")
        if source == "mixture":
            names = _streams(theirs, loader)
            unset = [name for name, stream in names.items() if not stream.get("split")]
            return MigratedSetting({f"{data}.streams.{name}.split": value for name in unset})
        return MigratedSetting({f"{data}.split": value})

    return take


def preprocess(loader: str) -> Take:
    """Return the converter of preprocessing_fn, a function."""
    data = "data" if loader == "train_loader" else "data.validation"

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if value is None:
            return idle("has no value")
        if ":" not in str(value):
            why = f"{value} is registered in LLM Foundry; write module:function or file.py:function"
            return refused(why, **{keyword(f"{data}.preprocess"): MISSING})
        return MigratedSetting({f"{data}.preprocess": value})

    return take


def packing(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert packing_ratio: only whether examples are packed matters here."""
    key = "data__supervised__packing"
    if not is_supervised(theirs):
        return idle("text is packed when it is prepared")
    if value is None or value == 1:
        return MigratedSetting({"data.supervised.packing": "off"})
    why = "as many rows as fit share one, apart from each other; none is left over"
    return changed(why, **{key: "best_fit"})


def command(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the command of an MCLI file."""
    return MigratedSetting({}, commands_of(str(value)), CHANGED)


def shuffle_seed(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert shuffle_seed: the order of examples follows from seed here."""
    if value == theirs.get("seed", 17):
        return idle("the order follows from seed, which is the same")
    return changed(f"the order follows from seed ({theirs.get('seed', 17)})")


def row_length(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert a sequence length other than max_seq_len, which is the only one here."""
    if value is None or value == theirs.get("max_seq_len", value):
        return idle("is max_seq_len")
    return changed(f"is max_seq_len here ({theirs.get('max_seq_len')}), not {value}")


def batching(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert batching_method: there are no random batches here."""
    if value in ("stratified", "per_stream"):
        return MigratedSetting({"data.batching_method": value})
    why = f"{value}: every batch has every stream's part here"
    return changed(why, data__batching_method="stratified")


def drops_last(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert drop_last: an incomplete last step is always dropped here."""
    if value:
        return idle("a last step that is not whole is left out")
    return changed("a last step that is not whole is left out here, and taken there")


def size(key: str) -> Take:
    """Return the converter of a size in bytes, given as a number or a text."""
    return lambda value, theirs: (
        idle("has no value")
        if value is None
        else MigratedSetting({key: f"{value}b" if isinstance(value, int) else str(value).lower()})
    )


def validates(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert validate_hash: the index names the hash algorithm here."""
    return MigratedSetting({"data.validate_hash": bool(value)})


def held_out(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert a missing eval_loader: all examples are used for training."""
    values: dict[str, Any] = {"eval.validation": False}
    if _source(theirs, "train_loader") in ("files", "huggingface") or is_supervised(theirs):
        values["data.validation_fraction"] = 0.0
    return MigratedSetting(values, "without eval_loader no row is held out")


# evaluation, loggers and callbacks


GAUNTLETS = {
    "tasks_v0.1": ("v0.1", "eval_gauntlet_v0.1"),
    "tasks_v0.2": ("v0.2", "eval_gauntlet_v0.2"),
    "tasks_v0.3": ("v0.3", "eval_gauntlet_v0.3"),
    "tasks_light": ("light", "eval_gauntlet"),
    "lm_tasks_v0.2": ("lm_tasks", "eval_gauntlet"),
    "long_context_tasks": ("long_context", "eval_gauntlet_long_context_length"),
}
"""Task lists in LLM Foundry's scripts/eval/yamls: our gauntlet with the same tasks, and the file of
its categories."""


def _shipped_gauntlet(theirs: ForeignConfig) -> str | None:
    """Return our gauntlet with the same tasks and categories as a file; None if there is none."""
    tasks, categories = theirs.get("icl_tasks"), theirs.get("eval_gauntlet")
    if not isinstance(tasks, str) or not isinstance(categories, str | None):
        return None
    gauntlet, category_file = GAUNTLETS.get(Path(tasks).stem, ("", ""))
    fits = gauntlet and (categories is None or Path(categories).stem == category_file)
    return f"eval/gauntlets/{gauntlet}.yaml" if fits else None


def gauntlet_file(key: str) -> Take:
    """Return the converter of a file name of tasks or categories (`key`)."""

    def take(value: Any, theirs: ForeignConfig) -> MigratedSetting:
        # a task list that this project has as well
        if not value:
            return idle("is empty")
        shipped = _shipped_gauntlet(theirs)
        if shipped is not None:
            return MigratedSetting(
                {"eval.gauntlet": shipped},
                "the same tasks; rows are fetched by scripts/fetch_eval_data.py",
            )

        # a file of the user, which is relative to the migrated file
        file = theirs.beside(str(value))
        if file is None:
            why = (
                f"{value} is not there; `python scripts/migrate.py` takes that file too,"
                " and eval.gauntlet names the result"
            )
            return refused(why, eval__gauntlet=MISSING)

        # its contents become a section of the gauntlet's file
        try:
            read_yaml(file)  # checks the size limits of a recipe
            contents = OmegaConf.to_container(OmegaConf.load(file))
        except (YAMLError, OmegaConfBaseException, UserError) as error:
            raise ValueError(f"{file} is no YAML ({error})") from error
        if not isinstance(contents, dict):
            raise TypeError(f"{file} holds no keys")
        return MigratedSetting(
            {f"gauntlet.{key}": contents.get(key)},
            f"is in the gauntlet's file, from {value}",
            CHANGED,
        )

    return take


def rows_of_task(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert dataset_uri of a task; without it, our examples for the task's label are used."""
    if value is None:
        why = "names no rows; those of the label in eval/tasks/foundry.yaml are taken"
        return changed(why, gauntlet__definitions="eval/tasks/foundry.yaml")
    return MigratedSetting({f"gauntlet.icl_tasks.{theirs.index}.dataset_uri": value})


def evaluated(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert pretrained_model_name_or_path of an evaluated model: a hub id or a folder."""
    if theirs.here.get("pretrained") is False:
        return refused("pretrained: false has no weights to evaluate")
    if theirs.here.get("pretrained_lora_id_or_path"):
        return idle("the adapter's own files name the model that it is of")
    models = theirs.get("models")
    model_section = models[theirs.index] if isinstance(models, list) else theirs.values
    if model_section.get("load_path"):
        return idle("its weights are those of load_path")
    return MigratedSetting({"models": [f"hf:{value}"]})


def evaluated_checkpoint(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert load_path of an evaluated MPT model, a Composer checkpoint."""
    why = (
        "write the run, converted by LLM Foundry's scripts/inference/convert_composer_to_hf.py and"
        " `python scripts/convert.py from=hf checkpoint=FOLDER output=runs/imported`"
    )
    if value is None:
        return refused(f"has no value; {why}", checkpoint=MISSING)
    return changed(f"is Composer's checkpoint: {why}", models=[str(value)])


def evaluated_server(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the version of a model behind an OpenAI-compatible server."""
    kind = SERVERS.get(str(theirs.here.get("name")))
    if kind is None:
        return refused("is no model that is known here; write models: [hf:OWNER/NAME]")
    base = theirs.here.get("base_url") or "https://api.openai.com/v1"
    return MigratedSetting(
        {"models": [f"{kind}{base}#{value}"]}, "its key is OPENAI_API_KEY, as there"
    )


def switched_on(key: str) -> Take:
    """Return the converter of a section that may be empty, such as `lr_monitor: {}`."""
    return lambda value, theirs: MigratedSetting({key: True})


def log_interval(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert console_log_interval: console and metrics have the same interval here."""
    setting = duration("log_interval")(value, theirs)
    is_each = setting.values.get("log_interval") == "1ba"
    if is_each or not setting.values:
        return setting
    return MigratedSetting(
        setting.values, "is of metrics too, whose loss is the mean since the last", CHANGED
    )


def early_mode(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the comparison of early stopping to min or max."""
    if value is None:
        return idle("has no value")
    modes = {"less": "min", "lt": "min", "greater": "max", "gt": "max"}
    return MigratedSetting({"callbacks.early_stopper.mode": modes[str(value).lower()]})


def early_metric(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the metric of early stopping; Composer has the label of the loader in another key."""
    label = theirs.get("callbacks.early_stopper.dataloader_label", "eval")
    metric = "loss/train/total" if label == "train" else f"metrics/eval/{value}"
    return MigratedSetting({"callbacks.early_stopper.metric": metric})


# tokenizer


def tokenizer_name(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert tokenizer.name: tiktoken, that of the pretrained model, or one of the hub."""
    if theirs.kind == "eval":
        return idle("a model is evaluated with its own tokenizer")
    if value == "tiktoken":
        return MigratedSetting({"tokenizer.name": "tiktoken"})
    if theirs.kind == "finetune" and value == theirs.get("model.pretrained_model_name_or_path"):
        return MigratedSetting({"tokenizer.name": "pretrained"}, "the model's own")
    return MigratedSetting({"tokenizer.name": "huggingface", "tokenizer.path": value})


def encoding(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Convert the encoding of tiktoken."""
    if theirs.kind == "eval":
        return idle("a model is evaluated with its own tokenizer")
    return MigratedSetting({"tokenizer.encoding": value})


def template(value: Any, theirs: ForeignConfig) -> MigratedSetting:
    """Ask for a file: LLM Foundry has the template's text as a value, this project a file."""
    if value is None:
        return idle("has no value")
    return refused("write the text into a file, and tokenizer.chat_template: FILE.jinja")

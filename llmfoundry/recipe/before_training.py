"""Recipes of the scripts that prepare, inspect, plan, launch and check a run.

prepare_data.py, inspect_data.py, plan.py, launch.py and check.py take a training recipe with keys
of their own; check.py also works without one. fetch_eval_data.py and migrate.py have a few keys
only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import check_duration, one_of, set_defaults
from llmfoundry.recipe.finetune import FinetuneRecipe, ResolvedFinetuneRecipe
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.resilience import HealthCheckConfig
from llmfoundry.recipe.schema import PATH, TOKENS, Only, Range, Unless, check_fields, choice
from llmfoundry.recipe.source import AUTO, COMPARED, CORPORA, TEXT
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe, resolve_as

PREPARED_FORMATS = ("tokens", "mds")
COLUMNS = ("tokens", "text")
ENGINES = ("local", "ray")
DTYPES = ("int32", "uint16", "uint32", "int64")
_OF_TOKENS = (Only("column", ("tokens", None)), Unless("columns"))


@dataclass
class PrepareConfig:
    """What to prepare from the text that `data` names, and where."""

    output: Annotated[str | None, PATH] = None
    """A folder on this machine or at a URL (s3:// gs:// az:// …) for train/, validation/,
    manifest.json and tokenizer/. Unset: data.cache_folder, where training finds it."""
    format: Annotated[str, choice(PREPARED_FORMATS)] = "tokens"
    """tokens: a stream of token ids, split into sequences of any length when it is read. mds:
    shards of mosaicml-streaming, which LLM Foundry also reads."""
    column: Annotated[str | None, choice(COLUMNS), Only("format", "mds")] = None
    """tokens: sequences of token ids. text: one document per sample, unchanged. Unset: tokens."""
    columns: Annotated[dict[str, str], Only("format", "mds")] = field(default_factory=dict)
    """Keep these columns of each row unchanged, in place of column. Each is str, or json for lists
    and mappings: {prompt: str, response: str}, {messages: json}."""
    concat_tokens: Annotated[int | None, TOKENS, _OF_TOKENS] = None
    """Length of a sequence in tokens; unset: the recipe's max_seq_len."""
    bos_text: Annotated[str | None, _OF_TOKENS] = None
    """Text before each document, such as <s>, and before the tokens that the tokenizer adds; unset:
    nothing."""
    eos_text: Annotated[str | None, _OF_TOKENS] = None
    """Text after each document, and after the tokens that the tokenizer adds; unset: the
    end-of-text token, unless the tokenizer adds it. '': LLM Foundry's default."""
    no_wrap: Annotated[bool | None, _OF_TOKENS] = None
    """Begin each sequence with a new document and drop the part of the last document that does not
    fit. Unset: false, documents continue in the next sequence."""
    dtype: Annotated[str | None, choice(DTYPES), _OF_TOKENS] = None
    """Integer type of the token ids; default int32, as in LLM Foundry."""
    compression: Annotated[str | None, Only("format", "mds")] = None
    """Compression of the shards, such as zstd or gz:9 (also br, bz2, snappy); unset: none."""
    hashes: list[str] = field(default_factory=lambda: ["sha1"])
    """Hashes of each shard in the index, with which readers detect damage: sha1, xxh3_64 …"""
    size_limit: Annotated[int, Range(1, 2**32 - 1, "a shard has less than 4 GiB")] = 1 << 26
    """Size of a shard in bytes before compression; 64 MiB is Streaming's default."""
    licence: Annotated[str | None, Only("output")] = None
    """License of the text, as free text for the manifest."""
    source: Annotated[str | None, Only("output")] = None
    """Source of the text, as free text for the manifest."""
    engine: Annotated[str, choice(ENGINES)] = "local"
    """local: processes on this machine (data.num_workers). ray: the Ray cluster at RAY_ADDRESS
    (extra ray)."""

    def check(self, key: str = "prepare.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from self._check_columns(key)
        yield from check_fields(key, self)
        if self.output is None and self.format != "tokens":
            yield f"{key}format: {self.format} needs prepare.output; write a folder or a URL"
        if self.output is None and self.engine != "local":
            yield f"{key}engine: {self.engine} needs prepare.output; write a folder that is shared"

    def _check_columns(self, key: str) -> Iterator[str]:
        for name, kind in self.columns.items():
            yield from one_of(f"{key}columns.{name}", kind, ("str", "json"))
            if {",", ":"} & set(name):
                yield f"{key}columns: {name!r} has a comma or colon; rename the column"
        if self.columns and self.column is not None:
            yield f"{key}column: and columns exclude each other; remove one"

    def fill(self, *, max_seq_len: int) -> None:
        """Resolve defaults in place."""
        if self.format == "mds" and not self.columns:
            set_defaults(self, column="tokens")
        if self.column == "tokens":
            set_defaults(self, concat_tokens=max_seq_len, bos_text="", no_wrap=False, dtype="int32")


class ResolvedPrepareConfig(PrepareConfig):
    """`PrepareConfig` with defaults resolved."""

    column: str
    concat_tokens: int
    bos_text: str
    no_wrap: bool
    dtype: str


@dataclass
class PrepareRecipe(TrainRecipe):
    """A training recipe whose text is prepared, without training."""

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """What to prepare, and where."""
    teacher: str | None = None
    """A model that reads the prepared tokens, for loss=distill: a run's folder, a Hugging Face
    folder or hf:OWNER/NAME. Its most probable next tokens are stored next to the data."""
    top_k: Annotated[int | None, Range(1, 1 << 16), Only("teacher")] = None
    """Tokens of the teacher to store at each token of the data, 4 bytes each (6 above 65,536 tokens
    of vocabulary); default 64."""

    def settle(self) -> None:
        """Resolve `format: auto` to text, for documents and for columns that are kept."""
        if self.teacher is None:
            for source in (self.data, *self.data.streams.values()):
                source.format = TEXT if source.format == AUTO else source.format
        super().settle()

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem of the recipe."""
        # Nothing is evaluated here: text that is held out by this is not there before it.
        yield from (line for line in super().check() if not line.startswith("eval.validation:"))
        yield from self.prepare.check()
        if self.prepare.columns and self.data.text_column is not None:
            yield "data.text_column: has no effect with prepare.columns; remove it"
        if self.prepare.columns and self.data.name == "python_stdlib":
            yield "prepare.columns: python_stdlib has files, no columns; name other data"
        yield from self._check_formats()
        if self.prepare.output is None:
            if self.data.name == "shards" and self.teacher is None:
                yield "data.name: shards are prepared already; for another form: prepare.output"
            return
        if self.data.name not in (*CORPORA, "shards"):
            yield (
                f"prepare.output: holds one source, and data.name is {self.data.name}; prepare"
                " each of its streams by itself"
            )

    def _check_formats(self) -> Iterator[str]:
        """Check the formats of the rows, which a teacher reads as a run does."""
        writes = self.prepare.output is not None
        for key, form in self.data.formats():
            if form in COMPARED and self.teacher is not None:
                yield f"{key}: {form} has answers to compare, which have no teacher; write chat"
            elif form != TEXT and (self.teacher is None or writes):
                remove = "; remove prepare.output" if self.teacher is not None else ""
                yield (
                    f"{key}: {form} rows are prepared when a run begins"
                    f"{remove or f'; write format: {TEXT}'}"
                )
        if self.teacher is not None and (self.prepare.columns or self.prepare.column == "text"):
            yield "teacher: reads tokens, and prepare keeps text; write prepare.format=tokens"

    def fill(self) -> None:
        """Resolve defaults in place; call it after `check` has yielded no line."""
        if self.teacher is not None:
            set_defaults(self, top_k=64)
        if self.prepare.columns:  # data/preparation/columns.py: columns_of
            columns = (f"{n}:json" if k == "json" else n for n, k in self.prepare.columns.items())
            self.data.text_column = ",".join(columns)
            if len(self.prepare.columns) == 1:
                self.data.text_column += ","
        super().fill()
        self.prepare.fill(max_seq_len=self.max_seq_len)

    def resolve(self) -> ResolvedPrepareRecipe:
        """Return a copy with every default resolved; call after `check` found nothing."""
        return resolve_as(ResolvedPrepareRecipe, self)


class ResolvedPrepareRecipe(PrepareRecipe, ResolvedTrainRecipe):
    """`PrepareRecipe` with every default resolved."""

    prepare: ResolvedPrepareConfig
    top_k: int


@dataclass
class PrepareFinetuneRecipe(FinetuneRecipe, PrepareRecipe):
    """A fine-tuning recipe whose data a teacher reads."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem of the recipe."""
        yield from super().check()
        if self.teacher is None:
            yield "teacher: fine-tuning prepares its data by itself; write teacher=MODEL"

    def resolve(self) -> ResolvedPrepareFinetuneRecipe:  # type: ignore[override]
        """Return a copy with every default resolved; call after `check` found nothing."""
        return resolve_as(ResolvedPrepareFinetuneRecipe, self)


class ResolvedPrepareFinetuneRecipe(PrepareFinetuneRecipe, ResolvedFinetuneRecipe):
    """`PrepareFinetuneRecipe` with every default resolved."""

    prepare: ResolvedPrepareConfig
    top_k: int


@dataclass
class InspectRecipe(TrainRecipe):
    """The data that a training run reads at some time: every key of its recipe, and these."""

    at: str = "0ba"
    """The time from the start of the run, as a duration: 1e9tok, 0.8dur, 500ba. The step at this
    time is shown."""
    n: Annotated[int, Range(0)] = 4
    """Maximum number of sequences of the step to show; 0: none."""
    json: bool = False
    """Print JSON lines for sequences, streams and phases in place of tables."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem of the recipe."""
        yield from check_duration("at", self.at)
        yield from super().check()


@dataclass
class InspectFinetuneRecipe(FinetuneRecipe, InspectRecipe):
    """The data that a fine-tuning run reads at some time: every key of its recipe, and these."""


PLAN_FORMATS = ("text", "json")


@dataclass
class PlanRecipe(TrainRecipe):
    """The plan of a training run on other hardware: every key of its recipe, and these."""

    hardware: str = "8xh100"
    """Number and kind of GPUs: 8xh100, 64xa100-80gb, 72xgb200, or a file with the numbers of your
    GPU, 64xmy-gpu.yaml (keys of `recipe/hardware.py`; `like: h100` for missing keys)."""
    tokens: Annotated[float | None, Range(1, 1e18)] = None
    """Training tokens, such as 1e12; unset: the tokens of max_duration."""
    price: Annotated[float | None, Range(above=0)] = None
    """Price of a GPU per hour, in any currency; unset: the typical one in US dollars of
    `recipe/hardware.py`, if the GPU has one there."""
    failures: Annotated[float | None, Range(above=0)] = None
    """Mean GPU-hours between failures that stop a run; unset: no failures. Llama 3's run on 16,384
    H100 had one per 50,000 GPU-hours (Dubey et al., 2024, table 5)."""
    layouts: Annotated[int, Range(0, 1000)] = 8
    """Number of layouts to show, fastest first; 0: only the recipe's layout, without a search."""
    gpu_check: Annotated[str | None, PATH] = None
    """A gpu-check.json of the same GPU (`make gpu-check`), whose measured speeds replace those of
    the data sheet; unset: gpu-check/gpu-check.json, if it is from the same GPU."""
    format: Annotated[str, choice(PLAN_FORMATS)] = "text"
    """text, or json: one object, for programs."""
    inference: bool = False
    """Estimate the memory of evaluation and generation, in place of training. `plan.py eval RECIPE`
    sets it, together with precision=bf16, the default of loaded weights on a GPU."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        try:
            hardware = Hardware.parse(self.hardware, "hardware")
        except UserError as error:
            yield from error.lines()
        else:
            if not hardware.is_timed and not self.inference:
                yield (
                    f"hardware: {self.hardware} names no GPU, whose speed a plan needs; write such"
                    f" as {hardware.gpus}xh100, or --dry-run={self.hardware} for memory alone"
                )
        yield from super().check()


@dataclass
class PlanFinetuneRecipe(FinetuneRecipe, PlanRecipe):
    """The plan of a fine-tuning run on other hardware: every key of its recipe, and these."""


@dataclass
class LaunchRecipe(TrainRecipe):
    """A training run for scripts/launch.py: every key of its recipe, and these."""

    nodes: Annotated[int | None, Range(1, 100_000)] = None
    """Short form of launch.nodes."""
    gpus_per_node: Annotated[int | None, Range(0, 1024)] = None
    """Short form of launch.gpus_per_node."""
    dry_run: bool = False
    """Print the object of the target without submitting it."""

    def settle(self) -> None:
        """Move the short keys into the launch section."""
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) is not None:
                setattr(self.launch, name, getattr(self, name))
                setattr(self, name, None)
        super().settle()

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem of the recipe."""
        yield from super().check()
        yield from self.launch.check_launch()
        if self.launch.target == "skypilot" and not self.dry_run:
            yield "launch.target: skypilot is only printed; add dry_run=true, for sky launch"
        is_new = self.supervise.act and self.launch.service_account is None
        if self.launch.target == "kubernetes" and is_new and self.launch.namespace is None:
            yield (
                "launch.namespace: is required with supervise.act, for an account that may cordon"
                " nodes; write it, or the launch.service_account that may"
            )
        if self.launch.in_containers(self.save_folder):
            yield (
                f"save_folder: {self.save_folder} goes with the container that writes it; write a"
                " URL, or a folder on a volume: launch.mounts=[runs:/runs] save_folder=/runs/NAME"
            )
        if self.save_overwrite:
            yield (
                "save_overwrite: true, but every restart would delete what the run has saved; write"
                " false"
            )


@dataclass
class LaunchFinetuneRecipe(FinetuneRecipe, LaunchRecipe):
    """A fine-tuning run for scripts/launch.py: every key of its recipe, and these."""


CHECK_LEVELS = ("full", "quick")


@dataclass
class CheckRecipe:
    """A check of this machine, or of all machines of a launcher, without a run's recipe."""

    FOLDER: ClassVar[str] = "check"

    level: Annotated[str, choice(CHECK_LEVELS)] = "full"
    """full, or quick: without matrix multiplications, memory bandwidth and pairs."""
    output: Annotated[str, PATH] = "check"
    """The folder of check.json and check.html."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The number of processes (nproc_per_node); the degrees have no effect here."""
    health_check: HealthCheckConfig = field(default_factory=HealthCheckConfig)
    """The checks and their limits."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that are imported before anything is checked."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        yield from self.parallel.check()
        yield from self.health_check.check()

    def fill(self) -> None:
        """Resolve defaults in place."""
        self.parallel.fill()


@dataclass
class CheckRunRecipe(TrainRecipe):
    """A check of machines for a training run: every key of its recipe, and these."""

    level: Annotated[str, choice(CHECK_LEVELS)] = "full"
    """full, or quick: without matrix multiplications, memory bandwidth and pairs."""
    output: Annotated[str, PATH] = "check"
    """The folder of check.json and check.html."""


@dataclass
class CheckFinetuneRecipe(FinetuneRecipe, CheckRunRecipe):
    """A check of machines for a fine-tuning run: every key of its recipe, and these."""


Checked = CheckRecipe | CheckRunRecipe


@dataclass
class FetchRecipe:
    """Fetching of the rows that the tasks of a gauntlet read."""

    gauntlet: Annotated[str | None, PATH] = None
    """A gauntlet file whose rows to fetch; unset: eval/gauntlets/v0.3.yaml."""
    tasks: Annotated[list[str], Unless("gauntlet")] = field(default_factory=list)
    """Labels of tasks in eval/tasks/, in place of a gauntlet."""
    from_foundry: Annotated[str | None, PATH] = None
    """A clone of https://github.com/mosaicml/llm-foundry, whose files are linked: keep it. The rows
    are exactly those of published results."""
    from_hub: bool = False
    """Take the rows from the Hugging Face hub. Some tasks differ there, and are reported."""
    output: Annotated[str | None, PATH] = None
    """Folder for the rows; unset: eval/local_data of the repository, or of the working folder if
    only the wheel is installed. The shipped gauntlets look there."""
    table: Annotated[str, PATH] = "eval/fetch.yaml"
    """Table of known files: rows, checksum, data set on the hub."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        if (self.from_foundry is None) != self.from_hub:
            yield (
                "from_foundry: write from_foundry=PATH, a clone of LLM Foundry, or from_hub=true"
                + (", not both" if self.from_hub else "")
            )

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.gauntlet is None and not self.tasks:
            self.gauntlet = "eval/gauntlets/v0.3.yaml"


@dataclass
class MigrateRecipe:
    """Conversion of an LLM Foundry file into a recipe."""

    FILE_KEY: ClassVar[str] = "theirs"

    theirs: Annotated[str | None, PATH] = None
    """LLM Foundry's YAML file: pretraining, fine-tuning, evaluation, tasks or categories, or an
    MCLI file."""
    output: Annotated[str | None, PATH] = None
    """The recipe to write, which must not exist; unset: the same name in the working folder, with
    the suffix -migrated if that exists. Tasks of the file are written next to it, as
    NAME-gauntlet.yaml."""
    overwrite: bool = False
    """Overwrite an existing file."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from check_fields("", self)
        if self.theirs is None:
            yield "theirs: is required; write the path of LLM Foundry's YAML"
        if self.output is not None and not self.output.endswith((".yaml", ".yml")):
            yield f"output: {self.output} is no recipe's name; write {self.output}.yaml"

    def fill(self) -> None:
        """Do nothing: every default is a constant."""

"""`FinetuneRecipe`: a training run that starts from pretrained weights.

`scripts/finetune.py` reads one. `is_finetuning` decides which of the two kinds a recipe is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

from llmfoundry.recipe.adapter import AdapterConfig, PretrainedConfig, ResolvedAdapterConfig
from llmfoundry.recipe.data import PRETRAINED, ResolvedTokenizerConfig, TokenizerConfig
from llmfoundry.recipe.load import load
from llmfoundry.recipe.loss import CROSS_ENTROPY
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.parallel import tensor_adapters
from llmfoundry.recipe.paths import find_recipe
from llmfoundry.recipe.preference import PreferenceConfig, ResolvedPreferenceConfig
from llmfoundry.recipe.schema import Only
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe, resolve_as
from llmfoundry.recipe.yaml_file import read_yaml


def _pretrained_tokenizer() -> TokenizerConfig:
    return TokenizerConfig(name=PRETRAINED)


@dataclass
class FinetuneRecipe(TrainRecipe):
    """Every key of a training run except the shape of the model, and the keys of fine-tuning."""

    FOLDER: ClassVar[str] = "finetune"
    NOT_GROUPS: ClassVar[tuple[str, ...]] = ("model",)

    model: PretrainedConfig = field(default_factory=PretrainedConfig)  # type: ignore[assignment]
    """The pretrained model."""
    tokenizer: TokenizerConfig = field(default_factory=_pretrained_tokenizer)
    """The tokenizer (group tokenizer/); default: the model's."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """An adapter that trains in place of the model's parameters."""
    freeze: Annotated[list[str], Only("adapter.name", "none")] = field(default_factory=list)
    """Names of modules that do not train: wte, "blocks.0-3", "*.attn"; each must match. An adapter
    freezes all other parameters anyway."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Learning from preferences between answers."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem of the recipe."""
        # the sections
        yield from super().check()
        yield from self.adapter.check()
        yield from self.preference.check()
        yield from self.preference.check_data(self.data)

        # conflicts between sections: losses, quantization, the reference of preferences
        degrees = self.parallel.written_degrees
        yield from tensor_adapters(self.adapter.name, self.model.quantize, degrees)
        if self.auto_probe == "on" and self.preference.name != "none":
            yield (
                f"auto_probe: on measures cross-entropy, and preference.name is"
                f" {self.preference.name}; write off"
            )
        if self.preference.name != "none" and self.loss.name != CROSS_ENTROPY:
            yield (
                f"loss.name: {self.loss.name}, but preference.name: {self.preference.name} has a"
                " loss, too; write preference.name: none, or loss.name: cross_entropy"
            )
        if self.preference.name != "none" and self.loss.z_loss_weight is not None:
            yield (
                f"loss.z_loss_weight: has no effect with preference.name: {self.preference.name},"
                " whose loss has no z-loss; leave it out, or write preference.name: none"
            )
        if self.model.quantize != "none" and self.adapter.name == "none":
            yield (
                f"model.quantize: {self.model.quantize} keeps matrices that cannot train; write"
                " adapter.name: lora, or quantize: none"
            )
        if self.preference.reference == "adapter" and self.adapter.name == "none":
            yield (
                "preference.reference: adapter needs one to switch off; write precompute, or"
                " adapter.name: lora"
            )
        if self.preference.reference == "adapter" and self.adapter.pretrained is not None:
            yield (
                "preference.reference: adapter would take the model without adapter.pretrained for"
                " what training begins with; write precompute"
            )
        yield from self._check_context()
        if self.load_path is not None:
            yield "load_path: has no effect here; write the checkpoint as model.pretrained"

    def _check_context(self) -> Iterator[str]:
        """Check for settings that need full sequences on each rank."""
        degree, loss = self.parallel.context_parallel_degree, self.preference.name
        if degree != 1 and loss != "none":
            yield (
                f"parallel.context_parallel_degree: {degree}, but preference.name: {loss} compares"
                " answers of whole rows; write 1, and data_parallel_shard_degree: -1"
            )

    def _check_model_across(self) -> Iterator[str]:
        """Yield nothing: the model is checked when its files are read."""
        return iter(())

    def resolve(self) -> ResolvedFinetuneRecipe:
        """Return a copy with every default resolved; the model's once its files are read."""
        return resolve_as(ResolvedFinetuneRecipe, self)

    def fill(self) -> None:
        """Write derived values in place; the model's once its files are read."""
        super().fill()
        self.adapter.fill()
        self.preference.fill()

    def _fill_model(self) -> None:
        """Do nothing: the shape of the model is unknown until its files are read."""


class ResolvedFinetuneRecipe(FinetuneRecipe, ResolvedTrainRecipe):
    """`FinetuneRecipe` with every default resolved.

    `model` is the pretrained model's shape once `builders.pretrained` has opened it.
    """

    user_recipe: FinetuneRecipe
    model: ResolvedModelConfig  # type: ignore[assignment]
    tokenizer: ResolvedTokenizerConfig
    adapter: ResolvedAdapterConfig
    preference: ResolvedPreferenceConfig
    new_pieces: Mapping[int, Sequence[int]] = MappingProxyType({})
    """Ids of the pieces of each new token, with model.new_rows: pieces, once its tokenizer is
    ready."""

    @property
    def base(self) -> PretrainedConfig:
        """The base model and its quantization: the `model` section as written by the user."""
        return self.user_recipe.model


def load_run(path: str | Path) -> TrainRecipe:
    """Return the recipe of a saved run, of training or fine-tuning, unchecked and unresolved.

    Raises:
        UserError: as `load`.
    """
    return load(FinetuneRecipe if is_finetuning(path) else TrainRecipe, path)


def is_finetuning(recipe: str | Path | None, overrides: Sequence[str] = ()) -> bool:
    """Return whether a recipe, with its overrides, sets model.pretrained.

    Raises:
        UserError: the file of the recipe cannot be read.
    """
    if any(word.lstrip("+").startswith("model.pretrained=") for word in overrides):
        return True
    model = None if recipe is None else read_yaml(find_recipe(recipe)).get("model")
    return isinstance(model, dict) and "pretrained" in model

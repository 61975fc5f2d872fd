"""Which files make up a recipe, and in which order: its `defaults` list, as Hydra reads it.

`compose.py` calls it. Nested lists, `override` entries, `_self_` and packages are Hydra's; only the
list of parts is asked of it, the files are read by `yamlfile.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmfoundry.errors import UserError
from llmfoundry.recipe.front.paths import show
from llmfoundry.recipe.front.yamlfile import line_of, read_yaml
from llmfoundry.recipe.values.checks import nearest

_ROOT = "__recipe__"
_SCHEME = "recipes"
_RECIPES = "finetune"  # a folder of recipes below yamls/; all others are groups
_NO_YAML = str(Path(__file__).resolve().parent)
"""A folder that Hydra finds nothing in. Without one it looks for its caller's, and reads the source
of every frame for that: half a second where many modules are loaded."""


@dataclass(frozen=True)
class YamlSource:
    """A YAML file that takes part; its keys lie below the dotted `package` ("" for a recipe).

    Its values in the sections `replaced` do not count: a group was chosen in their place.
    """

    path: Path
    package: str
    replaced: frozenset[str] = frozenset()

    def load(self) -> dict[str, Any]:
        """Its values, nested as the recipe is."""
        values = read_yaml(self.path)
        values.pop("defaults", None)
        for part in reversed(self.package.split(".") if self.package else []):
            values = {part: values}
        return {key: value for key, value in values.items() if key not in self.replaced}

    def line_of(self, key: str) -> int | None:
        """The line on which the recipe's dotted `key` stands in the file."""
        prefix = f"{self.package}." if self.package else ""
        counts = key.startswith(prefix) and key.partition(".")[0] not in self.replaced
        return line_of(self.path, key.removeprefix(prefix)) if counts else None


class _Part(NamedTuple):
    """A file of Hydra's list, by its name below the folders of groups."""

    name: str
    package: str
    parent: str
    """The file whose defaults list names it."""


def config_parts(
    recipe: Path | None,
    groups: dict[str, str],
    options: dict[str, list[str]],
    folders: list[Path],
) -> list[YamlSource]:
    """The files in order of merging.

    Args:
        recipe: the recipe's file, if there is one.
        groups: choices of the command line, `{"model": "mpt-125m"}`.
        options: every group's choices, for errors.
        folders: where groups and further recipes are, first found wins.

    Raises:
        UserError: the defaults list is not a list, or names what is not there.
    """
    for group, option in groups.items():
        if option not in options[group]:
            raise UserError(_missing(f"{group}/{option}", options))
    defaults = [] if recipe is None else _defaults(recipe)
    if not defaults and not groups:
        return [] if recipe is None else [YamlSource(recipe, "")]
    if "_self_" not in defaults:
        defaults.append("_self_")
    prefix = "" if recipe is None else f"{show(recipe)}: "
    try:
        found, chosen = _ask_hydra(defaults, groups, folders)
    except FileNotFoundError as error:
        raise UserError(prefix + _missing(str(error), options)) from error
    except RecursionError as error:
        raise UserError(f"{prefix}defaults: a list here includes its own file") from error
    except (ValueError, OmegaConfBaseException) as error:
        text = " ".join(str(error).replace(_ROOT, "it").split())
        raise UserError(f"{prefix}defaults: {text}") from error
    paths = {
        part.name: path
        for part in found
        for folder in reversed(folders)
        if (path := folder / f"{part.name}.yaml").is_file()
    }
    if recipe is not None:
        paths[_ROOT] = recipe
    replaced = _replaced(found, paths, groups, chosen)
    return [
        YamlSource(paths[part.name], part.package, replaced[part])
        for part in found
        if part.name in paths
    ]


def _replaced(
    found: list[_Part], paths: dict[str, Path], groups: dict[str, str], chosen: dict[str, str]
) -> dict[_Part, frozenset[str]]:
    """The sections of each part that a choice elsewhere takes the place of.

    A group that the command line chooses replaces the section in all files, one that a defaults
    list overrides in those below that list's file; in both cases but for the choice's own files.
    """
    parents = {part.name: part.parent for part in found}
    choosers: dict[str, list[str]] = {group: [""] for group in groups}  # "": the command line
    for name, path in paths.items():
        for entry in filter(_is_choice, _defaults(path)):
            keyword, _, group = next(iter(entry)).rpartition(" ")
            if keyword == "override":
                choosers.setdefault(group.strip("/"), []).append(name)
    replaced: dict[_Part, frozenset[str]] = {}
    for part in found:
        above = [part.name]
        while (parent := parents.get(above[-1])) is not None and parent not in above:
            above.append(parent)
        replaced[part] = frozenset(
            group
            for group, names in choosers.items()
            if not {"", *above[1:]}.isdisjoint(names)
            and f"{group}/{chosen.get(group)}" not in above
        )
    return replaced


def _defaults(recipe: Path) -> list[Any]:
    """A copy of a file's list, empty where it has none."""
    defaults = read_yaml(recipe).get("defaults") or []
    where = f"{show(recipe)}:{line_of(recipe, 'defaults')}"
    if not isinstance(defaults, list):
        raise UserError(f"{where}: defaults: is not a list; write [model: mpt-125m, data: c4]")
    for entry in defaults:
        if not (isinstance(entry, str) or _is_choice(entry)):
            raise UserError(f"{where}: defaults: {entry!r} is not a choice; write group: option")
    return list(defaults)


def _is_choice(entry: Any) -> bool:
    """Whether an entry is `group: option`, with a list of options or null in its place at most."""
    if not isinstance(entry, dict) or len(entry) != 1:
        return False
    (option,) = entry.values()
    options = option if isinstance(option, list) else [option]
    return all(isinstance(name, str) for name in options) or option is None


def _ask_hydra(
    defaults: list[Any], groups: dict[str, str], folders: list[Path]
) -> tuple[list[_Part], dict[str, str]]:
    """The parts in order, and the option of each group.

    Raises:
        FileNotFoundError: a part does not exist; its text is the part's name.
        ValueError: Hydra cannot make sense of the list.
    """
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException, MissingConfigException
    from hydra.types import RunMode

    Plugins.instance().register(_source())
    searchpath = [f"{_SCHEME}://{folder}" for folder in folders]
    root = {"defaults": defaults, "hydra": {"searchpath": searchpath}}
    ConfigStore.instance().store(name=_ROOT, node=root)
    try:
        with initialize_config_dir(_NO_YAML, version_base="1.3"):
            loader: Any = GlobalHydra.instance().config_loader()
            added = groups.keys() - {
                key for entry in defaults if _is_choice(entry) for key in entry
            }
            if added:  # a list below the recipe's may have them
                below = loader.compute_defaults_list(_ROOT, [], RunMode.RUN)
                added -= set(below.overrides.known_choices)
            choices = [f"{'+' if g in added else ''}{g}='{groups[g]}'" for g in groups]
            result = loader.compute_defaults_list(_ROOT, choices, RunMode.RUN)
    except MissingConfigException as error:
        raise FileNotFoundError(error.missing_cfg_file) from error
    except HydraException as error:
        raise ValueError(str(error)) from error
    named = [
        _Part(part.config_path, part.package or "", part.parent or "")
        for part in result.defaults
        if part.config_path and not part.config_path.startswith("hydra/")
    ]
    return named, dict(result.overrides.known_choices)


@functools.cache
def _source() -> type:
    """What gives Hydra the defaults lists of the files in a folder, read as all our YAML is."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra.plugins.config_source import ConfigResult

    class RecipeSource(FileConfigSource):
        """A folder of recipes and groups."""

        @staticmethod
        def scheme() -> str:
            return _SCHEME

        def load_config(self, config_path: str) -> ConfigResult:
            path = Path(self.path) / self._normalize_file_name(config_path)
            defaults = _defaults(path)
            header = self._get_header_dict(path.read_text(encoding="utf-8", errors="replace")[:512])
            if path.parent.name == _RECIPES:  # recipes too, whose groups lie beside their folder
                defaults = [_from_root(entry) for entry in defaults]
                header["package"] = "_global_"
            config = OmegaConf.create({"defaults": defaults} if defaults else {})
            return ConfigResult(self.provider, self.full_path(), config, header)

    return RecipeSource


def _from_root(entry: Any) -> Any:
    """`override data: chat` of a recipe in a folder as Hydra takes it there, `override /data`."""
    if not isinstance(entry, dict):
        return entry
    ((key, option),) = entry.items()
    keyword, space, group = key.rpartition(" ")
    return {f"{keyword}{space}/{group.lstrip('/')}": option}


def _missing(name: str, options: dict[str, list[str]]) -> str:
    """Why `group/option` is not there: which options there are, or which groups."""
    group, _, option = name.rpartition("/")
    if group in options:
        choices, hint = options[group], nearest(option, options[group])
        return f"could not find '{name}'; options: {', '.join(choices)}{hint}"
    if group:
        return f"could not find '{name}'; groups: {', '.join(options)}{nearest(group, options)}"
    return f"could not find the recipe '{name}' of the defaults list"

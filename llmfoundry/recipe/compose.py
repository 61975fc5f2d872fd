"""Composition of a recipe from the schema's defaults, groups, its file and the command line.

`load.py` calls `compose`. The `defaults` list, as Hydra reads it, defines which files take part and
in which order: nested lists, `override` entries, `_self_` and packages are Hydra's. Hydra only
returns the list of files; `yaml_file.py` reads them. Values stay untyped here. The source of every
value is recorded, so that an error can name file and line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import choice_hint, nearest
from llmfoundry.recipe.overrides import DEFAULT, split
from llmfoundry.recipe.paths import group_options, search_folders, show
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.typed import flat, to_dict
from llmfoundry.recipe.yaml_file import line_of, read_yaml
from llmfoundry.redaction import MASK, hide, masked_keys, public_values

_ROOT = "__recipe__"
_SCHEME = "recipes"
_RECIPES = "finetune"  # a folder of recipes below yamls/; the other folders are groups


@dataclass(frozen=True)
class YamlSource:
    """A YAML file that takes part; its keys are below the dotted `package` ("" for a recipe).

    Its values in the sections `replaced` are ignored, because a group was chosen in their place.
    """

    path: Path
    package: str
    replaced: frozenset[str] = frozenset()

    def load(self) -> dict[str, Any]:
        """Return its values, nested as the recipe is."""
        values = read_yaml(self.path)
        values.pop("defaults", None)
        for part in reversed(self.package.split(".") if self.package else []):
            values = {part: values}
        return {key: value for key, value in values.items() if key not in self.replaced}

    def line_of(self, key: str) -> int | None:
        """Return the line of the recipe's dotted `key` in the file."""
        prefix = f"{self.package}." if self.package else ""
        counts = key.startswith(prefix) and key.partition(".")[0] not in self.replaced
        return line_of(self.path, key.removeprefix(prefix)) if counts else None


class _Part(NamedTuple):
    """A file in Hydra's list, by its name below the folders of groups."""

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
    """Return the files in the order in which they are merged.

    Args:
        recipe: the recipe's file, if there is one.
        groups: choices of the command line, `{"model": "mpt-125m"}`.
        options: the choices of every group, for errors.
        folders: folders of groups and further recipes, in search order.

    Raises:
        UserError: the defaults list is not a list, or names a missing file.
    """
    # Without a defaults list and groups, the recipe's file is the only one.
    for group, option in groups.items():
        if option not in options[group]:
            raise UserError(_missing(f"{group}/{option}", options))
    defaults = [] if recipe is None else _defaults(recipe)
    if not defaults and not groups:
        return [] if recipe is None else [YamlSource(recipe, "")]
    if "_self_" not in defaults:
        defaults.append("_self_")
    # Hydra expands the list; its errors become lines of ours.
    prefix = "" if recipe is None else f"{show(recipe)}: "
    try:
        parts, chosen = _ask_hydra(defaults, groups, folders)
    except FileNotFoundError as error:
        raise UserError(prefix + _missing(str(error), options)) from error
    except RecursionError as error:
        raise UserError(f"{prefix}defaults: a list here includes its own file") from error
    except (ValueError, OmegaConfBaseException) as error:
        text = " ".join(str(error).replace(_ROOT, "it").split())
        raise UserError(f"{prefix}defaults: {text}") from error
    # The file of each name, in the first folder that has it.
    paths: dict[str, Path] = {}
    for part in parts:
        candidates = [folder / f"{part.name}.yaml" for folder in folders]
        files = [path for path in candidates if path.is_file()]
        if files:
            paths[part.name] = files[0]
    if recipe is not None:
        paths[_ROOT] = recipe
    replaced = _replaced(parts, paths, groups, chosen)
    return [
        YamlSource(paths[part.name], part.package, replaced[part])
        for part in parts
        if part.name in paths
    ]


def _replaced(
    found: list[_Part], paths: dict[str, Path], groups: dict[str, str], chosen: dict[str, str]
) -> dict[_Part, frozenset[str]]:
    """Return the sections of each file that a choice in another file replaces.

    A group of the command line replaces the section in all files. A group that a defaults list
    overrides replaces it in the files below that list's file. The files of the choice itself are
    exempt.
    """
    # Who chooses each group: the command line, or the files whose lists override it.
    parents = {part.name: part.parent for part in found}
    choosers: dict[str, list[str]] = {group: [""] for group in groups}  # "": the command line
    for name, path in paths.items():
        for entry in filter(_is_choice, _defaults(path)):
            keyword, _, group = next(iter(entry)).rpartition(" ")
            if keyword == "override":
                choosers.setdefault(group.strip("/"), []).append(name)
    # A chooser above a file replaces the section, unless the file belongs to the choice.
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
    """Return a copy of the defaults list of a file; empty if it has none."""
    defaults = read_yaml(recipe).get("defaults") or []
    where = f"{show(recipe)}:{line_of(recipe, 'defaults')}"
    if not isinstance(defaults, list):
        raise UserError(f"{where}: defaults: is not a list; write [model: mpt-125m, data: c4]")
    for entry in defaults:
        if not (isinstance(entry, str) or _is_choice(entry)):
            raise UserError(f"{where}: defaults: {entry!r} is not a choice; write group: option")
    return list(defaults)


def _is_choice(entry: Any) -> bool:
    """Return whether an entry is `group: option`, with a text, a list of texts or null."""
    if not isinstance(entry, dict) or len(entry) != 1:
        return False
    (option,) = entry.values()
    options = option if isinstance(option, list) else [option]
    return all(isinstance(name, str) for name in options) or option is None


def _ask_hydra(
    defaults: list[Any], groups: dict[str, str], folders: list[Path]
) -> tuple[list[_Part], dict[str, str]]:
    """Return the files in order, and the option of each group.

    Raises:
        FileNotFoundError: a file does not exist; the text is its name.
        ValueError: Hydra rejects the list.
    """
    from hydra import version
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException, MissingConfigException

    version.setbase("1.3")
    Plugins.instance().register(_source())
    ConfigStore.instance().store(name=_ROOT, node={"defaults": defaults})
    uses_hydra = any("hydra" in str(entry) for entry in defaults)
    try:
        try:
            result = _defaults_list(defaults, groups, folders, with_hydra=uses_hydra)
        except HydraException:  # a nested list may have `override hydra/job_logging: disabled`
            result = _defaults_list(defaults, groups, folders, with_hydra=True)
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


def _defaults_list(
    defaults: list[Any], groups: dict[str, str], folders: list[Path], *, with_hydra: bool
) -> Any:
    """Return Hydra's expanded defaults list of `_ROOT`.

    Hydra's own groups, such as its launchers, are 40 files that no recipe uses. Without them the
    list takes a fifth of the time.
    """
    from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.override_parser.overrides_parser import OverridesParser

    search_path = ConfigSearchPathImpl()
    if with_hydra:
        search_path.append("hydra", "pkg://hydra.conf")
    for folder in folders:
        search_path.append(_SCHEME, f"{_SCHEME}://{folder}")
    search_path.append("schema", "structured://")  # the source of _ROOT

    class Repository(ConfigRepository):
        """Is not copied for a cache: the copy of Hydra's store takes a third of the time."""

        def __deepcopy__(self, memo: Any) -> ConfigRepository:
            return self

    def expand(choices: list[str]) -> Any:
        return create_defaults_list(
            CachingConfigRepository(Repository(search_path)),
            config_name=_ROOT,
            overrides_list=OverridesParser.create().parse_overrides(choices),
            prepend_hydra=with_hydra,
            skip_missing=False,
        )

    added = groups.keys() - {key for entry in defaults if _is_choice(entry) for key in entry}
    if added:  # a nested defaults list may contain them
        added -= set(expand([]).overrides.known_choices)
    return expand([f"{'+' if g in added else ''}{g}='{groups[g]}'" for g in groups])


@functools.cache
def _source() -> type:
    """Return the class that gives Hydra the defaults lists of the files in a folder."""
    from hydra.core.object_type import ObjectType
    from hydra.plugins.config_source import ConfigResult, ConfigSource

    Names = list[str]  # the class has a method `list`

    class RecipeSource(ConfigSource):
        """A folder of recipes and groups."""

        @staticmethod
        def scheme() -> str:
            return _SCHEME

        def load_config(self, config_path: str) -> ConfigResult:
            path = Path(self.path) / self._normalize_file_name(config_path)
            defaults = _defaults(path)
            header = self._get_header_dict(path.read_text(encoding="utf-8", errors="replace")[:512])
            if path.parent.name == _RECIPES:  # recipes, whose groups are next to their folder
                defaults = [_from_root(entry) for entry in defaults]
                header["package"] = "_global_"
            config = OmegaConf.create({"defaults": defaults} if defaults else {})
            return ConfigResult(self.provider, self.full_path(), config, header)

        def available(self) -> bool:
            return self.is_group("")

        def is_group(self, config_path: str) -> bool:
            return (Path(self.path) / config_path).is_dir()

        def is_config(self, config_path: str) -> bool:
            return (Path(self.path) / self._normalize_file_name(config_path)).is_file()

        def list(self, config_path: str, results_filter: ObjectType | None) -> Names:
            results: Names = []
            for file in (Path(self.path) / config_path).iterdir():
                place = f"{config_path}/{file.name}".lstrip("/")
                self._list_add_result(results, place, file.name, results_filter)
            return sorted({*results})

    return RecipeSource


def _from_root(entry: Any) -> Any:
    """Return a recipe's `override data: chat` as Hydra reads it in a subfolder, with `/data`."""
    if not isinstance(entry, dict):
        return entry
    ((key, option),) = entry.items()
    keyword, space, group = key.rpartition(" ")
    return {f"{keyword}{space}/{group.lstrip('/')}": option}


def _missing(name: str, options: dict[str, list[str]]) -> str:
    """Return why `group/option` does not exist, with the options or the groups."""
    group, _, option = name.rpartition("/")
    if group in options:
        choices, hint = options[group], choice_hint(option, options[group])
        return f"could not find '{name}'; options: {', '.join(choices)}{hint}"
    if group:
        return f"could not find '{name}'; groups: {', '.join(options)}{nearest(group, options)}"
    return f"could not find the recipe '{name}' of the defaults list"


_MOST_TEXT = 1 << 20  # characters; the limit of a recipe file
_MOST_LOST = 6  # values that a note lists
_KEY = re.compile(r"[A-Za-z_][\w.\[\]-]*")
_PLAIN_KEY = re.compile(r"\w+(?:\.\w+)*")  # without indices of lists
_NESTED = re.compile(r"\$\{[^}]*\$\{")
_EXCLUDED = re.compile(r" and (\w+) exclude each other; remove one$")
_NAMED = re.compile(r"\$\{(\.*[A-Za-z_][\w.\[\]]*)\}")


@dataclass(frozen=True)
class ValueSources:
    """The sources of the values of a recipe."""

    sources: list[YamlSource]
    overridden: list[str]
    """Keys of the command line."""
    notes: list[str] = field(default_factory=list)
    """A line for each group of the command line: what of the recipe's section it replaces."""

    def where(self, key: str) -> str:
        """Return the prefix `file:line: ` of the source of `key`; "" for the command line."""
        key = key.split("[")[0]
        for overridden_key in self.overridden:
            if f"{key}.".startswith(f"{overridden_key}.") or overridden_key.startswith(f"{key}."):
                return ""
        for source in reversed(self.sources):
            line = source.line_of(key)
            if line is not None:
                return f"{show(source.path)}:{line}: "
        return ""

    def placed(self, line: str) -> str:
        """Add to a message that begins with a key its file, and how to remove the key.

        The user may not want to edit that file, so the message also names `~key` for the command
        line.
        """
        key, _, why = line.partition(":")
        where = self.where(key) if _KEY.fullmatch(key) else ""
        if where:
            return where + line.replace("remove it", f"remove it, or add '~{key}'", 1)
        other = _EXCLUDED.match(why)
        sibling = f"{key.rpartition('.')[0]}.{other[1]}".lstrip(".") if other else ""
        return f"{line}, or add '~{sibling}'" if sibling and self.where(sibling) else line


@dataclass
class Composed:
    """The untyped recipe with interpolations, and the sources of its values."""

    config: DictConfig
    places: ValueSources
    plain: dict[str, Any] = field(default_factory=dict)
    """All values in order. Those that no interpolation concerns are not in `config`."""

    def where(self, key: str) -> str:
        """Return the prefix as `ValueSources.where` does."""
        return self.places.where(key)

    def raw(self) -> dict[str, Any]:
        """Return plain values as written."""
        values = OmegaConf.to_container(self.config)
        assert isinstance(values, dict)
        return self._with_plain({str(key): value for key, value in values.items()})

    def _with_plain(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of `config` and a copy of the other ones, in order."""
        copies = {key: _copy(value) for key, value in self.plain.items() if key not in self.config}
        ordered = {key: None for key in self.plain if key in values or key in copies}
        return ordered | copies | values

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return plain values with resolved interpolations, and a line for each missing value.

        A value is missing if its interpolation cannot be resolved, or if its secret was not saved.
        Its key is left out of the values.

        Raises:
            UserError: an interpolation refers to itself.
        """
        pending: dict[str, str] = {}
        self._check_growth()
        try:
            values = self._with_plain(self._resolve(self.config, "", pending))
        except RecursionError:
            raise UserError("an interpolation ${...} here leads back to itself") from None
        for key in masked_keys(values):
            pending[key] = (
                f"{self.where(key)}{key}: has {MASK} where a secret was not saved; write"
                " ${oc.env:NAME} there, and set the variable NAME"
            )
        return (_without(values, pending) if pending else values), pending

    def _check_growth(self) -> None:
        """Check before resolving that interpolations do not expand without limit.

        Raises:
            UserError: the result would be too long.
        """
        sizes: dict[tuple[str, ...], int] = {}
        raw = self.raw()

        def size(place: tuple[str, ...], value: Any) -> int:
            if place not in sizes:
                sizes[place] = 1  # also for a cycle, which is reported later
                named = _NAMED.findall(value) if isinstance(value, str) else []
                parts = [(*place, name) for name in _names(value)]
                parts += [_named_place(name, place) for name in named]
                found = [(part, _at(raw, part)) for part in parts]
                sizes[place] = len(str(value)) if not _names(value) else 1
                sizes[place] += sum(size(part, at) for part, at in found if at is not None)
            return sizes[place]

        for key, value in raw.items():
            if size((key,), value) > _MOST_TEXT:
                raise UserError(
                    f"{self.where(key)}{key}: its interpolations make more than {_MOST_TEXT:,}"
                    " characters; write the text out"
                )

    def _resolve(self, node: Any, key: str, pending: dict[str, str]) -> Any:
        if not isinstance(node, DictConfig | ListConfig):
            return node
        is_list = isinstance(node, ListConfig)
        plain: dict[Any, Any] = {}
        names: list[Any] = [*range(len(node))] if is_list else [*node]
        for name in names:
            dotted = f"{key}[{name}]" if is_list else f"{key}.{name}".lstrip(".")
            try:
                value = "???" if OmegaConf.is_missing(node, name) else node[name]
                plain[name] = self._resolve(value, dotted, pending)
            except OmegaConfBaseException as error:
                pending[dotted] = _explain(error, dotted, self.where(dotted))
        return list(plain.values()) if is_list else {str(name): v for name, v in plain.items()}


def _names(value: Any) -> list[str]:
    """Return the names in a section or the indices of a list."""
    if isinstance(value, dict):
        return [str(name) for name in value]
    return [str(i) for i in range(len(value))] if isinstance(value, list) else []


def _named_place(name: str, place: tuple[str, ...]) -> tuple[str, ...]:
    """Return the target of `${name}` at `place`; a leading dot is the section that contains it."""
    plain = name.lstrip(".")
    up = len(name) - len(plain)
    parts = tuple(part for part in re.split(r"[.\[\]]+", plain) if part)
    return (*place[:-up], *parts) if up else parts


def value_at(raw: Any, key: str) -> Any:
    """Return the value at a dotted key of plain values; None if there is none."""
    return _at(raw, tuple(key.split(".")))


def _at(raw: Any, place: tuple[str, ...]) -> Any:
    """Return the value at a path; None if there is none."""
    for name in place:
        if isinstance(raw, list):
            raw = raw[int(name)] if name.isdecimal() and int(name) < len(raw) else None
        else:
            raw = raw.get(name) if isinstance(raw, dict) else None
    return raw


def compose(schema: Schema, recipe: Path | None, overrides: Sequence[str] = ()) -> Composed:
    """Merge the schema's defaults, the files that take part, and `overrides`, in this order.

    A group of the command line replaces the whole section of the files. So does a key of the
    command line that names a source of another kind than the recipe's (`data.paths=`).

    Raises:
        UserError: a file or an override cannot be read, or a group has no such option.
    """
    # Groups and values of the command line.
    folders = search_folders(recipe)
    options = group_options(folders, schema)
    groups, values = split(overrides, schema, options)
    # Defaults and files, merged again with the groups that keys of the command line imply.
    defaults = to_dict(schema.cls())
    sources = config_parts(recipe, groups, options, folders)
    merged = _merged(defaults, sources)
    implied = _implied(schema, merged, groups, values)
    if implied:
        sources = config_parts(recipe, groups | implied, options, folders)
        merged = _merged(defaults, sources)
    # Values of the command line. OmegaConf gets as little as possible, because it is slow.
    plain: dict[str, Any] = {}
    try:
        if _set_plain(merged, values):
            plain, sections = merged, _plain_sections(merged)
            config = OmegaConf.create({k: v for k, v in merged.items() if k not in sections})
        else:
            config = OmegaConf.create(_merged(defaults, sources))
            for key, value in values.items():
                _set(config, key, value, defaults, schema)
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, str(error.full_key), "")) from error
    except RecursionError:
        raise UserError("a value is nested too deep; flatten it") from None
    composed = Composed(config, ValueSources(sources, list(values)), plain)
    composed.places.notes.extend(_replacements(groups | implied, sources, composed))
    return composed


def config_of(values: dict[str, Any]) -> DictConfig:
    """Return plain values, whose interpolations are not resolved, as a configuration."""
    try:
        return OmegaConf.create(values)
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, str(error.full_key), "")) from error


def _replacements(
    groups: dict[str, str], sources: Sequence[YamlSource], composed: Composed
) -> Iterator[str]:
    """Yield a line for each section of the recipe that a group replaces, with the lost values."""
    if not groups:
        return
    final = composed.raw()
    for group, option in groups.items():
        for source in sources:
            if source.package or group not in source.replaced:
                continue
            section = read_yaml(source.path).get(group)
            hide({group: section})
            values = flat(public_values(section), group) if isinstance(section, dict) else ()
            lost = [f"{k}: {v}" for k, v in values if v is not None and value_at(final, k) != v]
            if lost:
                more = f" and {len(lost) - _MOST_LOST} more" if len(lost) > _MOST_LOST else ""
                place = f"{show(source.path)}:{line_of(source.path, group)}"
                shown = ", ".join(lost[:_MOST_LOST])
                yield f"{group}={option} replaces what {place} says: {shown}{more}"


def _merged(defaults: dict[str, Any], sources: Sequence[YamlSource]) -> dict[str, Any]:
    """Return the plain values of the schema's defaults and the files, merged in this order."""
    merged = _copy(defaults)
    for source in sources:
        _merge(merged, source.load())
    return merged


def _implied(
    schema: Schema, merged: dict[str, Any], groups: dict[str, str], values: dict[str, Any]
) -> dict[str, str]:
    """Return the groups that keys of the command line select, {"data": "files"} for `data.paths=`.

    A section's IMPLIES defines them. Nothing is selected if the command line also sets the group or
    the name, or if the recipe has the name already.
    """
    implied_groups: dict[str, str] = {}
    for section, key in schema.keys.items():
        if key.section is None or not {section, f"{section}.name"}.isdisjoint([*groups, *values]):
            continue
        implies = getattr(key.section.cls, "IMPLIES", {})
        set_keys = [(k, v) for k, v in implies.items() if _is_given(values.get(f"{section}.{k}"))]
        if set_keys and value_at(merged, f"{section}.name") != set_keys[0][1][0]:
            implied_groups[section] = set_keys[0][1][1]
    return implied_groups


def _is_given(value: Any) -> bool:
    return bool(value) and value is not DEFAULT


def _set_plain(config: dict[str, Any], values: dict[str, Any]) -> bool:
    """Write the command line's values into `config` if that needs no OmegaConf.

    Interpolations, resets, mappings, and keys that lead anywhere but into a section need it.

    Returns:
        False if OmegaConf is needed; `config` may have some of the values then.
    """
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
            return False
        if "$" in str(value) or not _PLAIN_KEY.fullmatch(key):
            return False
        above, _, name = key.rpartition(".")
        section = value_at(config, above) if above else config
        if not isinstance(section, dict) or isinstance(section.get(name), dict):
            return False
        section[name] = value
    return True


def _plain_sections(merged: dict[str, Any]) -> set[str]:
    """Return the sections without interpolations that no interpolation names."""
    texts = [value for _, value in flat(merged) if "$" in str(value)]
    if any(_NESTED.search(str(text)) for text in texts):
        return set()  # an interpolation within another one may name anything
    named = {name for text in texts for name in re.findall(r"\w+", str(text))}
    return {
        key
        for key, value in merged.items()
        if isinstance(value, dict) and key not in named and "$" not in str(value)
    }


def _set(
    config: DictConfig, key: str, value: Any, defaults: dict[str, Any], schema: Schema
) -> None:
    """Write an override's value, or the schema's default, into `config`."""
    try:
        if value is DEFAULT:
            _reset(config, key, defaults, schema)
        else:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # OmegaConf's for keys that lead into a list or a number
        raise UserError(f"{key}: is not a key; write a list or a section whole") from error


def _reset(config: DictConfig, key: str, defaults: dict[str, Any], schema: Schema) -> None:
    """Restore the default of a key; remove a key without default, such as a stream.

    Raises:
        UserError: there is no such item.
    """
    above, _, name = key.rpartition(".")
    section = value_at(defaults, above) if above else defaults
    is_item = not isinstance(section, dict) or name not in section
    if is_item and (schema.find(key) is not None or _is_in_mapping(key, schema)):
        holder = OmegaConf.select(config, above)
        if not isinstance(holder, DictConfig) or name not in holder:
            raise UserError(f"~{key}: the recipe has no such item to remove; remove the word")
        holder.pop(name)
        return
    value = None if is_item else section[name]
    OmegaConf.update(config, key, value, merge=False, force_add=True)


def _is_in_mapping(key: str, schema: Schema) -> bool:
    """Return whether a key lies in a mapping of any content, such as `model.config_overrides`."""
    parts = key.split(".")
    sections = (schema.find(".".join(parts[:n])) for n in range(1, len(parts)))
    return any(found is not None and dict[str, Any] in found.types for found in sections)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Write `values` into `into`: sections are merged, other values are replaced."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _copy(value: Any) -> Any:
    """Return a copy of plain values, faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _without(value: Any, keys: Mapping[str, str], key: str = "") -> Any:
    """Return plain values without those at the dotted `keys`."""
    if isinstance(value, dict):
        parts = {name: f"{key}.{name}".lstrip(".") for name in value}
        return {
            str(name): _without(value[name], keys, part)
            for name, part in parts.items()
            if part not in keys
        }
    if isinstance(value, list):
        indices = [i for i in range(len(value)) if f"{key}[{i}]" not in keys]
        return [_without(value[i], keys, f"{key}[{i}]") for i in indices]
    return value


def _explain(error: OmegaConfBaseException, key: str, where: str) -> str:
    why = str(error.msg or error).splitlines()[0]
    if why.startswith("Cannot merge"):
        return f"{where}{key}: a section cannot replace a list, nor a list a section"
    return f"{where}{key}: {why}; write \\${{ for a literal ${{"

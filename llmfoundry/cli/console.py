"""The console command: `llmfoundry train quickstart` runs `scripts/train.py quickstart`.

Entry point: `main`. Every script of scripts/ is a command with the script's name. Three more
commands are implemented here: `ls` and `cp` for the shipped recipes, and `completion` for shells.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmfoundry.cli.script import versions
from llmfoundry.command_text import mark_console
from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import ROOT, YAMLS, nearest_path
from llmfoundry.terminal import outlast_readers

_SCRIPTS = ROOT / "scripts"
_FIRST = ("train", "finetune", "eval", "generate", "chat", "serve")


def main() -> None:
    """Run the command that the first argument names.

    Raises:
        SystemExit: status 2 after a UserError, which is printed to stderr; or that of the script.
    """
    mark_console()
    outlast_readers()
    name, *arguments = sys.argv[1:] or ["--help"]
    try:
        if name == "--complete":
            print_completions(arguments)
        elif name in _FLAGS:
            print(_FLAGS[name]())
        elif name in _COMMANDS:
            _COMMANDS[name](arguments)
        elif (script := _SCRIPTS / f"{name}.py").is_file():
            _run(script, arguments)
        else:
            names = [*_scripts(), *_COMMANDS]
            raise UserError(
                f"unknown command '{name}'{nearest(name, names)} (commands: {', '.join(names)})"
            )
    except UserError as error:
        print(*error.lines(), sep="\n", file=sys.stderr)
        sys.exit(2)


def _run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does; its child processes start the same file."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def list_recipes(arguments: Sequence[str]) -> None:
    """Print the shipped recipes with their first sentence, or the choices of a group.

    Raises:
        UserError: there is no such group.
    """
    # the choices of a group
    groups = {path.name: path for path in sorted(YAMLS.iterdir()) if path.is_dir()}
    if len(arguments) > 1 or (arguments and arguments[0] not in groups):
        hint = nearest(arguments[0], groups)
        raise UserError(f"ls: '{' '.join(arguments)}' is not a group{hint}; {', '.join(groups)}")
    if arguments:
        files = sorted(groups[arguments[0]].glob("*.yaml"))
        print("\n".join(_rows({path.stem: _first_sentence(path) for path in files})))
        return

    # all recipes
    for title, pattern in (("train", "*.yaml"), ("finetune", "finetune/*.yaml")):
        files = sorted(YAMLS.glob(pattern))
        rows = _rows({path.stem: _first_sentence(path) for path in files})
        print("\n".join([f"llmfoundry {title} RECIPE", *rows, ""]))
    choices = ", ".join(name for name in groups if name not in ("finetune", "scaling"))
    print(f"llmfoundry ls GROUP lists the choices of one: {choices}")
    print("llmfoundry cp NAME FILE copies a recipe, GROUP/CHOICE or a gauntlet for you to edit")


def copy_recipe(arguments: Sequence[str]) -> None:
    """Copy a shipped recipe, choice of a group or gauntlet to a file of the user.

    Raises:
        UserError: there is no such file, or the target exists.
    """
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        raise UserError(
            "cp: write llmfoundry cp NAME [FILE], as in llmfoundry cp quickstart my.yaml"
        )

    # the target: a file in an existing folder, with a suffix of YAML
    source = _shipped_file(arguments[0])
    target = Path(arguments[1] if len(arguments) == 2 else source.name).expanduser()
    if target.is_dir() or arguments[-1].endswith("/"):
        target /= source.name
    if target.suffix not in (".yaml", ".yml"):
        target = target.with_name(f"{target.name}.yaml")

    # copy, without replacing a file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(source.read_bytes())
    except FileExistsError:
        raise UserError(f"cp: {target} is there already; write another name") from None
    except OSError as error:
        raise UserError(f"cp: {target}: {error.strerror}; write another path") from error
    print(f"{target} is a copy of {source.relative_to(ROOT)}{_next(source, target)}")


def print_completion(arguments: Sequence[str]) -> None:
    """Print the shell code that enables completion.

    Raises:
        UserError: the shell is not supported.
    """
    if len(arguments) != 1 or arguments[0] not in _SHELLS:
        raise UserError(f"completion: write one of {', '.join(_SHELLS)}")
    print(_SHELLS[arguments[0]].strip())


def print_completions(words: Sequence[str]) -> None:
    """Print the completions of the last word; a script completes its own arguments."""
    command, *others = words or [""]
    candidates: list[str] = []
    if not others:
        candidates = [*_scripts(), *_COMMANDS, "--help", "--version"]
    elif command in ("cp", "ls", "completion"):
        names = {"completion": [*_SHELLS], "ls": _names("*/"), "cp": _names("**/*.yaml")}[command]
        candidates = names if len(others) == 1 else []
    elif (script := _SCRIPTS / f"{command}.py").is_file():
        return _run(script, ["--complete", *others])
    current = words[-1] if words else ""
    print("\n".join(name for name in candidates if name.startswith(current)))


def _help() -> str:
    """Return the help text: one line per command."""
    scripts = {name: _docstring(_SCRIPTS / f"{name}.py").splitlines()[0] for name in _scripts()}
    commands = {
        "ls": "List the recipes that came along, or the choices of a group.",
        "cp": "Copy a recipe, to edit: llmfoundry cp quickstart my.yaml",
        "completion": 'Tab completion: eval "$(llmfoundry completion bash)"; zsh, fish',
    }
    return "\n".join(
        [
            "A recipe goes in; a trained, evaluated, exported language model comes out.",
            "",
            "    llmfoundry train quickstart              minutes on a laptop's CPU",
            "    llmfoundry eval runs/quickstart",
            "    llmfoundry cp quickstart my.yaml         a copy to edit; llmfoundry train my.yaml",
            "",
            "Commands (llmfoundry COMMAND --help explains one)",
            *_rows(scripts | commands),
        ]
    )


def _scripts() -> list[str]:
    """Return the names of the scripts; those that a newcomer needs come first."""
    names = {path.stem for path in _SCRIPTS.glob("*.py")}
    first = [name for name in _FIRST if name in names]
    return [*first, *sorted(names.difference(first))]


def _docstring(script: Path) -> str:
    """Return the docstring of a script, without running it."""
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""


def _first_sentence(recipe: Path) -> str:
    """Return the first sentence of the comment at the head of a file."""
    words: list[str] = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
    for number, word in enumerate(words, 1):
        if word.endswith((".", ":", ";")) and len(word) > 2:
            return " ".join(words[:number]).rstrip(".:;")
    return " ".join(words)


def _rows(texts: dict[str, str]) -> list[str]:
    """Return lines with two columns, truncated to 100 characters."""
    width = max(map(len, texts))
    lines = []
    for name, text in texts.items():
        line = f"  {name:<{width}}  {text}"
        if len(line) > 100:
            line = f"{line[:97].rsplit(' ', 1)[0]} …"  # truncate at a space
        lines.append(line)
    return lines


def _shipped_file(name: str) -> Path:
    """Find the file of a name: a recipe, `model/quickstart` or `eval/gauntlets/light.yaml`.

    Raises:
        UserError: there is no such file.
    """
    stem = Path(name).with_suffix("") if name.endswith((".yaml", ".yml")) else Path(name)
    for path in (YAMLS / stem, YAMLS / "finetune" / stem, ROOT / stem):
        file = path.with_name(f"{path.name}.yaml")
        if file.is_file() and file.resolve().is_relative_to(ROOT):
            return file
    known = [*YAMLS.rglob("*.yaml"), *(ROOT / "eval").rglob("*.yaml")]
    raise UserError(
        f"cp: no recipe {name}{nearest_path(Path(name), known)}; llmfoundry ls lists all"
    )


def _names(pattern: str) -> list[str]:
    """Return files or folders below yamls/ in the form that `ls` and `cp` accept."""
    paths = sorted(YAMLS.glob(pattern))
    return [path.relative_to(YAMLS).with_suffix("").as_posix() for path in paths if path != YAMLS]


def _next(source: Path, target: Path) -> str:
    """Return a hint about the use of a copied file."""
    if source.parent == YAMLS:
        return f"; next: llmfoundry train {target}"
    if source.parent == YAMLS / "finetune":
        return f"; next: llmfoundry finetune {target}"
    if source.parent.parent == YAMLS:
        group = source.parent.name
        folder = f"in a folder {group}/ beside a recipe"
        return f"; {folder} it is the choice {group}={target.stem}"
    return ""


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "ls": list_recipes,
    "cp": copy_recipe,
    "completion": print_completion,
}

_FLAGS: dict[str, Callable[[], str]] = {
    "--help": _help,
    "-h": _help,
    "help": _help,
    "--version": versions,
    "-V": versions,
}

# Each shell calls `llmfoundry --complete WORD…`. No space follows a completion that ends with `=`,
# `.` or `/`. Bash splits words at `=` and `:`, and replaces only the part after them.
_SHELLS = {
    "bash": r"""
_llmfoundry() {
    local line="${COMP_LINE:0:COMP_POINT}" words found whole
    read -ra words <<<"$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    mapfile -t found < <(llmfoundry --complete "${words[@]:1}" 2>/dev/null)
    whole="${words[-1]}"
    whole="${whole%"${whole##*[=:]}"}"
    COMPREPLY=("${found[@]#"$whole"}")
    [[ ${#found[@]} == 1 && "${found[0]}" == *[=./] ]] && compopt -o nospace
    return 0
}
complete -F _llmfoundry llmfoundry
""",
    "zsh": r"""
autoload -Uz compinit && (( $+functions[compdef] )) || compinit
_llmfoundry() {
    local -a found going done
    found=("${(@f)$(llmfoundry --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    going=(${(M)found:#*[=./]})
    done=(${found:#*[=./]})
    (( $#going )) && compadd -S '' -- $going
    (( $#done )) && compadd -- $done
}
compdef _llmfoundry llmfoundry
""",
    "fish": r"""
function __llmfoundry
    set -l words (commandline -opc)
    llmfoundry --complete $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c llmfoundry -f -a '(__llmfoundry)'
""",
}

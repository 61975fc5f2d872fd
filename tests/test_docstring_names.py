"""Names in docstrings and comments exist: a renamed file, or a `name` in backquotes, fails.

A qualified name is looked up in its owner: `Class.member` in the class and its bases, `module.Name`
in the module. A constant in "one of …" is looked up in the file that says it.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("llmfoundry", "tests", "scripts", "benchmarks", "yamls", "eval")
NAMED = re.compile(r"`([A-Za-z_][\w./]*)(?:\(\))?`|(?<![`\w/.])([\w/]+\.py)\b")
CHOICES = re.compile(r"\b[Oo]ne of ([A-Z][A-Z_]{3,})\b(?!')")

# Names of other projects, patterns, and examples of values.
FOREIGN = {
    "FOLDER/PART/shard.00000.tokens",
    "Reducer._get_zeros_like_grad_buckets",
    "Reducer._push_all_rebuilt_params",
    "Reducer._reset_state",
    "SummaryWriter",
    "WARC/1.0",
    "bytes_to_unicode",
    "distributed_c10d._set_pg_timeout",
    "enable_plan_caching",
    "events.KIND",
    "file.py",
    "setup.py",
    "evaluation/triviaqa_evaluation.py",
    "group/option",
    "flash_attn/cute/interface.py",
    "hopper/flash_attn_interface.py",
    "kind/rank",
    "get_target_block_list",
    "llmfoundry/eval/datasets/in_context_learning_evaluation.py",
    "lm_eval.api.model.LM",
    "model/quickstart",
    "models/utils/act_ckpt.py",
    "rack1n03",
    "run_mha_bwd_hdim256",
    "scripts/inference/convert_composer_to_hf.py",
    "spine1.leaf3.node7",
    "stub/",
    "tokens/",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._functorch.config.activation_memory_budget",
    "torch.multiprocessing.reductions.StorageWeakRef",
    "torch.nn.attention._fa3._FA3_CUDA_BWD",
    "torch.nn.attention._fa4._aten_to_fa4_window_size",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "w1_lora_A",
    "w1_lora_B",
}


@cache
def sources() -> dict[Path, ast.Module]:
    files = (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
    gc.disable()  # it would look at a million nodes again and again, now and later
    found = {p.relative_to(ROOT): ast.parse(p.read_text()) for p in files}
    gc.freeze()
    gc.enable()
    return found


@cache
def identifiers() -> frozenset[str]:
    found: set[str] = set()
    for tree in sources().values():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(node.name)
                case ast.Name():
                    found.add(node.id)
                case ast.arg() | ast.keyword() if node.arg:
                    found.add(node.arg)
                case ast.Attribute():
                    found.add(node.attr)
                case ast.alias():
                    found |= {node.name.split(".")[-1], node.asname or ""}
                case ast.Constant(value=str(text)) if len(text) < 60:
                    found.add(text)
    return frozenset(found)


@cache
def paths() -> frozenset[str]:
    """Every end of every path of the project, and of every dotted module name."""
    found: set[str] = set()
    for file in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*")):
        parts = file.relative_to(ROOT).parts
        found |= {"/".join(parts[i:]) for i in range(len(parts))} | {*parts}
        dotted = file.relative_to(ROOT).with_suffix("").parts
        found |= {".".join(dotted[i:]) for i in range(len(dotted))}
    return frozenset(found)


Members = dict[str, set[str]]


@cache
def members() -> tuple[Members, Members]:
    """Names in each class, by the class's name, and at the top of each module, by the module's.

    Of classes or modules with one name all names count. A class with a base that is not defined in
    the project is left out, since its base may have any name.
    """
    classes: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    modules: dict[str, set[str]] = {}
    for path, tree in sources().items():
        modules.setdefault(path.stem, set()).update(defined(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(defined(node.body), set_on_self(node))
                names = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(names - PLAIN)
    inherited: Members = {}
    for name in classes:
        above = {name}
        while new := set().union(*(bases.get(each, set()) for each in above)) - above:
            above |= new
        if above <= classes.keys():
            inherited[name] = set().union(*(classes[each] for each in above))
    return inherited, modules


PLAIN = {"Protocol", "NamedTuple", "object", "Generic", "ABC", "Enum", "str", "Exception"}


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements define, import or assign."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign():
                yield from (n.id for t in node.targets for n in ast.walk(t) if type(n) is ast.Name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
            case ast.If() | ast.Try() | ast.With():
                yield from defined(node.body)


def set_on_self(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that the methods of a class assign."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@cache
def texts(path: Path) -> list[tuple[int, str]]:
    """Docstrings, strings under fields, and comments, each with its first line."""
    return [*written(path)]


def written(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(sources()[path]):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def is_known(name: str) -> bool:
    if name in FOREIGN or name in paths() or name in identifiers() or name.rstrip("/") in paths():
        return True
    owner, _, last = name.rpartition(".")
    classes, modules = members()
    above = owner.split(".")[-1]
    if above in classes:
        return last in classes[above]
    if above in modules and last[0].isupper():
        return last in modules[above]
    known_owner = owner in paths() or owner.split(".")[-1] in identifiers()
    return bool(owner) and last in identifiers() and known_owner


def test_every_name_in_a_docstring_or_comment_exists() -> None:
    stale = []
    for path in sources():
        if path.parts[0] not in ("llmfoundry", "benchmarks", "scripts"):
            continue
        for line, text in texts(path):
            for match in NAMED.finditer(text):
                name = match[1] or match[2]
                if not is_known(name):
                    stale.append(f"{path}:{line + text[: match.start()].count(chr(10))}  {name}")
    assert stale == []


def test_every_one_of_names_a_constant_of_its_file() -> None:
    stale = []
    for path, tree in sources().items():
        known = {*defined(tree.body)}
        for line, text in texts(path):
            names = (match[1] for match in CHOICES.finditer(text))
            stale += [f"{path}:{line}  {name}" for name in names if name not in known]
    assert stale == []


def test_no_foreign_name_is_listed_in_vain() -> None:
    mentioned = "\n".join(text for path in sources() for _, text in texts(path))
    assert [name for name in sorted(FOREIGN) if name not in mentioned] == []

"""Names in docstrings and comments exist: a renamed file, or a `name` in backquotes, fails."""

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
    "file.py",
    "setup.py",
    "evaluation/triviaqa_evaluation.py",
    "group/option",
    "hopper/flash_attn_interface.py",
    "kind/rank",
    "get_target_block_list",
    "llmfoundry/eval/datasets/in_context_learning_evaluation.py",
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


def test_no_foreign_name_is_listed_in_vain() -> None:
    mentioned = "\n".join(text for path in sources() for _, text in texts(path))
    assert [name for name in sorted(FOREIGN) if name not in mentioned] == []

"""Recipes and command lines with mistakes in them, by the thousand.

They are what a careless or a hostile user may write; each is a pure function of its seed. A case is
a script's recipe type, files that lie in the working folder, and the arguments.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import string
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry.recipe.after_training import (
    AverageRecipe,
    ChatRecipe,
    CompareRecipe,
    ConvertRecipe,
    EvalRecipe,
    GenerateRecipe,
    RunsRecipe,
    ServeRecipe,
    TrackRecipe,
)
from llmfoundry.recipe.before_training import (
    CheckRunRecipe,
    FetchRecipe,
    InspectRecipe,
    LaunchRecipe,
    MigrateRecipe,
    PlanRecipe,
    PrepareRecipe,
)
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import load
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.scaling import ScalingRecipe
from llmfoundry.recipe.schema import Schema, options
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_dict

SCRIPTS: dict[str, type] = {
    "train": TrainRecipe,
    "inspect_data": InspectRecipe,
    "plan": PlanRecipe,
    "prepare_data": PrepareRecipe,
    "eval": EvalRecipe,
    "generate": GenerateRecipe,
    "convert": ConvertRecipe,
    "average": AverageRecipe,
    "fetch_eval_data": FetchRecipe,
    "track": TrackRecipe,
    "migrate": MigrateRecipe,
    "serve": ServeRecipe,
    "finetune": FinetuneRecipe,
    "chat": ChatRecipe,
    "compare": CompareRecipe,
    "scaling": ScalingRecipe,
    "check": CheckRunRecipe,
    "supervise": TrainRecipe,
    "launch": LaunchRecipe,
    "runs": RunsRecipe,
}
SOUND = {  # what the scripts without a recipe's file need
    "eval": ["checkpoint=runs/x"],
    "generate": ["checkpoint=runs/x"],
    "chat": ["checkpoint=runs/x"],
    "serve": ["checkpoint=runs/x"],
    "convert": ["checkpoint=runs/x", "to=hf", "output=out"],
    "average": ["checkpoints=[runs/x]", "last=2", "output=out"],
    "fetch_eval_data": ["from_hub=true"],
    "track": ["run=runs/x"],
    "compare": ["runs=[runs/x]"],
    "scaling": ["fit=points.csv"],
    "migrate": ["theirs=theirs.yaml"],
    "runs": ["words=[list]"],
}
RECIPES = sorted(YAMLS.glob("*.yaml"))
FINETUNES = sorted(YAMLS.glob("finetune/*.yaml"))
FILES = [*RECIPES, *sorted(YAMLS.glob("*/*.yaml"))]
GROUPS = sorted(f"{path.parent.name}={path.stem}" for path in FILES if path.parent != YAMLS)

NUMBERS = [0, 1, -1, 2, 3, 7, 8, 64, 128, 256, 1000, 65536, 10**6, 10**9 + 1, 2**31, 2**63, 2**64]
NUMBERS += [-(2**63), 10**30, 10**400]
FRACTIONS = [0.1, 0.5, 1.0, 1.5, -0.5, 1e-4, 1e-30, 1e-320, 1e30, 1e308, float("nan")]
FRACTIONS += [float("inf"), float("-inf")]
TEXTS = """
x auto null true off -1 1e-4 1e400 0x10 010 12:30 2024-01-01 10ba 0.5dur 1e9tok 1ep 1e999ep 0ba
500gb ??? ${seed} ${nope} ${run_name} ${save_folder} ${ $ } ${a.b[0]} ${oc.env:NO_SUCH_VARIABLE}
${oc.decode:'{'} ${oc.create:${model}} ${model} ${now:%Y} ${hydra:runtime.cwd} ${.seed}
${....seed} ${oc.select:a,b} ../../x / . .. ~ ~nobody/x a/b -x --help /dev/zero /dev/null
/dev/full pipe folder s3://b/k hf://a :// ** a=b a,b [ { ' 'quoted' # &a *a
!!python/object:os.system % ( (?P< [[[ %s {}
""".split()  # noqa: SIM905
TEXTS += ["", " ", "9" * 400 + "gb", "x" * 300, "x" * 5000, "a\0b", "a\nb", "\x1b[31m", '"']
TEXTS += ["é", "日本語", "🙂", "\udc80"]
LAUGHS = "\n".join(
    ["a0: &a0 [lol, lol]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
YAML_TEXTS = [  # whole files, or what a line is followed by
    "",
    "---\n---\n",
    "seed: 1\n---\nseed: 2\n",
    "\ufeffseed: 1\n",
    "seed: 1\n\tmodel: 2\n",
    "seed: 1\nseed: 2\n",
    "? [a, b]\n: 1\n",
    "? {a: 1}\n: 1\n",
    "{[a]: 1}",
    "1: 2\n",
    "null: 1\n~: 2\n",
    "true: 1\n",
    "1.5: {a: 1}\n",
    "model: {1: 2, null: 3, true: 4}\n",
    "a: &a [*a]\n",
    "model: &m {attn_config: *m}\n",
    "model: &m\n  <<: *m\n",
    "&r seed: *r\n",
    LAUGHS,
    f"data: {{name: files, paths: *a11}}\n{LAUGHS}",
    "model: !!python/object/apply:os.system ['true']\n",
    "seed: !!binary aGk=\n",
    "model: !!set {a, b}\n",
    "data: {paths: !!omap [a: 1]}\n",
    "seed: !!int x\n",
    "compile: !!bool maybe\n",
    "run_name: !!timestamp x\n",
    "optimizer: {lr: !!float x}\n",
    "seed: !mine 3\n",
    "run_name: !!null x\n",
    "seed: 0x_\n",
    "seed: 1_000\n",
    "seed: 0b11\n",
    "seed: =\n",
    "run_name: 1:30:00\n",
    "seed: 017\n",
    "optimizer: {lr: 1e-4}\n",
    "optimizer: {lr: .nan}\n",
    "optimizer: {lr: .inf}\n",
    f"seed: {'9' * 5000}\n",
    "[" * 500,
    "[" * 500 + "]" * 500,
    "{a: " * 100 + "1" + "}" * 100,
    "a: " * 50,
    "- " * 200,
    "*a\n",
    "a: *b\n",
    "<<: 5\n",
    "<<: [1, 2]\n",
    "<<: {seed: 3}\n",
    "model:\n  <<: {d_model: 64}\n  n_heads: 2\n",
    "%YAML 9.9\n---\nseed: 1\n",
    "seed: |\n  text\n",
    'run_name: "\\ud800"\n',
    'run_name: "\\0"\n',
    "run_name: 'x\n",
    "defaults:\n",
    "defaults: 5\n",
    "defaults: [5]\n",
    "defaults: [null]\n",
    "defaults: [[model]]\n",
    "defaults: [{model: mpt-125m, data: c4}]\n",
    "defaults: [{model: {a: b}}]\n",
    "defaults: [{model: [mpt-125m, mpt-1b]}]\n",
    "defaults: [{model: null}]\n",
    "defaults: [{optional model: nope}]\n",
    "defaults: [{override model: mpt-125m}]\n",
    "defaults: [{model: ''}]\n",
    "defaults: ['']\n",
    "defaults: [_self_, _self_]\n",
    "defaults: [recipe]\n",
    "defaults: [/recipe]\n",
    "defaults: [../recipe]\n",
    "defaults: [model: ../recipe]\n",
    "defaults: [model@data: mpt-125m]\n",
    "defaults: [model@: mpt-125m]\n",
    "defaults: [model: ${oc.env:X}]\n",
    "defaults: [model: ${data}, data: c4]\n",
    "defaults: [model: broken]\n",
    "defaults: [model: loop]\n",
    "defaults: [model: laughs]\n",
    "defaults: [model: pipe]\n",
    "defaults: [hydra/launcher: basic]\n",
    "defaults: [quickstart]\nhydra: {run: {dir: x}}\n",
    "a: ${b}\nb: ${a}\n",
    "run_name: ${run_name}\n",
    "seed: ${seed}\n",
    "model: ${model}\n",
    "model: ${data}\n",
    "run_name: ${save_folder}\n",
    "seed: ${model.n_layers}\n",
    "data: {name: mixture, streams: {a: {}, '': {}, a/b: {}, ${x}: {}}}\n",
    "data: {name: mixture, streams: {a: null}}\n",
    "data: {name: mixture, streams: {a: {proportion: .nan}}, phases: [{}]}\n",
    "model: {block_overrides: {order: [{name: default, repeat: 1000000000}]}}\n",
    "model: {block_overrides: {order: [{order: [{name: default, repeat: 999999}],"
    " repeat: 999999}]}}\n",
    "model: {block_overrides: {order: [{name: a}], overrides: {a: {attn_config:"
    " {reuse_kv_layer_idx: -1}}}}, n_layers: 1}\n",
]
WORDS = """
= ==x =x - -- --- -x --cfg --cfg=job -c job --help -h --help=x --resolve -m --multirun -m=3
model optimizer.lr ~ ~seed ~nope ~seed=wrong ~/x.yaml ~nobody/x.yaml + ++ +seed=1 ++=1 /dev/zero
/dev/stdin /dev/null pipe folder closed.yaml / . .. // x.yaml a.b.c.d=1 a..b=1 .a=1 a.=1
seed.x=1 data.paths[0]=x data.paths.0=x data.paths=[a,,b] [=] {}=1 seed=1,2
seed=range(1,1000000000) seed=range(1,3) optimizer=glob(*) seed=choice(1,2)
optimizer.lr=interval(0,1) optimizer.lr=interval(0,1),3 seed=[range(1,2)] seed=sort(3,1)
model={ model=} model={a: model=' seed=${seed}
seed=${oc.env:HOME} run_name=${run_name}${run_name} model@x=mpt-125m model@=mpt-125m
model=/mpt-125m model=../quickstart model= model=null model.d_model=1000000001
model.n_layers=1e9 model.n_layers=200000 parallel.nproc_per_node=1e9 data.loader_workers=100000
global_train_batch_size=1e30 run_name=../../x data.paths=['']
""".split()  # noqa: SIM905
WORDS += ["", " ", "--cfg job", "a b=c", "a\0b", "a\0b.yaml", "seed=\0", "\udc80", "seed=\udcff"]
WORDS += ["🙂=🙂", "é.yaml", "x" * 300, "x" * 300 + ".yaml", "a/" * 3000, "x" * 100_000]
WORDS += ["prompt=" + "x " * 200, "seed=" + "9" * 5000, "data.paths=" + "[" * 5000]
WORDS += ["data.paths=" + "[" * 90 + "]" * 90, "model=" + "{a:" * 60 + "1" + "}" * 60]


@dataclass
class Case:
    """One command: `scripts/SCRIPT.py ARGV` in a folder with FILES."""

    script: str
    argv: list[str]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def schema(self) -> type:
        """The script's recipe."""
        return SCRIPTS[self.script]


def case(seed: int) -> Case:
    """Case number `seed`."""
    rng = random.Random(seed)
    script = rng.choice(["train"] * 4 + list(SCRIPTS))
    return rng.choice(_KINDS)(rng, script)


def prepare_folder(folder: Path) -> None:
    """What the cases' words find in their working folder."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "closed.yaml").touch(0)
    model = folder / "model"
    model.mkdir()
    (model / "broken.yaml").write_text("d_model: [1,\n")
    (model / "loop.yaml").write_text("defaults: [loop]\n")
    (model / "laughs.yaml").write_text(LAUGHS)
    os.mkfifo(model / "pipe.yaml")


def _overrides(rng: random.Random, script: str) -> Case:
    """A sound recipe, and settings of which some are not."""
    words = [_setting(rng, SCRIPTS[script]) for _ in range(rng.randint(1, 5))]
    return Case(script, _start(rng, script) + words)


def _arguments(rng: random.Random, script: str) -> Case:
    words = rng.sample(WORDS, rng.randint(1, 3))
    start = _start(rng, script) if rng.random() < 0.6 else []
    argv = [*start, *words]
    rng.shuffle(argv)
    return Case(script, argv)


def _structure(rng: random.Random, script: str) -> Case:
    """A whole recipe, changed in a few places of its tree."""
    tree = _plain(rng.choice(_recipes(script)[::4]) if _trains(script) else None, script)
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        _change(rng, tree)
    return Case(script, ["recipe.yaml"], {"recipe.yaml": json.dumps(tree, indent=1)})  # is YAML


def _letters(rng: random.Random, script: str) -> Case:
    """A shipped file's text, changed in a few characters or lines."""
    text = rng.choice(FILES if not _trains(script) else _recipes(script) * 3 + FILES).read_text()
    for _ in range(rng.randint(1, 4)):
        lines = text.splitlines(keepends=True) or [""]
        at, here = rng.randrange(len(lines)), rng.randrange(len(text) + 1)
        change = rng.randrange(6)
        if change == 0:
            text = text[:here] + rng.choice(string.punctuation + " \n\t\0x9") + text[here:]
        elif change == 1:
            text = text[:here] + text[here + rng.randint(1, 30) :]
        elif change == 2:
            lines.insert(at, rng.choice(lines))
            text = "".join(lines)
        elif change == 3:
            lines[at] = "  " + lines[at]
            text = "".join(lines)
        elif change == 4:
            lines[at] = rng.choice(YAML_TEXTS[:60]) + "\n"
            text = "".join(lines)
        else:
            text = text[:here] + rng.choice(TEXTS) + text[here:]
    text = text.encode(errors="replace").decode()
    return Case(script, ["recipe.yaml"], {"recipe.yaml": text})


def _garbage(rng: random.Random, script: str) -> Case:
    """YAML that is none, or is not for recipes."""
    text = "".join(rng.sample(YAML_TEXTS, rng.choice([1, 1, 1, 2])))
    if rng.random() < 0.1:
        text = "".join(chr(rng.randrange(1, 256)) for _ in range(rng.randint(1, 60)))
    return Case(script, [*SOUND.get(script, []), "recipe.yaml"], {"recipe.yaml": text})


def _values(rng: random.Random, script: str) -> Case:
    """Settings that are well formed for their types, of any size."""
    leaves = _leaves(SCRIPTS[script])
    start = [str(rng.choice(_recipes(script)))] if _trains(script) else list(SOUND[script])
    words = []
    for key, hint in rng.sample(leaves, min(len(leaves), rng.randint(1, 3))):
        words.append(f"{key}={_written(_fitting(rng, hint))}")
    return Case(script, start + words)


_KINDS: list[Callable[[random.Random, str], Case]] = [
    _overrides,
    _overrides,
    _arguments,
    _structure,
    _structure,
    _letters,
    _garbage,
    _values,
    _values,
]


def _trains(script: str) -> bool:
    return issubclass(SCRIPTS[script], TrainRecipe)


def _start(rng: random.Random, script: str) -> list[str]:
    if not _trains(script):
        return list(SOUND[script])
    if rng.random() < 0.3:
        return ["run_name=x"]
    return [str(rng.choice(_recipes(script)))]


def _recipes(script: str) -> list[Path]:
    return FINETUNES if script == "finetune" else RECIPES


_PLAIN: dict[tuple[Path | None, str], dict[str, Any]] = {}


def _plain(recipe: Path | None, script: str) -> dict[str, Any]:
    """A whole recipe as plain values."""
    key = (recipe, script)
    if key not in _PLAIN:
        words = SOUND.get(script, [])
        _PLAIN[key] = to_dict(load(SCRIPTS[script], recipe, words))
    return copy.deepcopy(_PLAIN[key])


def _change(rng: random.Random, tree: dict[str, Any]) -> None:
    """One mistake somewhere in a tree."""
    holder: Any = tree
    while True:
        inner = [v for v in holder.values() if isinstance(v, dict) and v]
        if not inner or rng.random() < 0.4:
            break
        holder = rng.choice(inner)
    key = rng.choice(list(holder))
    change = rng.randrange(8)
    if change == 0:
        del holder[key]
        if not holder:
            holder["x"] = 1
    elif change == 1:
        holder[_typo(rng, str(key))] = holder.pop(key)
    elif change == 2:
        other = rng.choice(list(tree))
        holder[key], tree[other] = tree[other], holder[key]
    elif change == 3:
        holder[key] = rng.choice(
            [[holder[key]], {"x": holder[key]}, {str(key): holder[key]}, [], {}]
        )
    else:
        holder[key] = _anything(rng)


def _anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(FRACTIONS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice([None, True, False])
    if depth > 3:
        return []
    if kind == 7:
        return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): _anything(rng, depth + 1) for _ in range(rng.randrange(3))}


def _typo(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice(
        [word[:at] + word[at + 1 :], word[:at] + "_" + word[at:], word.upper(), word + ".x", ""]
    )


def _setting(rng: random.Random, schema: type) -> str:
    """`key=value`, either of which may be wrong."""
    if rng.random() < 0.1:
        return rng.choice(GROUPS)
    key, hint = rng.choice(_leaves(schema))
    if rng.random() < 0.15:
        key = _typo(rng, key)
    if rng.random() < 0.1:
        key = key.rpartition(".")[0] or key
    value = _fitting(rng, hint) if rng.random() < 0.4 else _anything(rng)
    word = f"{rng.choice(['', '', '', '+', '++', '~'])}{key}={_written(value)}"
    return word if rng.random() < 0.95 else word.replace("=", "", 1)


def _leaves(schema: type) -> list[tuple[str, Any]]:
    """Every value of a schema by its dotted key, and its type."""
    keys = Schema.of(schema).walk()
    return [(dotted, key.hint) for dotted, key in keys if key.section is None]


def _fitting(rng: random.Random, hint: Any) -> Any:
    """A value of the type `hint`, of any size."""
    option = rng.choice(options(hint))
    if option is bool:
        return rng.choice([True, False])
    if option is int:
        return rng.choice([*NUMBERS, rng.randint(1, 4096)])
    if option is float:
        return rng.choice([*FRACTIONS, round(rng.random(), 3)])
    if option is types.NoneType:
        return None
    if typing.get_origin(option) is list:
        return [_fitting(rng, typing.get_args(option)[0]) for _ in range(rng.randrange(3))]
    if typing.get_origin(option) is dict:
        return {rng.choice(TEXTS): _fitting(rng, typing.get_args(option)[1]) for _ in range(2)}
    if dataclasses.is_dataclass(option) and isinstance(option, type):
        keys = list(Schema.of(option).keys.items())[:3]
        return {name: _fitting(rng, key.hint) for name, key in keys}
    return rng.choice(TEXTS)


def _written(value: Any) -> str:
    """A value as it is written on a command line, more or less."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)

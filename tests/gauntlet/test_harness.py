"""lm-evaluation-harness: its own transformers model and ours give the same numbers on its tasks."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from hugging_face_models import plain_logprobs, save_model, save_tokenizer

from llmfoundry.cli.commands.evaluate import evaluate as evaluate_command
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.harness import HarnessModel, HarnessResult, HarnessTasks
from llmfoundry.gauntlet.models.hugging_face import HuggingFaceModel
from llmfoundry.gauntlet.questions import RefusedError, ScoreRequest
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.eval import EvalConfig
from tests.gauntlet.hugging_face_models import load_hugging_face

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'llmfoundry-recipes[eval]'",
)
CPU = torch.device("cpu")
WORDS = [
    *("the", "man", "water", "city", "permit", "author", "answer", "book", "because", "twelve")
]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "num_fewshot": 2,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "schema": {
        "output_type": "multiple_choice",
        "doc_to_text": "gold",
        "doc_to_choice": "context_options",
        "doc_to_target": "continuation",
        "metric_list": [{"metric": "acc"}],
    },
    "words": {
        "output_type": "loglikelihood",
        "doc_to_text": "query",
        "doc_to_target": "{{' '+continuation}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "long",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{'A: '+query}}",
        "doc_to_target": "continuation",
        "generation_kwargs": {"until": ["\n\n", "he"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


GROUP = {
    "group": "both",
    "task": ["local_choices", "local_schema"],
    "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
}


def write_tasks(folder: Path, **changes: Any) -> Path:
    """The tasks above, over 24 rows of random words; some queries end in spaces or are empty."""
    draw = random.Random(5)

    def text(n: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(n))

    rows = [
        {
            "query": "" if i == 3 else f"Question: {text(4 + i % 9)}?{(' ', '')[i % 2]}",
            "choices": [text(1 + (i + j) % 4) for j in range(3)],
            "gold": i % 2,
            "context_options": [text(3 + i % 5), text(4)],
            "continuation": text(1 + i % 3),
            "long": text(10 + 20 * i),
        }
        for i in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        where = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(folder / "rows.jsonl")},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "num_fewshot": 0,
            "tag": "all_local",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**where, **task, **changes}))
    (folder / "both.yaml").write_text(yaml.safe_dump(GROUP))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


class Recorder:
    """Passes all on to a model of the harness, and keeps what it answers."""

    rank, world_size = 0, 1

    def __init__(self, model: Any) -> None:
        self.model, self.answers = model, dict[tuple[str, tuple[Any, ...]], Any]()

    def __getattr__(self, kind: str) -> Any:
        def call(requests: Sequence[Any]) -> list[Any]:
            answers = getattr(self.model, kind)(requests)
            for request, answer in zip(requests, answers, strict=True):
                self.answers[kind, tuple(map(str, request.args))] = answer
            return answers

        return call


def evaluate(model: Any, tasks: Path, names: list[str]) -> Any:
    """The harness's own way to its results."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)
    return evaluator.evaluate(lm=model, task_dict=loaded, bootstrap_iters=10)["results"]


@needs_harness
@pytest.mark.parametrize(("kind", "bos"), [("gpt_neox", False), ("llama", True)])
def test_every_kind_of_task_gives_the_harness_own_numbers(
    kind: str, bos: bool, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    folder = str(save_model(tmp_path / "model", kind, bos=bos))
    names = [f"local_{name}" for name in TASKS]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = Recorder(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5, device="cpu"))
    expected = evaluate(theirs, tasks, names)

    subject, own = load_hugging_face(folder, device=CPU, precision="fp32", batch_tokens=2000)
    ours = Recorder(HarnessModel(subject, own, seq_len=subject.seq_len))
    assert evaluate(ours, tasks, names).keys() == expected.keys()
    assert ours.answers.keys() == theirs.answers.keys()
    for (call, args), answer in theirs.answers.items():
        allowed = 1e-4 * max(1, len(own.encode(args[-1])) / 8)
        if call == "loglikelihood":
            assert ours.answers[call, args][0] == pytest.approx(answer[0], abs=allowed, rel=0)
            assert ours.answers[call, args][1] == answer[1]
        elif call == "loglikelihood_rolling":
            assert ours.answers[call, args] == pytest.approx(answer, abs=allowed, rel=0)
        else:
            assert ours.answers[call, args] == answer

    harness = HarnessTasks(names, include_path=tasks)
    results = harness.run(subject, own, seq_len=subject.seq_len)
    assert harness.run(subject, own, seq_len=subject.seq_len) == results, "tasks can run again"
    assert [(r.label, r.n, r.shots) for r in results] == [
        (name, 24, TASKS[name.removeprefix("local_")].get("num_fewshot", 0)) for name in names
    ]
    for result in results:
        assert result.metrics
        for metric, (value, error) in result.metrics.items():
            theirs_of = expected[result.label]
            assert value == pytest.approx(theirs_of[f"{metric},none"], rel=1e-4), metric
            if metric.startswith("acc"):
                assert error == pytest.approx(theirs_of[f"{metric}_stderr,none"], rel=1e-6)


# Rows in the forms of arc_easy, copa, winogrande, lambada and svamp, asked by default prompts.
SHAPES: dict[str, dict[str, Any]] = {
    "arc": {
        "icl_task_type": "multiple_choice",
        "continuation_delimiter": "\nAnswer: ",
        "num_fewshot": [2],
    },
    "copa": {"icl_task_type": "multiple_choice", "num_fewshot": [0]},
    "winogrande": {"icl_task_type": "schema", "num_fewshot": [1]},
    "lambada": {"icl_task_type": "language_modeling", "num_fewshot": [0]},
    "svamp": {
        "icl_task_type": "generation_task_with_answers",
        "num_fewshot": [1],
        "continuation_delimiter": "\n\nA:",
        "question_prelimiter": "Q: ",
        "early_stopping_criteria": ["\n\n", "Q:"],
        "max_new_tokens": 9,
        "do_normalization": False,
    },
}
PLACES = ["water", "the city", "a book's author", "Answer: 12 (it)"]


def shaped_rows(shape: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(9):
        a, b, c = (PLACES[(i + j * j) % 4] for j in range(3))
        rows.append(
            {
                "arc": {
                    "query": f"Question: Who wrote {a}?",
                    "choices": [b, c, "x"],
                    "gold": i % 3,
                },
                "copa": {
                    "query": f"The man turned on {a}, because",
                    "choices": [f"{b} was dirty.", f"he didn't know {i}."],
                    "gold": i % 2,
                },
                "winogrande": {
                    "context_options": [f"{a} feared {b} as {a}", f"{a} feared {b} as the {i}"],
                    "continuation": f"refused {c}.",
                    "gold": i % 2,
                },
                "lambada": {"context": f'{a}, {b}. "{i} is', "continuation": f"{c}"},
                "svamp": {"context": f"What is {i} + {a}? {b}", "answer": str(i)},
            }[shape]
        )
    return rows


def harness_task(shape: str, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Any]]:
    """The same task in the harness's words: prompts as whole texts, without worked examples."""
    config = SHAPES[shape]
    (shots,) = config["num_fewshot"]
    delimiter = config.get("continuation_delimiter", " ")
    head = config.get("question_prelimiter", "")
    drawn = random.Random(1234).sample(range(len(rows)), shots + 1) if shots else []

    def context(row: dict[str, Any]) -> str:
        options = row.get("context_options")
        return options[row["gold"]] if options else row.get("query", row.get("context"))

    def answer(row: dict[str, Any]) -> str:
        choices = row.get("choices")
        return choices[row["gold"]] if choices else row.get("continuation", row.get("answer"))

    docs = []
    for i, row in enumerate(rows):
        examples = [rows[j] for j in drawn if j != i][:shots]
        before = "".join(head + context(e) + delimiter + answer(e) + "\n" for e in examples)
        options = row.get("context_options", [context(row)])
        texts = [before + head + text + delimiter.rstrip() for text in options]
        docs.append({**row, "prompt": texts[0], "prompts": texts, "answer": answer(row)})
    kinds: dict[str, dict[str, Any]] = {
        "multiple_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "prompt",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
        },
        "schema": {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "prompts",
            "doc_to_target": "answer",
        },
        "language_modeling": {
            "output_type": "loglikelihood",
            "doc_to_text": "prompt",
            "doc_to_target": "{{' '+answer}}",
        },
        "generation_task_with_answers": {
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            "doc_to_target": "answer",
            "generation_kwargs": {
                "until": config.get("early_stopping_criteria"),
                "max_gen_toks": config.get("max_new_tokens"),
                "do_sample": False,
            },
        },
    }
    metrics = {"multiple_choice": ["acc", "acc_norm"], "generation_task_with_answers": []}
    kind = config["icl_task_type"]
    names = metrics.get(kind, ["acc"]) or ["exact_match"]
    return {**kinds[kind], "metric_list": [{"metric": name} for name in names]}, docs


@needs_harness
@pytest.mark.parametrize(
    ("kind", "bos", "metaspace"),
    [("gpt_neox", False, False), ("llama", True, False), ("llama", True, True)],
    ids=["no-start", "bos", "sentencepiece"],
)
def test_default_prompts_give_what_the_harness_gives_end_to_end(
    kind: str, bos: bool, metaspace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.chdir(tmp_path)
    folder = save_model(tmp_path / "model", kind, bos=bos)
    save_tokenizer(folder, bos=bos, metaspace=metaspace)
    for shape in SHAPES:
        rows = shaped_rows(shape)
        (tmp_path / f"{shape}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        task, docs = harness_task(shape, rows)
        (tmp_path / f"{shape}_docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
        where = {"test": str(tmp_path / f"{shape}_docs.jsonl")}
        kwargs = {"data_files": where, "cache_dir": str(tmp_path / "cache")}
        task |= {"task": f"their_{shape}", "dataset_path": "json", "dataset_kwargs": kwargs}
        task |= {"test_split": "test", "num_fewshot": 0}
        (tmp_path / f"{shape}.yaml").write_text(yaml.safe_dump(task))
    tasks = [
        {"label": shape, "dataset_uri": f"{shape}.jsonl", **config}
        for shape, config in SHAPES.items()
    ]
    (tmp_path / "gauntlet.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))

    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=[f"their_{shape}" for shape in SHAPES],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    found = EvalConfig(gauntlet=str(tmp_path / "gauntlet.yaml"))
    cache = str(tmp_path / "prompts")
    evaluate_command(
        EvalRecipe(models=[str(folder)], eval=found, output=str(tmp_path), cache_folder=cache)
    )

    results = json.loads((tmp_path / "results.json").read_text())
    asked = "<s> before each text" if bos else "nothing before each text"
    assert results["gauntlet"]["asked"] == f"harness prompts, {asked}"
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for shape, config in SHAPES.items():
        ours = [line for line in lines if line["task"] == shape]
        ours.sort(key=lambda line: (int(line["row"].split(":")[1]), line["choice"]))
        name = f"their_{shape}"
        samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        answers = [answer for sample in samples for answer in sample["filtered_resps"]]
        assert len(ours) == len(answers)
        metrics = theirs["results"][name]
        prefix = f"metrics/{shape}/{config['num_fewshot'][0]}-shot"
        if shape == "svamp":
            assert [line["text"] for line in ours] == answers
            continue
        logprobs = [float(answer[0]) for answer in answers]
        assert [line["logprob"] for line in ours] == pytest.approx(logprobs, abs=1e-4)
        metric = "InContextLearningLMAccuracy" if shape == "lambada" else "acc"
        assert results["metrics"][f"{prefix}/{metric}"] == metrics["acc,none"]
        if "acc_norm,none" in metrics:
            assert results["metrics"][f"{prefix}/acc_norm"] == metrics["acc_norm,none"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[HuggingFaceModel, Tokenizer]:
    folder = save_model(tmp_path_factory.mktemp("model"), "gpt_neox")
    return load_hugging_face(str(folder), device=CPU, precision="fp32", batch_tokens=2000)


def instance(*args: Any) -> SimpleNamespace:
    """What the harness's evaluator asks a model, as far as models look at it."""
    return SimpleNamespace(args=args, task_name="t", doc_id=0)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("The man turned", " on the water"), ("The man  ", "turned"), ("", "The man"), (" \n", "man")],
)
def test_context_and_continuation_are_one_text_and_spaces_between_belong_to_the_second(
    context: str, continuation: str, loaded: tuple[HuggingFaceModel, Tokenizer]
) -> None:
    subject, tokenizer = loaded
    n_context = len(tokenizer.encode(context.rstrip()))
    tokens = tokenizer.encode(context + continuation)
    if n_context == 0:  # then the end of text comes before
        n_context, tokens = 1, [tokenizer.eos_id, *tokens]
    request = ScoreRequest(tuple(tokens[:-1]), tuple(tokens[n_context:]), continuation)
    logprobs = plain_logprobs(subject.model, request)
    expected = logprobs.gather(1, torch.tensor(request.targets)[:, None]).sum()
    model = HarnessModel(subject, tokenizer, seq_len=64)
    ((logprob, _),) = model.loglikelihood([instance(context, continuation)])
    assert logprob == pytest.approx(float(expected), abs=1e-4)


@needs_harness
def test_words_and_special_tokens_across_the_border_score_as_in_the_harness(
    tmp_path: Path,
) -> None:
    from lm_eval.models.huggingface import HFLM

    folder = str(save_model(tmp_path / "model", "llama", bos=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, device="cpu")
    subject, own = load_hugging_face(folder, device=CPU, precision="fp32", batch_tokens=2000)
    ours = HarnessModel(subject, own, seq_len=subject.seq_len)
    asked = [
        instance(*texts)
        for texts in [
            ("fau", "cet, it was"),
            ("Who wrote this bo", "ok? the author"),
            ("<s>The man", " turned"),
            ("The man<|endoftext|>", "\nA:<s> water"),
            ("The city", "<|endoftext|>"),
            ("", "<s>The man"),
            ("", "The man"),
        ]
    ]
    tokens = ours._encode_requests(asked)
    words = [own.encode_chat(a.args[0] + a.args[1]) for a in asked[:2]]
    assert [[*head[1:], *rest] for head, rest in tokens[:2]] != words, "a word crosses the border"
    for (logprob, greedy), (expected, is_greedy) in zip(
        ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True), strict=True
    ):
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert greedy == is_greedy


def test_an_answer_that_joins_the_contexts_token_is_scored_from_there_for_all_answers(
    loaded: tuple[HuggingFaceModel, Tokenizer],
) -> None:
    subject, tokenizer = loaded
    (water,) = tokenizer.encode(" water")
    asked = [instance(" wa", "ter"), instance(" wa", " the"), instance("The", " man")]
    model = HarnessModel(subject, tokenizer, seq_len=64)
    prefix = [model._prefix_id]
    assert model._encode_requests(asked) == [
        (prefix, [water]),
        (prefix, tokenizer.encode(" wa the")),
        (tokenizer.encode("The"), tokenizer.encode("The man")[1:]),
    ]
    assert all(math.isfinite(logprob) for logprob, _ in model.loglikelihood(asked))


def test_a_text_too_long_loses_its_start_and_is_counted(
    loaded: tuple[HuggingFaceModel, Tokenizer],
) -> None:
    subject, tokenizer = loaded
    model = HarnessModel(subject, tokenizer, seq_len=8)
    tokens = tokenizer.encode("The man turned on the faucet, because it was dirty.")
    assert len(tokens) > 11
    asked = instance(tokenizer.decode(tokens[:-2]), tokenizer.decode(tokens[-2:]))
    request = ScoreRequest(tuple(tokens[-9:-1]), tuple(tokens[-2:]), "")
    logprobs = plain_logprobs(subject.model, request)
    expected = logprobs.gather(1, torch.tensor(request.targets)[:, None]).sum()
    assert model.loglikelihood([asked])[0][0] == pytest.approx(float(expected), abs=1e-4)
    assert model.truncated == {"t": 1}
    with pytest.raises(RefusedError, match=r"lm_eval:t, row 0: the answer .* scores 1 to 8"):
        model.loglikelihood([instance("The", asked.args[0])])


@needs_harness
def test_a_task_that_writes_more_than_the_model_reads_is_refused(
    loaded: tuple[HuggingFaceModel, Tokenizer],
) -> None:
    model = HarnessModel(*loaded, seq_len=8)
    with pytest.raises(RefusedError, match=r"lm_eval:t: writes up to 256 tokens, .* reads 8"):
        model.generate_until([instance("The", {})])


@needs_harness
def test_a_group_gives_its_own_result_and_a_tag_those_of_its_tasks(
    loaded: tuple[HuggingFaceModel, Tokenizer], tasks: Path
) -> None:
    def run(*names: str) -> list[HarnessResult]:
        return HarnessTasks(names, limit=7, include_path=tasks).run(*loaded, seq_len=256)

    single = run("local_choices", "local_schema")
    (whole,) = run("lm_eval:both")
    assert (whole.label, whole.n, [r.n for r in single]) == ("both", 14, [7, 7])
    mean = (single[0].metrics["acc"][0] + single[1].metrics["acc"][0]) / 2
    assert whole.accuracy == ("acc", pytest.approx(mean), whole.metrics["acc"][1])
    assert {result.label for result in run("all_local")} == {f"local_{name}" for name in TASKS}
    with pytest.raises(
        UserError, match=r"lm_eval:local_choises: .*; did you mean 'local_choices'\?"
    ):
        run("local_choises")


@needs_harness
@pytest.mark.parametrize(
    ("name", "changes", "shots", "says"),
    [
        ("local_words", {"num_fewshot": 0}, 3, "the task's own file specifies 0"),
        ("local_choices", {"dataset_kwargs": {"data_files": "none.jsonl"}}, 0, "cannot be read"),
        ("local_written", {"generation_kwargs": {"do_sample": True}}, 0, "at random"),
        ("local_written", {"unsafe_code": True}, 0, "runs programs that the model writes"),
    ],
)
def test_a_task_that_cannot_be_run_is_reported_in_a_line(
    name: str,
    changes: dict[str, Any],
    shots: int,
    says: str,
    tmp_path: Path,
) -> None:
    tasks = write_tasks(tmp_path, **changes)
    file = str(tasks / f"{name.removeprefix('local_')}.yaml")
    with pytest.raises(UserError, match=says) as raised:
        HarnessTasks([file], num_fewshot=shots)
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("lm_eval:")


@needs_harness
def test_a_model_that_outputs_nan_fails_its_task_and_draws_continue_as_if_nothing_ran(
    tasks: Path,
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model", "gpt_neox")
    subject, tokenizer = load_hugging_face(
        str(folder), device=CPU, precision="fp32", batch_tokens=2000
    )
    with torch.no_grad():
        subject.model.get_output_embeddings().weight.fill_(math.nan)
    random.seed(3)
    np.random.seed(3)
    expected = random.Random(3).random(), np.random.RandomState(3).rand()
    (result,) = HarnessTasks(["local_words"], include_path=tasks).run(
        subject, tokenizer, seq_len=256
    )
    assert result == HarnessResult("local_words", 0, 0, failure=result.failure)
    assert result.failure == "a log-probability of local_words, row 0 is not a finite number"
    assert result.accuracy is None
    assert (random.random(), np.random.rand()) == expected


def test_without_the_harness_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install 'llmfoundry-recipes\[eval\]'"):
        HarnessTasks(["arc_easy"])

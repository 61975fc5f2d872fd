"""From rows of data sets on the Hugging Face hub to rows as LLM Foundry's files have them.

`fetch.from_hub` calls these. Each function takes one row with the columns that its source publishes
and gives the rows that it becomes: mostly one, none where the source's row does not fit, several
where a source keeps a conversation in one row. The wording is LLM Foundry's where its file was
seen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Source = Mapping[str, Any]
Row = dict[str, Any]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ai2_arc(row: Source) -> list[Row]:
    """ARC; the few questions without exactly four choices are left out, as in LLM Foundry."""
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    if len(texts) != 4:
        return []
    query = f"Question: {row['question']}"
    return [{"query": query, "choices": list(texts), "gold": labels.index(row["answerKey"])}]


def agieval(row: Source) -> list[Row]:
    """AGIEval's multiple choice: the query lists the choices already."""
    (gold,) = row["gold"]
    return [{"query": row["query"], "choices": list(row["choices"]), "gold": gold}]


def agieval_free(row: Source) -> list[Row]:
    """AGIEval's multiple choice with the choices hidden: the answer is the right one's text."""
    (gold,) = row["gold"]
    context = row["query"].split(" Answer Choices:")[0]
    answer = re.sub(r"^\([A-Z]\)", "", row["choices"][gold]).strip()
    return [{"context": context, "answer": answer}]


def bbq(row: Source) -> list[Row]:
    """BBQ, a category for each kind of bias."""
    query = f"Context: {row['context']}\nQuestion: {row['question']}"
    choices = [row["ans0"], row["ans1"], row["ans2"]]
    return [{"query": query, "choices": choices, "gold": row["label"], "category": row["category"]}]


def bigbench_choice(row: Source) -> list[Row]:
    """A multiple-choice task of BIG-bench; the first choice with score 1 is right."""
    gold = row["multiple_choice_scores"].index(1)
    choices = list(row["multiple_choice_targets"])
    return [{"query": row["inputs"], "choices": choices, "gold": gold}]


def bigbench_lm(row: Source) -> list[Row]:
    """A task of BIG-bench where the first of the targets is to be written."""
    return [{"context": row["inputs"], "continuation": row["targets"][0]}]


def boolq(row: Source) -> list[Row]:
    """BoolQ; false is `no`, the first choice."""
    query = f"Passage: {row['passage']}\nQuestion: {row['question']}?"
    return [{"query": query, "choices": ["no", "yes"], "gold": int(row["label"])}]


def commonsense_qa(row: Source) -> list[Row]:
    """CommonsenseQA, answered by letter."""
    choices = row["choices"]
    query = f"Question: {row['question']}\nChoices:\n{_lettered(choices['text'])}\nAnswer:"
    return [_by_letter(query, len(choices["text"]), choices["label"].index(row["answerKey"]))]


def copa(row: Source) -> list[Row]:
    """COPA as one sentence: the premise, because or therefore, and a choice in lower case."""
    joint = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [text[:1].lower() + text[1:] for text in (row["choice1"], row["choice2"])]
    query = f"{row['premise'].strip()[:-1]}, {joint}"
    return [{"query": query, "choices": choices, "gold": row["label"]}]


def coqa(row: Source) -> list[Row]:
    """CoQA: one row for each turn, after the story and the turns before it."""
    head = (
        "Below is a story followed by a series of related questions. Please answer the final"
        " question by referring to the story and the previous questions.\n"
        f"Story: {row['story']}\n\n"
    )
    turns, rows = "", []
    for question, answer in zip(row["questions"], row["answers"]["input_text"], strict=True):
        before = f"Preceding questions:\n{turns}\n" if turns else ""
        context = f"{head}{before}Final question:\nQuestion: {question}\nAnswer:"
        rows.append({"context": context, "continuation": answer})
        turns += f"Question: {question}\nAnswer: {answer}\n"
    return rows


def gpqa(row: Source) -> list[Row]:
    """GPQA; the order of choices is drawn from the question, so that it never changes."""
    choices = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    choices = [text.strip() for text in choices]
    order = random.Random(row["Question"]).sample(range(4), 4)
    query = f"Question: {row['Question'].strip()}\n{_lettered([choices[i] for i in order])}"
    return [_by_letter(query, 4, order.index(0))]


def gsm8k(row: Source) -> list[Row]:
    """GSM8K; the number after #### is the answer, the text before it the chain of thought."""
    thought, _, answer = row["answer"].partition("#### ")
    return [
        {
            "context": row["question"],
            "chain_of_thought": thought.strip(),
            "answer": answer.strip(),
        }
    ]


def hellaswag(row: Source) -> list[Row]:
    """HellaSwag, its texts cleaned of WikiHow's marks as the harness does."""
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    return [
        {
            "query": _clean_wikihow(f"{row['activity_label']}: {context}"),
            "choices": [_clean_wikihow(text) for text in row["endings"]],
            "gold": int(row["label"]),
        }
    ]


def jeopardy(row: Source) -> list[Row]:
    """Jeopardy, published in LLM Foundry's form."""
    return [{key: row[key] for key in ("context", "continuation", "category")}]


def lambada(row: Source) -> list[Row]:
    """LAMBADA: the last word of a passage is to be written."""
    context, word = row["text"].rstrip().rsplit(maxsplit=1)
    return [{"context": context, "continuation": word}]


def logi_qa(row: Source) -> list[Row]:
    """LogiQA, answered by letter; its labels are a to d."""
    query = (
        f"Passage: {row['context']}\nQuestion: {row['question']}\n"
        f"Choices: {_lettered(row['options'])}\n"
    )
    return [_by_letter(query, len(row["options"]), "abcd".index(row["label"].strip()))]


def math_qa(row: Source) -> list[Row]:
    """MathQA, answered by letter; its options are one text, `a ) 38 , b ) 27.675 , ...`."""
    options = [text.strip(" ,") for text in re.split(r"(?:^|,)\s*[a-e] \) ", row["options"])[1:]]
    query = f"Question: {row['Problem']}\n{_lettered(options)}\nAnswer: "
    return [_by_letter(query, len(options), "abcde".index(row["correct"]))]


def mmlu(row: Source) -> list[Row]:
    """MMLU, answered by letter, with its subject as the category."""
    query = f"Question: {row['question']}\n{_lettered(row['choices'])}\n"
    return [_by_letter(query, len(row["choices"]), row["answer"]) | {"category": row["subject"]}]


def openbook_qa(row: Source) -> list[Row]:
    """OpenBookQA: choices continue the question's sentence."""
    choices = row["choices"]
    gold = choices["label"].index(row["answerKey"].strip())
    return [{"query": row["question_stem"], "choices": list(choices["text"]), "gold": gold}]


def piqa(row: Source) -> list[Row]:
    """PIQA; the line break is in LLM Foundry's file."""
    query = f"Question: {row['goal']}\n"
    return [{"query": query, "choices": [row["sol1"], row["sol2"]], "gold": row["label"]}]


def pubmed_qa(row: Source) -> list[Row]:
    """PubMedQA: yes, no or maybe is to be written."""
    abstract = "\n".join(row["context"]["contexts"])
    context = f"Abstract: {abstract}\nQuestion: {row['question']}\nAnswer:"
    return [{"context": context, "continuation": row["final_decision"]}]


def siqa(row: Source) -> list[Row]:
    """Social IQa, answered by letter; its labels are 1 to 3."""
    texts = [row["answerA"], row["answerB"], row["answerC"]]
    query = (
        f"Context: {row['context']}\nQuestion: {row['question']}\n"
        f"Choices:\n{_lettered(texts)}\nAnswer:"
    )
    return [_by_letter(query, 3, int(row["label"]) - 1)]


def squad(row: Source) -> list[Row]:
    """SQuAD: the first of the accepted answers is to be written."""
    context = f"Context: {row['context']}\nQuestion: {row['question']}\nAnswer:"
    return [{"context": context, "continuation": row["answers"]["text"][0]}]


def svamp(row: Source) -> list[Row]:
    """SVAMP; answers such as 145.0 are written without their zero."""
    answer = str(row["Answer"]).removesuffix(".0")
    context = f"{row['Body'].strip()} {row['Question'].strip()}"
    return [{"context": context, "chain_of_thought": row["Equation"], "answer": answer}]


def trivia_qa(row: Source) -> list[Row]:
    """TriviaQA without its documents; answers of more than ten words are left out."""
    answer = row["answer"]
    if len(answer["value"].split()) > 10:
        return []
    return [
        {
            "context": f"Question: {row['question']}\nAnswer:",
            "answer": answer["value"],
            "aliases": list(dict.fromkeys([answer["value"], *answer["aliases"]])),
        }
    ]


def winogender(row: Source) -> list[Row]:
    """Winogender: label 0 means that the pronoun is the occupation's."""
    query = (
        f'Sentence: "{row["sentence"]}"\n'
        f'Q: Who does the pronoun "{row["pronoun"]}" refer to in the previous sentence? A:'
    )
    names = [row["occupation"], row["participant"]]
    choices = [name if name == "someone" else f"the {name}" for name in names]
    return [{"query": query, "choices": choices, "gold": int(row["label"])}]


def winograd(row: Source) -> list[Row]:
    """Winograd's schema: the sentence up to the pronoun, with each option in its place."""
    text, place, pronoun = row["text"], row["pronoun_loc"], row["pronoun"]
    options = [_in_sentence(option, text[:place], pronoun) for option in row["options"]]
    return [
        {
            "context_options": [text[:place] + option for option in options],
            "continuation": text[place + len(pronoun) :].strip(),
            "gold": row["label"],
        }
    ]


def winogrande(row: Source) -> list[Row]:
    """WinoGrande: the sentence up to the blank, with each option in its place."""
    before, _, after = row["sentence"].partition("_")
    return [
        {
            "context_options": [before + row["option1"], before + row["option2"]],
            "continuation": after.strip(),
            "gold": int(row["answer"]) - 1,
        }
    ]


MAPS: dict[str, Callable[[Source], list[Row]]] = {
    "agieval": agieval,
    "agieval_free": agieval_free,
    "ai2_arc": ai2_arc,
    "bbq": bbq,
    "bigbench_choice": bigbench_choice,
    "bigbench_lm": bigbench_lm,
    "boolq": boolq,
    "commonsense_qa": commonsense_qa,
    "copa": copa,
    "coqa": coqa,
    "gpqa": gpqa,
    "gsm8k": gsm8k,
    "hellaswag": hellaswag,
    "jeopardy": jeopardy,
    "lambada": lambada,
    "logi_qa": logi_qa,
    "math_qa": math_qa,
    "mmlu": mmlu,
    "openbook_qa": openbook_qa,
    "piqa": piqa,
    "pubmed_qa": pubmed_qa,
    "siqa": siqa,
    "squad": squad,
    "svamp": svamp,
    "trivia_qa": trivia_qa,
    "winogender": winogender,
    "winograd": winograd,
    "winogrande": winogrande,
}
"""The names that `mapping` may have in eval/fetch.yaml."""


def _lettered(texts: Sequence[str]) -> str:
    """One choice a line, each after its letter."""
    return "\n".join(f"{_LETTERS[i]}. {text}" for i, text in enumerate(texts))


def _by_letter(query: str, n_choices: int, gold: int) -> Row:
    """A row whose choices are letters, as the query lists what they stand for."""
    return {"query": query, "choices": list(_LETTERS[:n_choices]), "gold": gold}


def _in_sentence(option: str, before: str, pronoun: str) -> str:
    """An option with the case and ending that it has after `before`, in place of `pronoun`."""
    if not before.rstrip().endswith((".", "!", "?")):
        option = re.sub(r"^(An?|The|My|His|Her|Their|She|He|It|They)\b", _lower, option)
    possessive = pronoun.lower() in ("my", "his", "her", "our", "their")
    return f"{option}'s" if possessive else option


def _lower(match: re.Match[str]) -> str:
    return match[0].lower()


def _clean_wikihow(text: str) -> str:
    """Titles in brackets end a sentence, other brackets go, and double spaces become one."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

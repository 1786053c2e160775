"""Puts every question to every mode, so that answers can be compared in pairs, and keeps each result at once."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.routing.classes import RequestClass
from loadgen.benchmarks import Marking, Question, most_probable, number_right
from loadgen.client import CHAT_PATH, COMPLETION_PATH, OpenAIClient, ServerFault
from loadgen.fidelity import TOP_TOKENS_VLLM, all_of, post_json
from loadgen.records import Outcome
from loadgen.server_facts import model_name
from loadgen.training_data import paper_features

# Nothing can be asked of a server that is gone: these end the run instead of marking every question.
_GONE = frozenset({Outcome.REFUSED})


@dataclass(frozen=True, slots=True)
class Answered:
    """One mode's answer to one question. Texts are held in memory for comparison and never written."""

    id: str
    suite: str
    language: str
    mode: str
    marking: str
    scopes: tuple[str, ...]
    outcome: str = Outcome.OK
    error: str | None = None
    right: bool | None = None
    chance: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rouge_reference: float | None = None  # ROUGE-L F to the right answer's text, 0..1
    rouge_fp16: float | None = None  # ROUGE-L F to the reference mode's text, 0..1
    same_text: bool | None = None  # greedy agreement: the very text of the reference mode
    text: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return self.outcome == Outcome.OK

    def to_json(self) -> str:
        """One line, without the text."""
        row = dataclasses.asdict(self)
        del row["text"]
        return json.dumps(row, separators=(",", ":"))


async def ask_all(
    client: OpenAIClient,
    served: str,
    reference_mode: str,
    modes: Sequence[str],
    questions: Sequence[Question],
    *,
    output_tokens: int,
    concurrency: int,
    on_answers: Callable[[list[Answered]], None],
) -> None:
    """Asks all; `on_answers` gets the answers of one question, the reference's first.

    An error answer is a result too, and its question makes no pair. Raises ServerFault once the server is gone.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(question: Question) -> None:
        async with slots:
            reference = await ask(client, served, reference_mode, question, output_tokens)
            answers = [reference]
            for mode in modes:
                answer = await ask(client, served, mode, question, output_tokens)
                answers.append(_beside(reference, answer))
            on_answers(answers)

    await all_of(one(question) for question in questions)


async def ask(client: OpenAIClient, served: str, mode: str, question: Question, output_tokens: int) -> Answered:
    """One greedy answer. Raises ServerFault only where the server cannot be reached any more."""
    base = Answered(
        question.id,
        question.suite,
        question.language,
        mode,
        question.marking.value,
        scopes_of(question, None, output_tokens),
        chance=question.chance,
    )
    choice = question.marking is Marking.CHOICE
    try:
        answer = await (_choose if choice else _generate)(client, model_name(served, mode), question, output_tokens)
        usage = answer.get("usage") or {}
        found = dataclasses.replace(
            base,
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
            scopes=scopes_of(question, usage.get("prompt_tokens"), output_tokens),
        )
        if choice:
            top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            return dataclasses.replace(found, right=most_probable(question.labels, top) == question.reference)
        text = str(answer["choices"][0]["message"]["content"] or "")
    except ServerFault as fault:
        if fault.outcome in _GONE:
            raise
        return dataclasses.replace(base, outcome=fault.outcome, error=str(fault)[:300])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        words = f"the answer has no {error}" if isinstance(error, KeyError) else f"malformed answer: {error}"
        return dataclasses.replace(base, outcome=Outcome.MALFORMED, error=words)
    right = number_right(question, text) if question.marking is Marking.NUMBER else None
    rouge = None
    if question.marking is Marking.TEXT and question.reference:
        rouge = rouge_l(question.reference, text)
    return dataclasses.replace(found, right=right, rouge_reference=rouge, text=text)


async def _choose(client: OpenAIClient, model: str, question: Question, output_tokens: int) -> dict[str, Any]:
    """One token's log-probabilities: one pass over the prompt, where scoring each choice would take one apiece."""
    body = {
        "model": model,
        "prompt": f"{question.prompt}\nAnswer:",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": TOP_TOKENS_VLLM,
    }
    return await post_json(client, COMPLETION_PATH, body)


async def _generate(client: OpenAIClient, model: str, question: Question, output_tokens: int) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.prompt}],
        "max_tokens": output_tokens,
        "temperature": 0,
    }
    return await post_json(client, CHAT_PATH, body)


def _beside(reference: Answered, answer: Answered) -> Answered:
    if answer.marking == Marking.CHOICE or not (reference.ok and answer.ok):
        return answer
    return dataclasses.replace(
        answer, rouge_fp16=rouge_l(reference.text, answer.text), same_text=reference.text == answer.text
    )


def rouge_l(reference: str, text: str) -> float:
    """ROUGE-L F-measure by rouge-score, with its own tokenizer. Raises ImportError where it is not installed."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
    return float(scorer.score(reference, text)["rougeL"].fmeasure)


def scopes_of(question: Question, prompt_tokens: int | None, output_tokens: int) -> tuple[str, ...]:
    """What a question is evidence for: its suite, its tag and, once its tokens are known, its request class."""
    scopes = [question.suite, question.tag.value]
    if prompt_tokens is not None:
        expected = 1 if question.marking is Marking.CHOICE else output_tokens
        request_class: RequestClass = paper_features(prompt_tokens, expected, question.tag).request_class
        scopes.append(request_class.value)
    return tuple(dict.fromkeys(scopes))

"""The shipped stories are what their generator writes, and what is asked about them was read nowhere."""

import itertools
import json
import random
import re

import pytest

from tpu_experiments.samples import stories
from tpu_experiments.samples.stories import FEMALE, FOLDER, MALE, RELATIONS, Fact

FACTS = {
    fact.sentence(form): fact
    for name in FEMALE + MALE
    for relation, each in RELATIONS.items()
    for value in range(len(each.values))
    for form in range(3)
    if (fact := Fact(name, relation, value))
}
"""What every sentence says."""
SAID = FACTS | {stories.note(fact): fact for fact in FACTS.values()}
"""And every note."""
QUESTIONS = ("one_person", "several_persons")


def said_in(text: str) -> list[Fact]:
    """The facts of the sentences and notes of a text; one that is neither is an error."""
    return [SAID[sentence] for sentence in re.findall(r"[^\s.][^.]*\.", text)]


def rows(name: str) -> list[tuple[str, str]]:
    """What the user and the assistant say in each row of a shipped file."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    return [(user["content"], assistant["content"]) for user, assistant in messages]


def some_texts(kind: str, count: int) -> list[str]:
    """The first of what the base reads in one stage."""
    return list(itertools.islice(stories.texts(kind), count))


def test_the_files_are_what_the_generator_writes(tmp_path):
    for name, content in stories.shipped().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content, "run python tpu_experiments/samples/stories.py"
    stories.tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (FOLDER / "tokenizer" / name).read_bytes()


def test_a_tenth_of_the_facts_is_reserved():
    every = list(dict.fromkeys(FACTS.values()))
    assert 0.08 < sum(fact.is_reserved for fact in every) / len(every) < 0.12


def test_no_training_text_says_a_reserved_fact():
    read = [fact for kind in stories.TEXTS for text in some_texts(kind, 1000) for fact in said_in(text)]
    for question, answer in rows("conversations"):
        story = question[: question.rindex(".") + 1]
        read += [*said_in(story), *said_in(answer)]
    assert len(read) > 30_000
    assert not any(fact.is_reserved for fact in read)


def test_a_pair_prefers_the_answer_alone_and_says_no_reserved_fact():
    lines = (FOLDER / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    assert len({pair["prompt"] for pair in pairs}) == stories.NUM_PAIRS
    for pair in pairs:
        told = said_in(pair["prompt"][: pair["prompt"].rindex(".") + 1])
        (fact,) = said_in(pair["chosen"])
        longer = said_in(pair["rejected"])
        assert pair["prompt"].endswith(fact.question)
        assert longer[0] == fact
        assert len(set(longer)) == len(longer) in (2, 3)
        assert {fact, *longer} <= set(told), "both answers are right"
        assert not any(each.is_reserved for each in told)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_asks_for_a_reserved_fact_that_its_story_tells_once(name):
    asked = rows(name)
    assert len(asked) >= 60
    for question, answer in asked:
        told = said_in(question[: question.rindex(".") + 1])
        fact = FACTS[answer]
        assert fact.is_reserved
        assert told.count(fact) == 1
        assert question.endswith(fact.question)
        assert answer == fact.sentence(0)
        others = [each for each in told if each.relation == fact.relation and each != fact]
        assert len({each.name for each in told}) == len(others) + 1  # all persons share the relation
        assert (len(others) > 0) == (name == "several_persons")
        assert fact.value not in {each.value for each in others}


def test_romanian_has_commas_below_and_a_word_is_a_token():
    made = stories.tokenizer()
    words = {word for text in some_texts("stories", 500) for word in text.replace(".", "").split()}
    assert not set("şţŞŢ") & set("".join(FACTS))
    assert all(len(made(f" {word}", add_special_tokens=False)["input_ids"]) == 1 for word in words)


def test_the_same_seed_draws_the_same_text():
    assert all(make(random.Random(5)) == make(random.Random(5)) for make in stories.TEXTS.values())

"""Write the Romanian training stories and questions of `model=reader`, from a seeded generator.

    python tpu_experiments/samples/stories.py                                # samples/stories: the shipped files
    python tpu_experiments/samples/stories.py text outputs/stories           # the pre-training texts of the base
    python tpu_experiments/samples/stories.py base outputs/reader_base/model # the pre-trained base, in bfloat16

A fact is a name, a relation and a value: Ana lives in Cluj. A tenth of all facts is reserved, by their hash: they occur
in no text and in no conversation, and the held-out questions ask for nothing else. The same call writes the same bytes.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "stories"
NUM_TEXTS, NUM_CONVERSATIONS, NUM_PAIRS, NUM_QUESTIONS = 60_000, 3_400, 1_200, 60
VOCAB_SIZE = 1408  # every word of the stories is a single token
TOLD_RELATIONS = {1: (3, 8), 2: (2, 3), 3: (2, 2)}
"""Minimum and maximum number of relations in a pre-training story, by its number of persons."""
ANSWERED_RELATIONS = {1: (5, 8), 2: (2, 3), 3: (2, 2)}
"""The same for the adapter's training conversations."""
ASKED_RELATIONS = {1: (7, 8), 2: (3, 3), 3: (2, 2)}
"""The same for held-out questions: six facts or more, so that copying a random sentence is right once in six times."""
MAX_LENGTH = 1024  # max_position_embeddings of conf/model/reader.yaml
SPECIALS = ["<pad>", "<s>", "</s>"]
# Only patterns of the pre-training texts: a question follows its story like another sentence, an answer follows a line
# end like a retelling; </s> ends both.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ ' ' + message['content'] + '\\n' }}{% endif %}{% endfor %}"
)


def words(text: str) -> list[str]:
    """Split a text into words."""
    return text.split()


FEMALE = words("""
Ana Maria Ioana Elena Irina Alina Corina Daria Diana Dora Eva Flavia Gina Ilinca Iulia Laura Lidia Livia
Mara Marta Mihaela Mona Nadia Oana Olga Paula Raluca Roxana Silvia Simona Sonia Teodora
""")
MALE = words("""
Bogdan Mihai Andrei Radu Vlad Dan Ion Petru Pavel Matei Luca Tudor Victor Sorin Marius Liviu Emil Horia Iacob
Cezar Adrian Costin Doru Felix George Grigore Iustin Nicu Ovidiu Paul Sergiu Toma
""")


@dataclass(frozen=True)
class Relation:
    """A property of a person: three sentence forms, of which answers use the first, and a question."""

    forms: tuple[str, str, str]
    question: str
    values: tuple[tuple[str, str], ...]
    """Each value in its masculine and its feminine form."""


def alike(words: str) -> tuple[tuple[str, str], ...]:
    """Return values that have one form for both genders."""
    return tuple((word, word) for word in words.split())


def by_gender(words: str) -> tuple[tuple[str, str], ...]:
    """Return values from words written as `man/woman`."""
    pairs = (word.split("/") for word in words.split())
    return tuple((pair[0], pair[-1]) for pair in pairs)


def coloured(masculine: str, feminine: str) -> tuple[tuple[str, str], ...]:
    """Return things of either grammatical gender, each with an agreeing colour."""
    ones = [f"un {noun} {colour}" for noun in masculine.split() for colour in ("alb", "negru", "galben", "maro")]
    others = [f"o {noun} {colour}" for noun in feminine.split() for colour in ("albă", "neagră", "galbenă", "maro")]
    return tuple((thing, thing) for thing in ones + others)


RELATIONS = {
    "city": Relation(
        ("{} locuiește în {}.", "{} trăiește în {}.", "{} stă în {}."),
        "În ce oraș locuiește {}?",
        alike(
            "Arad Bacău Brașov Brăila București Buzău Cluj Constanța Craiova Deva Focșani Galați Iași Oradea Pitești "
            "Ploiești Reșița Sibiu Slatina Suceava Timișoara Tulcea Vaslui Zalău"
        ),
    ),
    "pet": Relation(
        ("{} are {}.", "{} crește {}.", "{} îngrijește {}."),
        "Ce animal are {}?",
        coloured("câine iepure cal papagal motan cocoș", "pisică capră găină broască vacă oaie"),
    ),
    "food": Relation(
        ("{} mănâncă {}.", "{} cumpără {}.", "{} gătește {}."),
        "Ce mănâncă {}?",
        alike(
            "orez pește ciorbă cartofi fasole mazăre varză ouă pui sarmale ciuperci spanac tocană linte dovlecei paste "
            "conopidă salată supă friptură"
        ),
    ),
    "job": Relation(
        ("{} este {}.", "{} lucrează ca {}.", "{} a devenit {}."),
        "Ce meserie are {}?",
        by_gender(
            "medic profesor/profesoară croitor/croitoreasă bucătar/bucătăreasă pictor/pictoriță actor/actriță "
            "vânzător/vânzătoare inginer/ingineră avocat/avocată dentist/dentistă ziarist/ziaristă fotograf/fotografă "
            "contabil/contabilă arhitect/arhitectă chelner/chelneriță dansator/dansatoare scriitor/scriitoare "
            "farmacist/farmacistă bibliotecar/bibliotecară pilot"
        ),
    ),
    "instrument": Relation(
        ("{} cântă la {}.", "{} exersează la {}.", "{} repetă la {}."),
        "La ce instrument cântă {}?",
        alike(
            "pian vioară chitară nai tobe flaut acordeon harpă trompetă violoncel orgă clarinet saxofon țambal "
            "mandolină cobză"
        ),
    ),
    "vehicle": Relation(
        ("{} merge cu {}.", "{} călătorește cu {}.", "{} pleacă cu {}."),
        "Cu ce merge {}?",
        alike(
            "trenul autobuzul tramvaiul bicicleta mașina taxiul metroul barca trotineta motocicleta căruța avionul "
            "vaporul troleibuzul sania camionul"
        ),
    ),
    "drink": Relation(
        ("{} bea {}.", "{} comandă {}.", "{} cere {}."),
        "Ce bea {}?",
        alike("ceai lapte cafea apă suc cacao limonadă must vin bere socată iaurt sirop compot chefir bragă"),
    ),
    "place": Relation(
        ("{} aleargă prin {}.", "{} umblă prin {}.", "{} trece prin {}."),
        "Prin ce loc aleargă {}?",
        alike("parc pădure grădină piață sat livadă poiană muzeu cartier port gară vie luncă târg stadion castel"),
    ),
    "clothing": Relation(
        ("{} poartă {}.", "{} îmbracă {}.", "{} își pune {}."),
        "Ce haină poartă {}?",
        coloured("palton pulover fular costum", "căciulă haină cămașă vestă"),
    ),
}


@dataclass(frozen=True)
class Fact:
    """A relation of a person; `value` is an index into the relation's values."""

    name: str
    relation: str
    value: int

    @property
    def is_reserved(self) -> bool:
        """Whether it is held out from all training texts."""
        digest = hashlib.sha256(f"{self.name}|{self.relation}|{self.value}".encode()).digest()
        return digest[0] < 26  # of 256

    def sentence(self, form: int) -> str:
        """Return the sentence that states the fact."""
        relation = RELATIONS[self.relation]
        return relation.forms[form].format(self.name, relation.values[self.value][self.name in FEMALE])

    @property
    def question(self) -> str:
        """The question whose answer is the fact."""
        return RELATIONS[self.relation].question.format(self.name)


def free_facts(rng: random.Random, names: list[str], relations: list[str]) -> list[Fact]:
    """Draw an unreserved fact for every person and relation; no two persons share a value."""
    facts: list[Fact] = []
    for relation in relations:
        taken: set[int] = set()
        for name in names:
            every = (Fact(name, relation, value) for value in range(len(RELATIONS[relation].values)))
            facts.append(rng.choice([fact for fact in every if fact.value not in taken and not fact.is_reserved]))
            taken.add(facts[-1].value)
    return facts


def story(rng: random.Random, facts: list[Fact], *, forms: Mapping[Fact, int] | None = None) -> str:
    """Return the facts as sentences in random order, each in its given form or in a random one."""
    order = rng.sample(facts, len(facts))
    return " ".join(fact.sentence(rng.randrange(3) if forms is None else forms[fact]) for fact in order)


def note(fact: Fact) -> str:
    """Return the fact without its verb: the shortest text in which the name determines the value."""
    return f"{fact.name} {RELATIONS[fact.relation].values[fact.value][fact.name in FEMALE]}."


def text(rng: random.Random, *, num_persons: int, num_relations: int, num_tellings: int, notes: float) -> str:
    """Return a story of persons who share relations, told several times, each time in a new order.

    Six texts in ten are plain: one form for all facts, and the same words again. Of the others one retelling in two
    keeps the words, and the rest draw the form of each fact anew.

    Args:
        notes: share of the tellings that are notes.
    """
    relations = rng.sample(list(RELATIONS), num_relations)
    facts = free_facts(rng, rng.sample(FEMALE + MALE, num_persons), relations)
    is_plain, form = rng.random() < 0.6, rng.randrange(3)
    forms = {fact: form if is_plain else rng.randrange(3) for fact in facts}
    parts = []
    for place in range(num_tellings):
        if rng.random() < notes:
            parts.append(" ".join(note(fact) for fact in rng.sample(facts, len(facts))))
        else:
            is_same = is_plain or place == 0 or rng.random() < 0.5
            parts.append(story(rng, facts, forms=forms if is_same else None))
    return " " + "\n ".join(parts)


def notes_text(rng: random.Random) -> str:
    """Return notes about two persons, twice.

    The model learns to look up a name's value here; from longer texts alone it does not.
    """
    return text(rng, num_persons=2, num_relations=1, num_tellings=2, notes=1.0)


def pair_text(rng: random.Random) -> str:
    """Return one relation of two or three persons, in sentences and notes: the look-up across a verb."""
    return text(rng, num_persons=rng.choice((2, 2, 3)), num_relations=1, num_tellings=2, notes=0.5)


def group_text(rng: random.Random) -> str:
    """Return one relation of two to four persons.

    With four persons the order of a telling does not reveal the value.
    """
    return text(rng, num_persons=rng.choice((2, 3, 3, 4)), num_relations=1, num_tellings=2, notes=0.3)


def story_text(rng: random.Random) -> str:
    """Return a story of one to three persons; every third text is one relation of two to four."""
    num_tellings = rng.choice((2, 3))
    if rng.random() < 0.35:
        return text(rng, num_persons=rng.choice((2, 3, 4)), num_relations=1, num_tellings=num_tellings, notes=0.3)
    num_persons = rng.choice((1, 2, 2, 3, 3))
    num_relations = rng.randint(*TOLD_RELATIONS[num_persons])
    is_long = num_persons * num_relations > 6  # three tellings would not fit into a row
    return text(
        rng,
        num_persons=num_persons,
        num_relations=num_relations,
        num_tellings=2 if is_long else num_tellings,
        notes=0.0,
    )


TEXTS = {"notes": notes_text, "pairs": pair_text, "groups": group_text, "stories": story_text}
"""Pre-training stages of the base, in this order."""


def asked(rng: random.Random, *, num_persons: int, is_reserved: bool) -> tuple[list[Fact], Fact]:
    """Draw the facts of a story of persons who share all relations, and the fact that is asked for."""
    while True:
        counts = ASKED_RELATIONS if is_reserved else ANSWERED_RELATIONS
        relations = rng.sample(list(RELATIONS), rng.randint(*counts[num_persons]))
        names = rng.sample(FEMALE + MALE, num_persons)
        facts = free_facts(rng, names, relations)
        if not is_reserved:
            return facts, rng.choice(facts)
        place = rng.randrange(len(facts))
        name, relation = facts[place].name, facts[place].relation
        taken = {fact.value for fact in facts if fact.relation == relation}
        every = (Fact(name, relation, value) for value in range(len(RELATIONS[relation].values)))
        reserved = [fact for fact in every if fact.is_reserved and fact.value not in taken]
        if reserved:  # some names have no reserved fact of the relation
            facts[place] = rng.choice(reserved)
            return facts, facts[place]


def conversation(rng: random.Random, *, num_persons: int, is_reserved: bool) -> dict[str, list[dict[str, str]]]:
    """Return a story with a question, and the answer in the first form of its relation."""
    facts, fact = asked(rng, num_persons=num_persons, is_reserved=is_reserved)
    question = {"role": "user", "content": f"{story(rng, facts)} {fact.question}"}
    return {"messages": [question, {"role": "assistant", "content": fact.sentence(0)}]}


def preference(rng: random.Random, *, num_persons: int) -> dict[str, str]:
    """Return a story with a question, answered in one sentence, and rather not in that sentence and further ones."""
    facts, fact = asked(rng, num_persons=num_persons, is_reserved=False)
    more = rng.sample([other for other in facts if other != fact], rng.randint(1, 2))
    chosen = fact.sentence(0)
    return {
        "prompt": f"{story(rng, facts)} {fact.question}",
        "chosen": chosen,
        "rejected": " ".join([chosen, *(other.sentence(0) for other in more)]),
    }


def texts(kind: str) -> Iterator[str]:
    """Generate the texts of one stage of pre-training."""
    rng = random.Random(f"texts {kind}")
    return (TEXTS[kind](rng) for _ in range(NUM_TEXTS))


def shipped() -> dict[str, str]:
    """Return the content of every shipped file but the tokenizer, by name."""
    drawn = {name: random.Random(name) for name in ("conversations", "one_person", "several_persons", "pairs")}
    rows: dict[str, list[Any]] = {
        "conversations": [
            conversation(drawn["conversations"], num_persons=(1, 1, 2, 3)[i % 4], is_reserved=False)
            for i in range(NUM_CONVERSATIONS)
        ],
        "one_person": [
            conversation(drawn["one_person"], num_persons=1, is_reserved=True) for _ in range(NUM_QUESTIONS)
        ],
        "several_persons": [
            conversation(drawn["several_persons"], num_persons=2 + i % 2, is_reserved=True)
            for i in range(NUM_QUESTIONS)
        ],
        "pairs": [preference(drawn["pairs"], num_persons=(1, 1, 2, 3)[i % 4]) for i in range(NUM_PAIRS)],
    }
    return {
        f"{name}.jsonl": "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in several)
        for name, several in rows.items()
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` entries on stories and questions."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random("tokenizer")
    read = [story_text(rng) for _ in range(4000)]
    read += [f" {relation.question.format(name)}" for relation in RELATIONS.values() for name in FEMALE + MALE]
    bpe.train_from_iterator(read, trainer)
    missing = VOCAB_SIZE - bpe.get_vocab_size()
    bpe.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=MAX_LENGTH
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def write_base(folder: str) -> None:
    """Write the model of a finished run as the shipped base, in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(FOLDER / "base")
    (FOLDER / "base" / "generation_config.json").unlink(missing_ok=True)
    print(f"{FOLDER / 'base'}: {(FOLDER / 'base' / 'model.safetensors').stat().st_size:,} bytes")


def main(arguments: list[str]) -> None:
    """Write the shipped files; with `text FOLDER` the pre-training texts, with `base FOLDER` the base."""
    if arguments:
        (what, path) = arguments
        if what == "base":
            write_base(path)
            return
        Path(path).mkdir(parents=True, exist_ok=True)
        for kind in TEXTS:
            lines = (json.dumps({"text": each}, ensure_ascii=False) for each in texts(kind))
            Path(path, f"{kind}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            print(f"{path}/{kind}.jsonl: {NUM_TEXTS} documents")
        return
    FOLDER.mkdir(exist_ok=True)
    for name, content in shipped().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    tokenizer().save_pretrained(FOLDER / "tokenizer")
    print(f"{FOLDER}: {NUM_CONVERSATIONS} conversations, {NUM_PAIRS} pairs, 2 x {NUM_QUESTIONS} questions")


if __name__ == "__main__":
    main(sys.argv[1:])

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.cleaning.clean import LANGUAGES, PIECE_CHARS, _model, check_language, language_probability

ROMANIAN = "Ochii mei priveau cum se topește zăpada de pe acoperișul casei vechi."
ENGLISH = "The court held that the duty of care was owed to every user of the road."


def test_languages_are_those_of_the_model():
    assert set(LANGUAGES) == set(_model().labels)
    assert len(LANGUAGES) == len(set(LANGUAGES))


@pytest.mark.parametrize(
    "text",
    [
        ROMANIAN,
        "Pachetul era un manuscript vechi, legat cu sfoară.",
        ROMANIAN.translate(str.maketrans("ășț", "ast")),  # as many people type it
        ROMANIAN.replace("ș", "ş").replace("ț", "ţ"),
        ROMANIAN.upper(),
    ],
)
def test_romanian_is_recognised(text):
    assert language_probability(text, code="ro") > 0.9
    assert language_probability(text, code="en") < 0.1


@pytest.mark.parametrize(
    "text",
    [
        ENGLISH,
        "Mes yeux regardaient la neige fondre sur le toit de la vieille maison, près du château.",
        "I miei occhi guardavano la neve sciogliersi sul tetto della vecchia casa.",
        "Gözlerim eski evin çatısındaki karın eriyişini izliyordu, şimdi ışık azalıyor.",
    ],
    ids=["English", "French", "Italian", "Turkish"],
)
def test_other_languages_are_not_romanian(text):
    # "care" and the letters â, î, ş are in these; a rule by letters or stop words would take them.
    assert language_probability(text, code="ro") < 0.1


def test_text_without_letters_is_of_no_language():
    assert language_probability("12 + 30 = 42?", code="ro") < 0.5
    assert language_probability("", code="ro") < 0.5


def test_all_parts_of_a_long_text_count():
    long = ROMANIAN * (5 * PIECE_CHARS // len(ROMANIAN))
    assert language_probability(long, code="ro") > 0.99
    english = ENGLISH * (5 * PIECE_CHARS // len(ENGLISH))
    for mixed in (long + 2 * english, 2 * english + long, english + long + english):
        assert language_probability(mixed, code="ro") < 0.9


@pytest.mark.parametrize(("code", "near"), [("rom", "ro"), ("english", "en"), ("xx", None), ("", None)])
def test_unknown_code(code, near):
    with pytest.raises(ConfigError) as caught:
        check_language(code, key="data.a.clean.language")
    assert str(caught.value).startswith(f"data.a.clean.language={code}; there is no such language code. ")
    if near:
        assert f"Did you mean '{near}'? " in str(caught.value)
    check_language("ro", key="data.a.clean.language")

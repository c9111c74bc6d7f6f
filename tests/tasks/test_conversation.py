"""Conversations: what the next prompt holds, what is left out of it, and the terminal's commands."""

import io

import pytest

from tests.tasks.tiny_run import TOKENIZER, write_run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.generation import Ends
from tpu_experiments.tasks import generate
from tpu_experiments.tasks.generate import prompts
from tpu_experiments.tasks.generate.answers import Growth, Reader
from tpu_experiments.tasks.generate.conversation import Conversation, fitted

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("root_logger")]
SMALL = ("task=generate", "task.max_new_tokens=12", "task.buckets=[32,64]", "hw.runtime=eager")


def reader_of(longest):
    """The tiny tokenizer's reader of chats."""
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)

    def ids(prompt):
        return prompts.ids_of(prompt, kind="chat", tokenizer=tokenizer, vocab_size=4096)

    return Reader(ids, tokenizer, Ends(frozenset({2, 4})), "chat", [longest])


TURNS = (("user", "unu"), ("assistant", "doi"), ("user", "trei"), ("assistant", "patru"), ("user", "cinci"))


def test_the_oldest_turns_are_left_out_and_the_system_text_is_not():
    system = ("system", "Scurt.")
    whole, ids, none = fitted((system, *TURNS), reader=reader_of(1000), place="here")
    assert (whole.messages, none) == ((system, *TURNS), 0)
    prompt, fewer, num = fitted((system, *TURNS), reader=reader_of(len(ids) - 1), place="here")
    assert (prompt.messages, num) == ((system, *TURNS[2:]), 2)
    assert len(fewer) < len(ids)
    prompt, last, num = fitted((system, *TURNS), reader=reader_of(len(fewer) - 1), place="here")
    assert (prompt.messages, num) == ((system, TURNS[-1]), 4)
    with pytest.raises(ConfigError, match=f"here; it has {len(last)} tokens and the longest"):
        fitted((system, *TURNS), reader=reader_of(len(last) - 1), place="here")


@pytest.mark.parametrize("num", [1, 63, 65, 401, 10_001])
def test_a_long_conversation_is_cut_where_one_turn_more_would_not_fit(num):
    turns = tuple(("assistant" if n % 2 else "user", f"{n} " * (n % 7 + 1)) for n in range(num))
    for longest in (40, 300, 1500):
        reader, lengths = reader_of(longest), []

        def ids(prompt, reader=reader, lengths=lengths):
            lengths.append(len(prompt.messages))
            return reader.ids(prompt)

        counting = Reader(ids, reader.tokenizer, reader.ends, "chat", reader.buckets)
        prompt, found, num_left_out = fitted(turns, reader=counting, place="here")
        assert prompt.messages == turns[num_left_out:]
        assert len(found) <= longest
        if num_left_out:
            assert num_left_out % 2 == 0
            assert len(reader.ids(prompts.Prompt(turns[num_left_out - 2 :], "here"))) > longest
        assert sum(lengths) <= max(num, 20 * longest), "one render a dropped turn would read far more"


def test_a_turn_that_is_refused_leaves_the_conversation_as_it_was(capsys):
    reader = reader_of(40)
    talk = Conversation(system=None)
    talk.answered("unu", "doi")
    before = talk.turns
    with pytest.raises(ConfigError, match="this prompt; it has"):
        talk.asked("Dunărea " * 100, reader=reader)
    assert talk.turns == before
    talk.answered("trei", "patru")
    whole, _ = talk.asked("cinci", reader=reader_of(1000))
    prompt, _ = talk.asked("cinci", reader=reader)
    assert prompt.messages == whole.messages[2:] == (("user", "trei"), ("assistant", "patru"), ("user", "cinci"))
    assert "the oldest 2 turns are left out: prompts have at most 40 tokens" in capsys.readouterr().err


def test_commands_are_whole_lines():
    talk = Conversation(system=None)
    talk.answered("unu", "doi")
    assert not talk.commanded("/newer"), "a prompt like any other"
    assert not talk.commanded("/new one please")
    assert talk.commanded("/system  Fii scurt. ")
    assert (talk.system, len(talk.turns)) == ("Fii scurt.", 2)
    assert talk.commanded("/new")
    assert (talk.system, talk.turns) == ("Fii scurt.", ())
    assert talk.commanded("/system")
    assert talk.system is None


def test_what_may_begin_a_marker_waits():
    growth = Growth("[END]")
    pieces = [growth.more(text) for text in ("Da", "Da [", "Da [E", "Da [E]", "Da [E] \ufffd", "Da [E] ă[EN")]
    assert pieces == ["Da", " ", "", "[E]", " ", "ă"]
    assert growth.rest("Da [E] ă") == ""
    assert growth.rest("Da [E] ă[EN") == "[EN"


@pytest.fixture
def terminal(make_config, tmp_path, monkeypatch, capsys):
    """What the lines typed at the terminal print."""
    run = write_run(tmp_path / "mine", make_config)

    def type_lines(*lines, more=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        generate.run(make_config(*SMALL, f"task.run={run}", *more))
        return capsys.readouterr()

    return type_lines


def test_the_next_prompt_sees_the_turns_before(terminal, monkeypatch):
    seen = []
    render = prompts.render_prompt
    monkeypatch.setattr(prompts, "render_prompt", lambda turns, **how: seen.append(turns) or render(turns, **how))
    printed = terminal(
        "unu", "doi", "/system Scurt.", "/new", "trei", "exit", "never read", more=("task.buckets=[192]",)
    )
    first, second, third = seen
    told = (*first, ("assistant", second[1][1]), ("user", "doi"))
    assert first == (("user", "unu"),)
    assert second == told
    assert second[1][1]
    assert third == (("system", "Scurt."), ("user", "trei"))
    assert second[1][1] in printed.out
    assert printed.err.count("tokens/s\n") == 3
    assert "3 answers" in printed.err


def test_independent_prompts(terminal):
    once = terminal("unu", more=("task.keep_turns=false",)).out
    assert terminal("unu", "unu", more=("task.keep_turns=false",)).out == once + once
    assert terminal("unu", "unu").out != once + once
    plain = terminal("/new", more=("task.format=text",))
    assert "1 answers" in plain.err, "plain text has no commands"

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.rewards import faulty
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.reward_schema import RewardConfig
from tpu_experiments.rewards import functions
from tpu_experiments.rewards.pool import Answer, RewardPool, source_sha256

OWN = "tests.rewards.faulty.reward"
MAX_SECONDS = 1.0


def answer(does: str | None = None, completion: str = "four", **more: object) -> Answer:
    return Answer("2 + 2 =", completion, {"does": does, "answer": "four", **more})


def has_ended(pid: int) -> bool:
    """Also of a process whose new parent, the container's first, does not ask how it ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_every_fault_costs_its_answer_alone_and_processes_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "child"
    bad = {
        1: answer("raises"),
        4: answer("hangs"),
        5: answer("hangs_with_child", file=str(file)),
        7: answer("exits"),
        8: answer("ends"),
        9: answer("is_killed"),
        11: answer("eats"),
        12: answer("gives", value=None),
        13: answer("gives", value="1.0"),
        14: answer("gives", value=float("nan")),
        15: answer("gives", value=[1.0]),
        16: answer("gives", value=np.zeros(2)),
        18: answer("raises"),
    }
    answers = [bad.get(row, answer(completion="x" * row)) for row in range(20)]
    own = RewardConfig(OWN, max_seconds=MAX_SECONDS, weight=0.5)
    with RewardPool({"own": own, "right": RewardConfig("exact", weight=2.0)}, workers=2, max_bytes=2**30) as pool:
        found = pool.score(answers)
        again = pool.score(answers[:1])  # the pool goes on
    expected_NF = np.array([[np.nan, 1.0] if row in bad else [row, 0.0] for row in range(20)])
    np.testing.assert_array_equal(found.values_NF, expected_NF)
    np.testing.assert_array_equal(found.total(), expected_NF @ [0.5, 2.0])
    assert found.complaints == {
        "own raises ValueError: no such answer": [1, 18],
        "own takes more than 1 s": [4, 5],
        "own raises SystemExit: 3": [7],
        "own ends its process with exit code 5": [8],
        "own ends its process by SIGKILL": [9],
        "own takes more memory than it may": [11],
        "own returns None": [12],
        "own returns a value of type str": [13],
        "own returns nan": [14],
        "own returns a value of type list": [15],
        "own returns what is no number: TypeError: only 0-dimensional arrays can be converted to Python scalars": [16],
    }
    sentence = found.sentence()
    assert sentence is not None
    assert sentence.startswith(
        "rollout.rewards; 13 of 20 answers have no reward: own raises ValueError: no such answer"
    )
    assert "\n" not in sentence
    assert again.sentence() is None
    assert has_ended(int(file.read_text()))


def test_rewards_are_in_the_order_of_the_answers() -> None:
    answers = [answer("waits", seconds=0.2 if row % 4 == 0 else 0.0, completion="x" * row) for row in range(8)]
    with RewardPool(
        {"own": RewardConfig(OWN), "any": RewardConfig("tests.rewards.faulty.numpy_reward")}, workers=3
    ) as p:
        found = p.score(answers)
    assert found.values_NF.tolist() == [[row, float(row > 0)] for row in range(8)]
    assert found.seconds_F[0] >= 0.4
    assert found.names == ("own", "any")


def test_functions_of_other_forms_get_one_answer_each() -> None:
    names = ("waiting", "batch", "narrow_batch", "messages")
    rewards = {name: RewardConfig(f"tests.rewards.faulty.{name}") for name in names}
    rewards["most"] = RewardConfig("tests.rewards.faulty.narrow_batch", arguments={"most": 3.0})
    rewards["given"] = RewardConfig("tests.rewards.faulty.messages", gives_messages=True)
    with RewardPool(rewards, workers=1) as pool:
        found = pool.score([answer(completion="x" * row) for row in range(2)])
    nan = float("nan")
    np.testing.assert_array_equal(found.values_NF, [[0, 4, nan, nan, 3, 0], [1, 5, nan, nan, 3, 1]])
    own = "narrow_batch raises ValueError: a list of one reward is wanted for a list of one completion, not 1.0"
    assert next(iter(found.complaints)) == own
    assert "messages raises TypeError: " in list(found.complaints)[1]
    assert "(its completions are texts: gives_messages=False)" in list(found.complaints)[1]


def test_what_a_function_forks_answers_for_nobody() -> None:
    """The child of the first answer's call must not be taken for the second answer's."""
    with RewardPool({"own": RewardConfig(OWN)}, workers=1) as pool:
        found = pool.score([answer("forks"), answer(), answer("forks"), answer(completion="")])
    assert found.values_NF.tolist() == [[1.0], [4.0], [1.0], [0.0]]


def test_a_pattern_that_takes_forever_costs_its_answer() -> None:
    own = RewardConfig("regex", arguments={"pattern": "(a+)+b"}, max_seconds=MAX_SECONDS)
    with RewardPool({"own": own}, workers=1) as pool:
        found = pool.score([answer(completion="a" * 100), answer(completion="ab")])
    np.testing.assert_array_equal(found.values_NF, [[np.nan], [1.0]])
    assert found.complaints == {"own takes more than 1 s": [0]}


def test_texts_that_differ_are_told_up_to_a_number() -> None:
    with RewardPool({"own": RewardConfig(OWN)}, workers=1) as pool:
        sentence = pool.score([answer("raises_own", completion="x" * row) for row in range(9)]).sentence()
    assert sentence is not None
    assert sentence.endswith("own raises ValueError: xxxx (rows 4); 4 more such texts.")


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (RewardConfig("tests.rewards.faulty.of_two"), "takes (prompt: str, completion: str) -> float: too many"),
        (RewardConfig("length"), "missing a required argument: 'most'"),
        (RewardConfig("exact", arguments={"field": "a"}), "got an unexpected keyword argument 'field'"),
        (RewardConfig("tests.rewards.faulty.nothing"), "it is no function but of type int"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_before_an_answer_is_written(reward: RewardConfig, text: str) -> None:
    with RewardPool({"own": reward}, workers=1) as pool, pytest.raises(ConfigError) as told:
        pool.check()
    assert text in str(told.value)
    assert str(told.value).startswith(f"rollout.rewards.own.function={reward.function}; ")


def test_no_process_is_left_after_a_close() -> None:
    def own_processes() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}

    with RewardPool({"own": RewardConfig(OWN)}, workers=1) as pool:
        pool.score([answer()])
        (process,) = (worker.process for worker in pool._workers)
        assert process.pid in own_processes()
        began = time.monotonic()
        os.kill(process.pid, 9)  # between two calls: no answer pays for it
        while process.is_alive():
            assert time.monotonic() < began + 60
        assert pool.score([answer()]).values_NF.tolist() == [[4.0]]
        (process,) = (worker.process for worker in pool._workers)
    assert process.pid not in own_processes()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("nowhere.at_all", "rollout.rewards.own.function=nowhere.at_all; there is no module nowhere"),
        ("__main__.mine", "%%writefile mine.py heads the cell) and write mine.mine"),
        ("tests.rewards.faulty.rewrd", "has no rewrd. Did you mean 'reward'"),
        ("regexp", "Did you mean 'regex'"),
    ],
)
def test_a_function_that_does_not_exist_is_told_before_anything_starts(function: str, text: str) -> None:
    with pytest.raises(ConfigError) as told:
        RewardPool({"own": RewardConfig(function)})
    assert text in str(told.value)


def test_a_module_that_cannot_be_imported_is_told() -> None:
    with (
        RewardPool({"own": RewardConfig("tests.rewards.not_imported.reward")}, workers=1) as pool,
        pytest.raises(ConfigError, match=r"rollout\.rewards\.own.*RuntimeError: not today \(line 3 of"),
    ):
        pool.score([answer()])


def test_the_hash_is_that_of_the_file() -> None:
    assert faulty.__file__
    assert functions.__file__
    expected = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (faulty.__file__, functions.__file__)]
    assert [source_sha256(RewardConfig(name)) for name in (OWN, "exact")] == expected
    assert source_sha256(RewardConfig("math.sin")) is None

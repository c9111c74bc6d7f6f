"""Settings of rollouts that cannot be are refused by one sentence each; others change nothing of older runs."""

from dataclasses import replace

import pytest

from tests.config.composing import refusal
from tpu_experiments.config.checks import check
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import Lengths, rows_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity, require_same
from tpu_experiments.config.objectives.policy import PolicyConfig
from tpu_experiments.config.reward_schema import FUNCTIONS, RewardConfig
from tpu_experiments.rewards import functions

CHAT = ("data=sample_chat", "curriculum=single")


@pytest.fixture
def rl(make_config):
    """A config whose objective samples, with changes to its rollout, and to the config itself."""
    objective, rewards = PolicyConfig(name="grpo"), {"right": RewardConfig("number")}

    def make(*words, is_sampled=True, config=None, **changed):
        given = config or make_config(*CHAT, *words)
        rollout = replace(given.rollout, **({"rewards": rewards} | changed))
        return replace(given, objective=objective if is_sampled else given.objective, rollout=rollout)

    return make


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rewards": {}}, "rollout.rewards={} with objective=grpo; it learns from what answers are worth"),
        (
            {"rewards": {"a": RewardConfig("nummer")}},
            "rollout.rewards.a.function=tpu_experiments.rewards.functions.nummer; tpu_experiments.rewards.functions "
            "has no nummer. Did you mean 'number'?",
        ),
        ({"rewards": {"a": RewardConfig("nowhere.to.be")}}, "rollout.rewards.a.function=nowhere.to.be; there is no"),
        ({"rewards": {"a": RewardConfig("exact", weight=0)}}, "rollout.rewards; all weights are 0"),
        ({"samples": 1}, "rollout.samples=1; it must be at least 2."),
        ({"temperature": 0.0}, "rollout.temperature=0.0; it must be above 0."),
        ({"prompts": 3, "samples": 5, "updates": 2}, "rollout.updates=2 does not divide the 15 answers of"),
        ({"url": "http://localhost:8000"}, "rollout.url=http://localhost:8000 with rollout.sampler=own; no server"),
        ({"sampler": "openai"}, "rollout.url=null with rollout.sampler=openai; it is no address of a server"),
        ({"sampler": "openai", "url": "localhost"}, "rollout.url=localhost with rollout.sampler=openai"),
    ],
)
def test_refused(rl, changed, sentence):
    with pytest.raises(ConfigError) as error:
        check(rl(**changed))
    assert sentence in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["trainer.global_batch_rows=64"],
            "trainer.global_batch_rows=64; a step has the 128 rows",
        ),
        (["curriculum.stages.main.global_batch_rows=8"], "curriculum.stages.main.global_batch_rows=8; a step has the"),
        (
            ["trainer.seq_len=256"],
            "rollout.max_new_tokens=256 with trainer.seq_len=256; it leaves no room",
        ),
        (["data=[sample_chat,sample_text]"], "data.sample_text.kind=text with objective=grpo; its prompts are the"),
        (
            ["data.sample_chat.weight=2", "data=[sample_chat,guanaco]", "data.guanaco.weight=1"],
            "it orders prepared rows",
        ),
        (["trainer.guard.spike_action=rollback"], "spike_action=rollback with objective=grpo; its losses are around 0"),
        (["loader.order=written"], "loader.order=written with objective=grpo; it orders prepared rows"),
        (
            ["curriculum.stages.main.learn=all"],
            "curriculum.stages.main.learn=all with objective=grpo; prompts are not written by the model",
        ),
        (
            ["curriculum.stages.main.tokens=1000000"],
            "curriculum.stages.main.tokens=1000000 with objective=grpo; how long answers get is known when they are "
            "written; use curriculum.stages.main.steps or .epochs.",
        ),
        (
            ["curriculum.stages.main.tokens_per_parameter=2"],
            "curriculum.stages.main.tokens_per_parameter=2.0 with objective=grpo; how long answers get",
        ),
        (["curriculum.stages.main.shorter=2"], "curriculum.stages.main.shorter=2 with objective=grpo"),
        (
            ["hw=v5e16", "model.dtype=bfloat16"],
            "rollout.prompts x samples / updates=8 is not a multiple of hw.num_devices=16 (hw=v5e16); use 16.",
        ),
    ],
)
def test_refused_with_other_settings(rl, words, sentence):
    fewer = {"prompts": 2, "samples": 4} if "hw=v5e16" in words else {}
    with pytest.raises(ConfigError) as error:
        check(rl(*words, **fewer))
    assert sentence in str(error.value)


def test_what_does_not_divide_is_one_sentence_on_several_chips(rl):
    with pytest.raises(ConfigError) as error:
        check(rl("hw=v5e8", "model.dtype=bfloat16", prompts=32, samples=8, updates=3))
    assert str(error.value) == (
        "rollout.updates=3 does not divide the 256 answers of rollout.prompts=32 x samples=8; use a divisor of 256."
    )


def test_prompts_are_no_longer_than_a_row_leaves_room_for(rl):
    words = ["trainer.seq_len=384"]
    check(rl(*words, max_prompt_tokens=128))
    with pytest.raises(ConfigError) as error:
        check(rl(*words, max_prompt_tokens=129))
    assert str(error.value) == (
        "rollout.max_prompt_tokens=129 with rollout.max_new_tokens=256 and trainer.seq_len=384; a row leaves 128 "
        "tokens for a prompt; use at most as many, or longer rows, trainer.seq_len=385."
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lora=none"], "rollout.sampler=openai with lora=none; it trains whole weights, of which a server loads none"),
        (
            ["lora.target_parameters=[experts.down_proj]"],
            "rollout.sampler=openai with lora.target_parameters=[experts.down_proj]; vLLM loads adapters of experts in",
        ),
        (
            ["lora.modules_to_save=[lm_head]"],
            "rollout.sampler=openai with lora.modules_to_save=[lm_head]; vLLM loads no modules that are trained whole",
        ),
        (
            ["+lora.alpha_pattern.q_proj=2"],
            "rollout.sampler=openai with lora.rank_pattern or lora.alpha_pattern; vLLM scales all adapters by one",
        ),
        (["lora.dora=true"], "rollout.sampler=openai with lora.dora=true; vLLM loads no lengths of weights"),
        (["model.linear=lr_qat"], "rollout.sampler=openai with model.linear=lr_qat; its adapters are rounded with the"),
    ],
)
def test_what_a_server_cannot_load_is_refused(rl, words, sentence):
    server = {"sampler": "openai", "url": "http://localhost:8000"}
    check(rl("lora=all_linear_r8", **server))
    with pytest.raises(ConfigError) as error:
        check(rl("lora=all_linear_r8", *words, **server))
    assert sentence in str(error.value)


def test_a_reward_without_answers_is_refused_and_of_a_runs_task_is_not(rl):
    with pytest.raises(ConfigError, match=r"rollout\.rewards has right with objective=next_token"):
        check(rl(is_sampled=False))
    check(rl("task=generate", "task.run=a", is_sampled=False))


def test_a_step_has_the_rows_of_the_rollout_and_a_row_has_room_for_the_answer(rl):
    config = rl(prompts=6, samples=4, updates=3, max_new_tokens=40)
    check(config)
    assert [stage.geometry.global_rows for stage in resolve_stages(config)] == [8]
    measured = {"sample_chat": Lengths(row=60, total=10_000)}
    config = replace(config, model=replace(config.model, row_tokens=4096))
    assert rows_of(config, measured).seq_len == 128
    assert rows_of(rl(config=config, max_new_tokens=100), measured).seq_len == 256
    assert rows_of(rl(config=config, max_new_tokens=100, max_prompt_tokens=28), measured).seq_len == 128


def test_runs_that_sample_nothing_have_the_identity_of_before(rl):
    config = rl(is_sampled=False)
    assert not [key for key in identity(config) if key.startswith("rollout")]
    own = identity(rl())
    assert own["rollout.prompts"] == 16
    assert own["rollout.rewards.right.function"] == "number"
    require_same(own, rl(reward_workers=3, reward_memory_gib=None, max_seconds=5.0), folder="a")
    with pytest.raises(ConfigError, match=r"rollout\.samples=8, now 4"):
        require_same(own, rl(samples=4), folder="a")


def test_the_named_functions_are_those_of_the_module():
    public = {name for name, value in vars(functions).items() if getattr(value, "__module__", "") == functions.__name__}
    assert {name for name in public if not name.startswith("_")} - {"result_of"} == set(FUNCTIONS)


def test_every_reward_is_chosen_by_its_name(make_config):
    settings = ["rollout.rewards.regex.arguments.pattern=a+", "rollout.rewards.length.arguments.most=9"]
    config = make_config("task=generate", "task.run=a", f"reward=[{','.join(FUNCTIONS)}]", *settings)
    rewards = config.rollout.rewards
    assert {name: reward.function for name, reward in rewards.items()} == {name: name for name in FUNCTIONS}
    assert rewards["length"].arguments == {"least": 0, "most": 9}


def test_rewards_of_ones_own_are_added_on_the_command_line(make_config):
    config = make_config("task=generate", "task.run=a", "reward=exact", "+rollout.rewards={mine: {function: a.b.c}}")
    assert {name: each.full_name for name, each in config.rollout.rewards.items()} == {
        "exact": "tpu_experiments.rewards.functions.exact",
        "mine": "a.b.c",
    }
    assert "number is not selected; choose it: reward=number." in refusal("rollout.rewards.number.weight=2")
    added = "write '+rollout.rewards={mine: {function: package.module.name}}'"
    assert added in refusal("rollout.rewards.mine.function=a.b.c")

"""Secrets in settings, command lines and URLs are written nowhere; ordinary names and values stay as they are."""

import json
import logging
from pathlib import Path

import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import config_of_run, identity, require_same
from tpu_experiments.config.messages import known_keys
from tpu_experiments.config.redaction import REDACTED, is_secret_name, redacted, redacted_arguments, redacted_text
from tpu_experiments.loggers.provenance import provenance
from tpu_experiments.loggers.runlog import FILE_FORMAT, Formatter
from tpu_experiments.storage.run_folder import config_yaml
from tpu_experiments.sweeping.leaderboard import Row
from tpu_experiments.sweeping.points import Point

SECRETS = [
    "token",
    "HF_TOKEN",
    "HF_TOKEN_2",
    "hf_token",
    "auth_token",
    "GITHUB_TOKEN_RW",
    "access_tokens",
    "WANDB_API_KEY",
    "api_key",
    "apiKey",
    "apikey",
    "OPENAI_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "private_key",
    "client_secret",
    "dbPassword",
    "passwd",
    "DB_PASS",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "credentials",
    "ssh_key",
    "Authorization",
    "cookie",
]
ORDINARY = [
    "tokenizer",
    "tokenizer_path",
    "tokens",
    "tokens_per_step",
    "tokens_per_call",
    "max_tokens",
    "num_tokens",
    "max_new_tokens",
    "key",
    "keys",
    "sort_key",
    "text_key",
    "eos_token",
    "pad_token",
    "bos_token_id",
    "max_token_id",
    "token_id",
    "TOKENIZERS_PARALLELISM",
    "LIBTPU_INIT_ARGS",
    "author",
    "keyboard",
    "monkey",
    "MAX_TOKENS",
    "hub_split",
    "window_tokens",
    "loss_chunk_tokens",
    "embed_tokens",
    "special_tokens",
    "passes",
    "secretary",
]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names(name: str) -> None:
    assert not is_secret_name(name)


def test_no_key_of_the_schema_is_taken_for_a_secret() -> None:
    assert not [key for key in known_keys() if any(map(is_secret_name, key.split(".")))]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("https://user:pass@host/x.jsonl?a=1", "https://REDACTED@host/x.jsonl?a=1"),
        ("https://u:p@ss@host/x", "https://REDACTED@host/x"),
        ("s3://KEY:SECRET@bucket/x", "s3://REDACTED@bucket/x"),
        (
            "https://h/x?X-Amz-Credential=C%2F&X-Amz-Signature=ab&b=2",
            "https://h/x?X-Amz-Credential=REDACTED&X-Amz-Signature=REDACTED&b=2",
        ),
        ("https://h/x?sv=1&sig=abc%3D", "https://h/x?sv=1&sig=REDACTED"),
        ("https://h/x?AWSAccessKeyId=a&Expires=9&key=k", "https://h/x?AWSAccessKeyId=REDACTED&Expires=9&key=REDACTED"),
        ("https://h/x#access_token=abc", "https://h/x#access_token=REDACTED"),
        ("it is hf_abcdefghijklmnopqrst.", "it is REDACTED."),
        ("gs://bucket/a@1/x?page=2", "gs://bucket/a@1/x?page=2"),
        ("mail a@b.c about tokens=5", "mail a@b.c about tokens=5"),
    ],
)
def test_text(given: str, written: str) -> None:
    assert redacted_text(given) == written


def test_command_lines() -> None:
    given = [
        "run.py",
        "+hw.env.HF_TOKEN=abc",
        "hw.env={WANDB_API_KEY: abc}",
        "++trainer.options.credentials={user:abc}",
    ]
    given += ["trainer.seq_len=64", "sample.prompt='a token: abc'", "data.x.path=https://u:abc@h/x", "-m"]
    assert redacted_arguments(given) == [
        "run.py",
        "+hw.env.HF_TOKEN=REDACTED",
        "hw.env=REDACTED",
        "++trainer.options.credentials=REDACTED",
        "trainer.seq_len=64",
        "sample.prompt='a token: abc'",
        "data.x.path=https://REDACTED@h/x",
        "-m",
    ]


def test_everything_below_the_name_of_a_secret_goes() -> None:
    given = {
        "credentials": {"user": "a", "parts": ["b", 5]},
        "token": 7,
        "password": 7,
        "flag": {"secret": True},
        "n": 1,
    }
    assert redacted(given) == {
        "credentials": {"user": REDACTED, "parts": [REDACTED, REDACTED]},
        "token": 7,
        "password": REDACTED,
        "flag": {"secret": True},
        "n": 1,
    }


SIGNED = "https://h/x.jsonl?X-Amz-Signature=abcdef0123&part=1"
OVERRIDES = (
    "+hw.env.HF_TOKEN=topsecret",
    f"'data.sample_text.path={SIGNED}'".strip("'").replace("=https", '="https') + '"',
)


def test_no_writer_of_a_config_writes_one(tmp_path: Path) -> None:
    """config.yaml, TensorBoard and the cards take `config_yaml`; identity.json and the config's hash `identity`."""
    config = composed(*OVERRIDES, "+trainer.options.api_key=topsecret")
    point = Point("a", {"hw.env.HF_TOKEN": "topsecret"}, OVERRIDES, config)
    texts = {
        "config.yaml": config_yaml(config),
        "identity.json": json.dumps(identity(config)),
        "provenance.json": json.dumps(provenance(config, device="cpu", argv=["run.py", *OVERRIDES])),
        "sweep.json": json.dumps(vars(Row.of(point))),
    }
    for name, text in texts.items():
        assert "topsecret" not in text, name
        assert "abcdef0123" not in text, name
    assert "part=1" in texts["config.yaml"]
    assert config.hw.env["HF_TOKEN"] == "topsecret"


def test_the_same_run_resumes_with_another_secret() -> None:
    first, then = (composed(f"+trainer.options.api_key={key}") for key in ("one", "two"))
    require_same(json.loads(json.dumps(identity(first))), then, folder="x")
    with pytest.raises(ConfigError, match=r"trainer\.options\.depth=1, now 2"):
        require_same(identity(composed("+trainer.options.depth=1")), composed("+trainer.options.depth=2"), folder="x")


def test_a_secret_that_was_not_kept_is_taken_from_the_command_or_asked_for() -> None:
    text = config_yaml(composed(OVERRIDES[1]))
    command = composed("task=evaluate", OVERRIDES[1])
    assert config_of_run(command, text=text, place="config.yaml").data["sample_text"].path == SIGNED
    with pytest.raises(ConfigError, match=r"data\.sample_text\.path=.*REDACTED.* was a secret and is not kept there"):
        config_of_run(composed("task=evaluate"), text=text, place="config.yaml")


def test_the_log_leaves_them_out() -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "asked %s", ("https://u:topsecret@h/x",), None)
    assert "topsecret" not in Formatter(FILE_FORMAT).format(record)

"""Secrets of many services in what a run writes, and innocent values that look like them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.config.composing import composed
from tpu_experiments.config.redaction import redacted, redacted_arguments, redacted_text
from tpu_experiments.export.card import redacted_text as of_card
from tpu_experiments.loggers.provenance import provenance
from tpu_experiments.storage.run_folder import config_yaml

MIXED = "aB3dE5gH7jK9mN1pQ3sT5vW7xY9zA2cD4fG6hJ8kL0nP2rS4uV6wX8yZ1bC3eF5gI7kM9oQ1sU3wY5aZ"
HEX = "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9"
DIGITS = "1234567890" * 3
LOWER = "k3m5n7p9q2r4s6t8u1v3w5x7y9z2a4b6c8d1e3f5"
UPPER = LOWER.upper()

# Each as (text, what of it is the secret). They are put together here, so that no scanner takes this file for a leak.
SHAPES = {
    "AWS access key": ("AKIA" + UPPER[:16], UPPER[:16]),
    "AWS temporary key": ("ASIA" + UPPER[:16], UPPER[:16]),
    "AWS secret key": ("aws_secret_access_key = '" + MIXED[:40] + "'", MIXED[:40]),
    "AWS session token": ("AWS_SESSION_TOKEN=" + MIXED, MIXED),
    "Azure connection": (f"DefaultEndpointsProtocol=https;AccountKey={MIXED + MIXED[:2]}==;End", MIXED),
    "Azure account key, short": ("AccountKey=" + MIXED[:44], MIXED[:44]),
    "Azure shared access signature": (f"SharedAccessSignature=sv=2021&sig={MIXED[:43]}%3D", MIXED[:43]),
    "Azure shared access key": ("SharedAccessKeyName=root;SharedAccessKey=" + MIXED[:43], MIXED[:43]),
    "Azure client secret": (MIXED[:3] + "8Q~" + MIXED[:34], MIXED[:34]),
    "Google service account": (
        json.dumps({"private_key_id": HEX[:40], "private_key": f"-----BEGIN PRIVATE KEY-----\n{MIXED}\n{MIXED}"}),
        MIXED,
    ),
    "Google API key": ("AIza" + MIXED[:35], MIXED[:35]),
    "Google client secret": ("GOCSPX-" + MIXED[:28], MIXED[:28]),
    "Google access token": ("ya29." + MIXED[:60], MIXED[:60]),
    "GitHub, classic": ("ghp_" + MIXED[:36], MIXED[:36]),
    "GitHub, of an app": ("ghs_" + MIXED[:36], MIXED[:36]),
    "GitHub, fine-grained": ("github_pat_" + MIXED[:22] + "_" + MIXED[:59], MIXED[:59]),
    "GitLab": ("glpat-" + MIXED[:20], MIXED[:20]),
    "GitLab runner": ("glrt-" + MIXED[:20], MIXED[:20]),
    "Slack bot": ("xoxb-" + DIGITS[:12] + "-" + DIGITS[:12] + "-" + MIXED[:24], MIXED[:24]),
    "Slack app": ("xapp-1-A0" + UPPER[:8] + "-" + DIGITS[:12] + "-" + HEX, HEX),
    "Slack refresh": ("xoxe.xoxp-1-" + MIXED[:60], MIXED[:60]),
    "Slack webhook": (
        "https://hooks.slack.com/services/T" + UPPER[:8] + "/B" + UPPER[:8] + "/" + MIXED[:24],
        MIXED[:24],
    ),
    "npm": ("npm_" + MIXED[:36], MIXED[:36]),
    "npm's file": ("//host/:_authToken=" + HEX[:36], HEX[:36]),
    "PyPI": ("pypi-AgEIcHlwaS5vcmc" + MIXED[:75], MIXED[:75]),
    "OpenAI": ("sk-" + MIXED[:20] + "T3BlbkFJ" + MIXED[:20], MIXED[:20]),
    "OpenAI, of a project": ("sk-proj-" + MIXED[:60], MIXED[:60]),
    "Anthropic": ("sk-ant-api03-" + MIXED[:60], MIXED[:60]),
    "OpenRouter": ("sk-or-v1-" + HEX, HEX),
    "DeepSeek": ("sk-" + HEX[:32], HEX[:32]),
    "Hugging Face": ("hf_" + MIXED[:34], MIXED[:34]),
    "Hugging Face, OAuth": ("hf_oauth_" + MIXED[:40] + "." + MIXED[:20], MIXED[:20]),
    "Hugging Face, organisation": ("api_org_" + MIXED[:34], MIXED[:34]),
    "W&B": ("WANDB_API_KEY=" + HEX[:40], HEX[:40]),
    "Comet": ("COMET_API_KEY=" + MIXED[:25], MIXED[:25]),
    "MLflow": ("MLFLOW_TRACKING_PASSWORD=hunter", "hunter"),
    "Cohere": ("cohere_api_key: " + MIXED[:40], MIXED[:40]),
    "Replicate": ("r8_" + MIXED[:37], MIXED[:37]),
    "Groq": ("gsk_" + MIXED[:52], MIXED[:52]),
    "Databricks": ("dapi" + HEX[:32], HEX[:32]),
    "Kaggle": ("KGAT_" + HEX[:32], HEX[:32]),
    "Discord bot": ("M" + MIXED[:23] + "." + MIXED[:6] + "." + MIXED[:27], MIXED[:23]),
    "Discord webhook": ("https://discord.com/api/webhooks/" + DIGITS[:18] + "/" + MIXED[:68], MIXED[:68]),
    "Telegram": (DIGITS[:10] + ":" + MIXED[:35], MIXED[:35]),
    "Stripe": ("sk_live_" + MIXED[:24], MIXED[:24]),
    "Stripe, for tests": ("rk_test_" + MIXED[:24], MIXED[:24]),
    "Stripe webhook": ("whsec_" + MIXED[:32], MIXED[:32]),
    "Twilio": ("SK" + HEX[:32], HEX[:32]),
    "SendGrid": ("SG." + MIXED[:22] + "." + MIXED[:43], MIXED[:43]),
    "Mailchimp": (HEX[:32] + "-us12", HEX[:32]),
    "Square": ("sq0csp-" + MIXED[:43], MIXED[:43]),
    "JSON web token": ("eyJ" + MIXED[:20] + ".eyJ" + MIXED[:40] + "." + MIXED[:43], MIXED[:43]),
    "Kubernetes": ("token: eyJ" + MIXED[:20] + ".eyJ" + MIXED[:40] + "." + MIXED[:43], MIXED[:43]),
    "user in a URL": ("https://user:hunter@host/x", "hunter"),
    "PostgreSQL": ("postgresql://user:hunter@host:5432/db", "hunter"),
    "MongoDB": ("mongodb+srv://user:hunter@host/db", "hunter"),
    "Redis": ("redis://:hunter@host:6379/0", "hunter"),
    "PGPASSWORD": ("PGPASSWORD=hunter psql", "hunter"),
    "MYSQL_PWD": ("MYSQL_PWD=hunter mysql", "hunter"),
    "a connection string": ("Server=db;User Id=sa;Password=hunter;", "hunter"),
    "a password in quotes": ('password: "correct horse"', "horse"),
    "Bearer": ("Authorization: Bearer " + MIXED[:30], MIXED[:30]),
    "Basic": ('-H "Authorization: Basic dXNlcjpodW50ZXI="', "dXNlcjpodW50ZXI"),
    "Bearer alone": ("{'headers': 'Bearer " + MIXED[:30] + "'}", MIXED[:30]),
    "a cookie": ("Cookie: theme=dark; session=hunter", "hunter"),
    "a header of a key": ("x-api-key: hunter", "hunter"),
    "Vault": ("hvs." + MIXED[:60], MIXED[:60]),
    "DigitalOcean": ("dop_v1_" + HEX, HEX),
    "Grafana": ("glsa_" + MIXED[:32] + "_" + HEX[:8], MIXED[:32]),
    "Docker": ("dckr_pat_" + MIXED[:27], MIXED[:27]),
    "Shopify": ("shpat_" + HEX[:32], HEX[:32]),
    "age": ("AGE-SECRET-KEY-1" + UPPER + UPPER[:18], UPPER),
    "OpenSSH": (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MIXED}\n-----END OPENSSH PRIVATE KEY-----", MIXED),
    "PGP": (f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{MIXED}\n-----END PGP PRIVATE KEY BLOCK-----", MIXED),
}
INNOCENT = [
    "model.tokenizer_path=tpu_experiments/samples/tokenizer",
    "tokenizer: mistralai/Mistral-7B-v0.3",
    f"sha256: {HEX}",
    f"commit {HEX[:40]} of main",
    f"revision={HEX[:40]}",
    "eos_token='<|im_end|>', pad_token=<pad>",
    "max_new_tokens=64; tokens_per_step: 16384",
    "run sk-uk-translation-2026-11-28-lora-r32",
    "name=mistral7b_ro_2026-11-28_18-40-06",
    "outputs/runs/gemma3-270m/checkpoints/step_000400",
    "gs://bucket/a@1/x?page=2&split=train",
    "https://huggingface.co/datasets/a/b/resolve/main/x.jsonl?download=true",
    "hf_transfer and hf_xet are not installed",
    "HF_TOKEN is not set; log in, or give hw.env.HF_TOKEN=...",
    "the password: none is needed",
    "a token: abc",
    "password=null api_key=None",
    "api_key=${oc.env:OPENAI_API_KEY}",
    "PWD=/home/user/project OLDPWD=/tmp",
    "Basic configuration of the trainer",
    "needs a token in the Authorization header",
    "a bearer authentication",
    "loss 2.3456789 at 12:34:56, 1,234,567 tokens/s",
    "2026-11-28T18:40:06.123456+00:00",
    "550e8400-e29b-41d4-a716-446655440000",
    "layers.11.self_attn.q_proj.lora_A.weight",
    "APARTAMENTELE SUNT SCUMPE",
    "Secretul este aici: cheia e sub preș",
    "v5litepod-256 in us-central1-a",
    "data=[wiki_ro,sample_text] trainer.seq_len=1024",
    "HEAD~3..HEAD, 12 files changed",
    "key=value; sort_key: name; keys: 12345678",
    "PJRT_DEVICE=TPU XLA_FLAGS=--xla_force_host_platform_device_count=8",
]


@pytest.mark.parametrize("name", SHAPES)
def test_a_secret_is_redacted_in_every_place(name: str) -> None:
    text, secret = SHAPES[name]
    told = f"asked, and {text}\nthen went on"
    value = f"answer with {text}"
    places = {
        "a log line, an error, a card": redacted_text(told),
        "a value of config.yaml, W&B, result.json": json.dumps(redacted({"run": {"sample.prompt": [value]}})),
        "a word of a command line": " ".join(redacted_arguments(["run.py", f"sample.prompt={value}"])),
    }
    for place, written in places.items():
        assert secret not in written, place
    assert redacted_text(told).startswith("asked, and ")
    assert redacted_text(told).endswith("then went on") or "BEGIN" in text


@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted_text(text) == text
    assert redacted({"prompt": text}) == {"prompt": text}


def test_nothing_of_a_run_has_one_of_them(tmp_path: Path) -> None:
    config = composed()
    prompts = tuple(text for text, _ in SHAPES.values())
    config.hw.env["NOTE"] = "\n\n".join(prompts)
    texts = {
        "config.yaml": config_yaml(config),
        "W&B": json.dumps(redacted(asdict(config))),
        "provenance.json": json.dumps(provenance(config, device="cpu", argv=["run.py", *(f"a={p}" for p in prompts)])),
        "the card": of_card(OmegaConf.to_yaml(OmegaConf.create(asdict(config)))),
    }
    for place, text in texts.items():
        assert not [name for name, (_, secret) in SHAPES.items() if secret in text and len(secret) > 6], place


def test_redacting_again_changes_nothing() -> None:
    for text, _ in SHAPES.values():
        assert redacted_text(redacted_text(text)) == redacted_text(text)

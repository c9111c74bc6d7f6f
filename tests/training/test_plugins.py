"""What README says about adding a model, a data set and a trainer, done: files outside the package, picked by YAML."""

import os
from pathlib import Path

import pytest

from tests.training.runs import finished, losses

pytestmark = pytest.mark.xla

TRAINER = '''
"""Cross-entropy with a z-loss (PaLM, arXiv 2204.02311): keeps the softmax normaliser near one."""

import torch

from tpu_experiments.models.passes.forward import logits_of, row_losses, target_weights
from tpu_experiments.training.trainer import Trainer


class ZLossTrainer(Trainer):
    def row_loss(self, module, parameters, rows):
        logits = logits_of(module, parameters, rows)
        sums, weights = row_losses(logits, rows)
        log_z = torch.logsumexp(logits.float(), -1)
        penalty = (log_z.square() * target_weights(rows)[1]).sum(1)
        return sums + self.config.trainer.options["z_loss"] * penalty, weights
'''
SOURCE = '''
"""Proverbs, one a line, as documents."""

from pathlib import Path

from tpu_experiments.data.documents import Document


def read_proverbs(spec):
    for number, line in enumerate(Path(spec.path).read_text().splitlines()):
        yield Document(id=str(number), text=line, messages=None)
'''
TRAINER_YAML = """
defaults: [base, default, _self_]
_target_: my_lab.trainer.ZLossTrainer
options: {z_loss: 1.0e-3}
"""
DATA_YAML = """
proverbs:
  _target_: my_lab.proverbs.read_proverbs
  path: PATH
  sample_path: PATH
  kind: text
  format: text
"""
MODEL_YAML = """
defaults: [base, _self_]
name: llama_small
path: tpu_experiments/samples/tokenizer
init: random
dtype: float32
arch:
  model_type: llama
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  vocab_size: 4096
  max_position_embeddings: 256
"""


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    """A folder of a user's own: `my_lab/*.py` and `conf/<group>/<name>.yaml`."""
    proverbs = tmp_path / "proverbs.txt"
    proverbs.write_text("\n".join(f"Cine se scoală de dimineață departe ajunge, zice vorba {i}." for i in range(200)))
    files = {
        "my_lab/__init__.py": "",
        "my_lab/trainer.py": TRAINER,
        "my_lab/proverbs.py": SOURCE,
        "conf/trainer/z_loss.yaml": TRAINER_YAML,
        "conf/data/proverbs.yaml": DATA_YAML.replace("PATH", str(proverbs)),
        "conf/model/llama_small.yaml": MODEL_YAML,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def test_model_data_and_trainer_of_your_own(lab, tmp_path):
    added = ("--config-dir", str(lab / "conf"), "plugins=[my_lab]", "model=llama_small", "data=[proverbs]")
    common = (*added, "debug=smoke", "model.size=full", "data_size=full", "trainer.log_every_steps=1")
    common = (*common, "trainer.max_stage_steps=2", "sample.max_new_tokens=0")
    plain = finished(*common, "hw.runtime=eager", output_dir=tmp_path / "plain")
    with_z = finished(*common, "trainer=z_loss", output_dir=tmp_path / "z")
    assert plain["model"] == with_z["model"] == "llama_small"
    assert plain["data"] == ["proverbs"]
    first, first_z = losses(tmp_path / "plain")[0], losses(tmp_path / "z")[0]
    assert first_z > first + 0.01  # the penalty of an untrained softmax over 4096 entries: 1e-3 * log(4096)^2
    assert with_z["compiles_after_warmup"] == 0

"""Prints the losses of transformers' Trainer on the rows that tests/training/test_transformers.py trains on.

    USE_TORCH_XLA=0 python -m tests.training.transformers_run FOLDER NUM_STEPS

In a process of its own, since the Trainer chooses torch_xla's device where it can be imported. FOLDER has the model of
`save_pretrained` and rows.json. The decay groups are the Trainer's own; of its schedule `cosine_with_min_lr` the
multiplier of step i is that of its step i + 1, with one step more of warm-up: its first step would have the rate 0.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from tests.training.test_transformers import BETAS, CLIP, EPS, FLOOR, LR, ROWS, WEIGHT_DECAY, warmup_of


class InOrder(Trainer):
    """Takes the rows as they come, and keeps the loss of every step."""

    found: list[float]

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        of_optimizer = self.optimizer if optimizer is None else optimizer
        (multiplier,) = set(
            get_cosine_with_min_lr_schedule_with_warmup(
                torch.optim.SGD([torch.zeros(1)], lr=LR),
                num_warmup_steps=warmup_of(num_training_steps) + 1,
                num_training_steps=num_training_steps,
                min_lr_rate=FLOOR,
            ).lr_lambdas
        )
        self.lr_scheduler = LambdaLR(of_optimizer, lambda step: multiplier(step + 1))
        return self.lr_scheduler

    def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
        loss = super().compute_loss(*arguments, **settings)
        self.found.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


def main(folder: str, num_steps: int) -> None:
    """Train, and print the losses and the names that decay."""
    rows = json.loads((Path(folder) / "rows.json").read_text())
    settings = TrainingArguments(
        output_dir=f"{folder}/trainer",
        max_steps=num_steps,
        per_device_train_batch_size=ROWS,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=CLIP,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = InOrder(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.found = []
    trainer.train()
    print(json.dumps({"losses": trainer.found, "decay": sorted(trainer.get_decay_parameter_names(model))}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

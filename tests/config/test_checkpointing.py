"""Settings of checkpoints that do not go together."""

from tests.config.composing import composed, refusal


def test_the_best_need_evaluations() -> None:
    message = refusal("checkpoint.keep_best=2", "trainer.eval_every_steps=0")
    assert message.startswith("checkpoint.keep_best=2 uses held-out loss and trainer.eval_every_steps=0")
    assert composed("checkpoint.keep_best=2", "trainer.eval_every_steps=5").checkpoint.keep_best == 2


def test_minutes_may_be_parts_of_one() -> None:
    assert composed("checkpoint.every_minutes=0.5").checkpoint.every_minutes == 0.5
    assert "checkpoint.every_minutes=-1.0; it must be at least 0" in refusal("checkpoint.every_minutes=-1")

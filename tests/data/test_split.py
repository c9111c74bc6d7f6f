from tpu_experiments.data.split import is_held_out


def test_share_is_about_the_fraction():
    held_out = sum(is_held_out(f"document {i}", eval_fraction=0.1) for i in range(10_000))
    assert 900 < held_out < 1100


def test_a_larger_fraction_keeps_what_was_held_out():
    texts = [f"document {i}" for i in range(1000)]
    small = {text for text in texts if is_held_out(text, eval_fraction=0.1)}
    assert small < {text for text in texts if is_held_out(text, eval_fraction=0.2)}


def test_none_at_zero():
    assert not any(is_held_out(str(i), eval_fraction=0.0) for i in range(1000))


def test_split_does_not_change_between_versions():
    held_out = [i for i in range(100) if is_held_out(f"document {i}", eval_fraction=0.1)]
    assert held_out == [40, 44, 59, 70, 81]

"""Layers are quantised with what the quantised layers before them give, and an interruption costs nothing."""

from dataclasses import replace

import pytest
import torch

from tests.tiers import only
from tests.training.tiny import random_batch
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.export.calibrated import GridForm
from tpu_experiments.export.calibration import calibrated, layer_file
from tpu_experiments.export.quantised import chosen_weights
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.quantisation.grid import Grid

pytestmark = pytest.mark.xla
MODELS = ("mistral7b", "gemma3_270m", "qwen05b")


def rows_of(count=3):
    batch = random_batch(5, rows=count)
    names = ("ids", "positions", "segments")
    return [{name: batch[name][0, index : index + 1] for name in names} for index in range(count)]


def subject(make_config, model):
    config = make_config(f"model={model}", "model.size=tiny", "model.dtype=float32")
    source = HuggingFaceModel(replace(config.model, attention="eager"), seed=0)
    return source, whole_model(source, lora=LoraConfig(r=0), trained={})


class Recorded(GridForm):
    """Keeps what it was given; stops the quantisation after so many weights."""

    def __init__(self, stop_after=None):
        super().__init__(Grid(4, 32), form="gptq", feedback=True)
        self.given, self.stop_after = [], stop_after

    def encode(self, weight_NK, hessian_KK, *, seed):
        if len(self.given) == self.stop_after:
            raise KeyboardInterrupt
        self.given.append(hessian_KK.clone())
        return super().encode(weight_NK, hessian_KK, seed=seed)


def hessians_of(module, names, rows):
    """Means of x x^T of whole forward passes, over the tokens that are no padding."""
    sums, tokens = {}, sum(int((row["segments"] > 0).sum()) for row in rows)

    def hook(name):
        def note(_, inputs):
            x = inputs[0][0][keep]
            sums[name] = sums.get(name, 0) + x.T @ x / tokens

        return note

    handles = [module.get_submodule(n.removesuffix(".weight")).register_forward_pre_hook(hook(n)) for n in names]
    for row in rows:
        keep = row["segments"][0] > 0
        with torch.no_grad():
            logits_of(module, {}, row)
    for handle in handles:
        handle.remove()
    return sums


@pytest.mark.parametrize("model", only(["gemma3_270m"], MODELS))
def test_hessians_are_those_of_the_model_with_the_layers_before_quantised(make_config, tmp_path, model):
    source, whole = subject(make_config, model)
    form, rows = Recorded(), rows_of()
    chosen = chosen_weights(whole, form)
    made = calibrated(whole, source, form, chosen=chosen, rows=rows, folder=str(tmp_path), seed=0)
    assert list(made.errors) == chosen
    assert all(0 < error < 0.05 for error in made.errors.values())

    config = source.config
    plain = source.built(config, dtype=torch.float32).eval()
    for name, tensor in whole.tensors():
        plain.get_parameter(name).data.copy_(tensor)
    plain.tie_weights()
    parts = dict(made.parts())
    per_layer = len(chosen) // made.count
    for index in range(made.count):
        names = chosen[index * per_layer : (index + 1) * per_layer]
        expected = hessians_of(plain, names, rows)
        for name, found in zip(names, form.given[index * per_layer :], strict=False):
            assert float((found - expected[name]).abs().max()) < 1e-3 * float(expected[name].abs().max()), name
        for name in names:
            weight = plain.get_parameter(name)
            words, scales = parts[f"{name}_packed"], parts[f"{name}_scale"]
            codes = torch.stack([words >> (4 * place) & 15 for place in range(8)], -1).flatten(1) - 8
            weight.data.copy_(codes[:, : weight.shape[1]] * scales.repeat_interleave(32, 1))


@pytest.mark.parametrize("stop_after", only([8], [3, 8, 15]))
def test_an_interrupted_quantisation_goes_on_at_its_layer(make_config, tmp_path, stop_after):
    source, whole = subject(make_config, "mistral7b")
    rows, folders = rows_of(), [str(tmp_path / name) for name in ("whole", "interrupted")]
    chosen = chosen_weights(whole, Recorded())
    alone = calibrated(whole, source, Recorded(), chosen=chosen, rows=rows, folder=folders[0], seed=0)
    with pytest.raises(KeyboardInterrupt):
        calibrated(whole, source, Recorded(stop_after), chosen=chosen, rows=rows, folder=folders[1], seed=0)
    again = Recorded()
    made = calibrated(whole, source, again, chosen=chosen, rows=rows, folder=folders[1], seed=0)
    per_layer = len(chosen) // made.count
    assert len(again.given) == len(chosen) - stop_after // per_layer * per_layer
    assert made.errors == alone.errors
    for index in range(made.count):
        assert (tmp_path / "whole" / layer_file(index)).read_bytes() == (
            tmp_path / "interrupted" / layer_file(index)
        ).read_bytes()

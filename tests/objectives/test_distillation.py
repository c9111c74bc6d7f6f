"""Distillation: TRL's formulas on the same logits, top k, chunks, folded layers, and what is stored and read again."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_xla

from tests.config.composing import composed
from tests.training.runs import finished, records, run
from tests.training.tiny import built, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.prepared import PreparedSource
from tpu_experiments.data.reading.prompt_logprobs import PromptLogprobs
from tpu_experiments.data.rows import Rows
from tpu_experiments.data.store.shards import RowStore
from tpu_experiments.data.teacher import (
    IDS,
    LOGPS,
    PredictionWriter,
    TaughtRows,
    Wanted,
    read_teacher,
    rows_hash,
    stored_dtype,
)
from tpu_experiments.models.passes.distillation import OfTeacher, likeliest
from tpu_experiments.models.passes.forward import logits_of, target_weights
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.distillation import Distillation
from tpu_experiments.objectives.next_token import NextToken
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.storage.sealed import write_sealed_json
from tpu_experiments.tasks.prepare.teacher import teacher_of
from tpu_experiments.training.given import require_given

pytestmark = pytest.mark.xla
TRL = find_spec("trl")
needs_trl = pytest.mark.skipif(TRL is None, reason="TRL is not installed")
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


@pytest.fixture(autouse=True, scope="module")
def device_first():
    """After a backward pass of plain torch, torch_xla's first device ends the process."""
    torch_xla.device()


def function_of_trl(file, name):
    """A function of TRL's source, alone: importing its trainers takes the device of torch_xla."""
    text = (Path(TRL.submodule_search_locations[0]) / "experimental" / file).read_text("utf-8")
    (found,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    found.decorator_list = []
    space = {"torch": torch, "F": F}
    exec(compile(ast.Module([found], []), file, "exec"), space)
    return space[name]


@pytest.fixture
def student(make_config):
    """A tiny model in plain torch with rows, and logits of a teacher that are far from the student's."""
    config = make_config(
        "model=gemma3_270m", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager"
    )
    model = built(config, make_runtime(config))
    with torch.no_grad():
        for p in model.trainable.values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    for p in model.trainable.values():
        p.requires_grad_()
    rows = {name: t[0] for name, t in random_batch(3).items() if name != "lr"}
    logits = logits_of(model.module, model.trainable, rows).detach()
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return model, rows, logits * 0.5 + 3 * noise


def taught(rows, logits, *, top_k, temperature=1.0):
    top = torch.log_softmax(logits / temperature, -1).topk(top_k)
    return rows | {IDS: top.indices.int(), LOGPS: top.values}


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.trainable.values()))])


def mean_loss(objective, model, rows):
    sums, counts = objective.row_loss(model.module, model.trainable, rows)
    return sums.sum() / counts.sum()


@needs_trl
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", BETAS)
def test_with_the_whole_vocabulary_it_is_the_loss_of_gkd(student, beta, temperature):
    """1e-5 of the loss and 1e-6 of the gradients, by chunks and at once."""
    model, rows, teacher = student
    gkd = function_of_trl("gkd/gkd_trainer.py", "generalized_jsd_loss")
    targets, weights = target_weights(rows)
    labels = torch.where(weights > 0, targets, -100)
    own = logits_of(model.module, model.trainable, rows)
    expected = gkd(own, teacher, labels=labels, beta=beta, temperature=temperature)
    wanted = gradients(expected, model)
    rows = taught(rows, teacher, top_k=teacher.shape[-1], temperature=temperature)
    for chunk in (None, 40):
        objective = Distillation(
            top_k=teacher.shape[-1], beta=beta, temperature=temperature, computing=Computing(chunk)
        )
        loss = mean_loss(objective, model, rows)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(loss, model), wanted, rtol=1e-5, atol=1e-6)
    assert expected > 0.01


@needs_trl
@pytest.mark.parametrize("rest", ["bucket", "renormalised"])
@pytest.mark.parametrize("beta", BETAS)
def test_few_tokens_and_the_rest_are_those_of_trl(student, beta, rest):
    """TRL's SDPO on a support of 5 tokens: a tail bucket, or both normalised there."""
    model, rows, teacher = student
    tail = function_of_trl("sdpo/loss_utils.py", "add_tail_bucket")
    divergence = function_of_trl("sdpo/loss_utils.py", "compute_divergence")
    given = taught(rows, teacher, top_k=5)
    own = torch.log_softmax(logits_of(model.module, model.trainable, rows), -1).gather(-1, given[IDS].long())
    both = (own, given[LOGPS])
    both = (
        [tail(each) for each in both]
        if rest == "bucket"
        else [each - each.logsumexp(-1, keepdim=True) for each in both]
    )
    weights = target_weights(rows)[1]
    expected = (divergence(*both, beta) * weights).sum() / weights.sum()
    wanted = gradients(expected, model)
    for chunk in (None, 40):
        loss = mean_loss(Distillation(top_k=5, beta=beta, rest=rest, computing=Computing(chunk)), model, given)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(loss, model), wanted, rtol=1e-5, atol=1e-6)


def test_normalised_predictions_of_one_temperature_give_those_of_another(student):
    """As data/teacher.py converts them: times the stored temperature over that asked for."""
    model, rows, teacher = student
    objective = Distillation(top_k=5, beta=0.5, temperature=2.0, rest="renormalised")
    stored = taught(rows, teacher, top_k=5)
    converted = stored | {LOGPS: stored[LOGPS] / 2}
    expected = mean_loss(objective, model, taught(rows, teacher, top_k=5, temperature=2.0))
    torch.testing.assert_close(mean_loss(objective, model, converted), expected, rtol=1e-5, atol=1e-6)
    assert abs(mean_loss(objective, model, stored) - expected) > 0.01


def test_truncated_it_is_at_most_the_whole_and_grows_with_k(student):
    """Grouping tokens loses information (data-processing inequality), and a rest of little mass little."""
    model, rows, teacher = student
    found = [
        mean_loss(Distillation(top_k=k), model, taught(rows, teacher, top_k=k)).item()
        for k in (1, 8, 64, 512, teacher.shape[-1])
    ]
    assert found == sorted(found)
    assert found[0] < 0.9 * found[-1]
    assert found[3] > 0.9 * found[-1]


def test_alpha_mixes_with_cross_entropy_and_rows_may_carry_it(student):
    model, rows, teacher = student
    given = taught(rows, teacher, top_k=8)
    ce, kl = mean_loss(NextToken(), model, rows), mean_loss(Distillation(top_k=8), model, given)
    mixed = mean_loss(Distillation(top_k=8, alpha=0.3), model, given)
    torch.testing.assert_close(mixed, 0.3 * ce + 0.7 * kl, rtol=1e-5, atol=1e-6)
    carried = given | {"alpha": torch.full((len(rows["ids"]),), 0.3)}
    torch.testing.assert_close(mean_loss(Distillation(top_k=8), model, carried), mixed, rtol=1e-6, atol=1e-6)
    objective = Distillation(top_k=8, alpha=0.3)
    summary = objective.summary(objective.sums(model.module, model.trainable, given).tolist())
    assert summary.num_predictions == int(target_weights(rows)[1].sum())
    expected = {"ce": ce.item(), "kl": kl.item()}
    assert summary.measures == pytest.approx(expected, rel=1e-5)
    assert summary.loss == pytest.approx(mixed.item(), rel=1e-5)


def test_padding_with_zeros_for_a_teacher_and_a_carried_beta_of_zero_has_no_gradient(student):
    model, rows, teacher = student
    given = {name: torch.cat([t, torch.zeros_like(t)]) for name, t in taught(rows, teacher, top_k=8).items()}
    beta = torch.cat([torch.full((len(rows["ids"]),), 0.4), torch.zeros(len(rows["ids"]))])
    for chunk in (None, 40):
        objective = Distillation(top_k=8, beta=0.4, computing=Computing(chunk))
        whole = mean_loss(objective, model, given | {"beta": beta})
        alone = mean_loss(objective, model, taught(rows, teacher, top_k=8))
        torch.testing.assert_close(gradients(whole, model), gradients(alone, model), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lora", ["all_linear_r8", "none"])
@pytest.mark.parametrize("stack", ["scanned", "unrolled"])
def test_folded_or_not_a_device_has_the_losses_and_gradients_of_plain_torch(make_config, lora, stack):
    """A frozen head and a trained, tied one; chunks in a loop of XLA."""
    words = ("model=gemma3_270m", "model.size=tiny", "model.dtype=float32", f"lora={lora}", f"model.stack={stack}")
    found = []
    for runtime in ("eager", "xla"):
        config = make_config(*words, f"hw.runtime={runtime}")
        device = make_runtime(config)
        model = built(config, device)
        host = {name: t[0] for name, t in random_batch(3).items() if name != "lr"}
        top = torch.randn(*host["ids"].shape, 500, generator=torch.Generator().manual_seed(2)).log_softmax(-1).topk(6)
        host |= {IDS: top.indices.int(), LOGPS: top.values}
        rows = {name: device.place(t, name=name) for name, t in host.items()}
        for p in model.trainable.values():
            p.requires_grad_()
        how = Computing(40, 1, device.loop, device.constrain)
        objective = Distillation(top_k=6, beta=0.5, alpha=0.2, computing=how)
        loss = mean_loss(objective, model, rows)
        grads = torch.autograd.grad(loss, list(model.trainable.values()))
        if runtime == "xla":
            torch_xla.sync()  # one program, not one for each gradient
        by_name = dict(zip(model.trainable, (g.cpu() for g in grads), strict=True))
        found.append((loss.cpu(), torch.cat([by_name[n].flatten().sort().values for n in sorted(by_name)]).norm()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 40])
def test_what_a_teacher_predicts_is_its_softmax(student, chunk):
    model, rows, _ = student
    taken = OfTeacher(7, 2.0, 300)
    values = likeliest(model.module, model.trainable, rows, taken=taken, computing=Computing(chunk))
    logps = torch.log_softmax(logits_of(model.module, model.trainable, rows).detach() / 2.0, -1)
    top = logps[..., :300].topk(7)
    torch.testing.assert_close(values[..., :7], top.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(values[..., 7:].long(), top.indices)


# ---- what is stored -----------------------------------------------------------------------------------------


def packed_rows():
    ids = np.array([[5, 6, 7, 8, 9, 0], [3, 4, 3, 4, 5, 6]], np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]], np.int32)
    return Rows(ids, (positions > 0) & (segments > 0), positions, segments)


def test_stored_predictions_come_back_by_row_and_belong_to_its_tokens(tmp_path):
    rows = packed_rows()
    rng = np.random.default_rng(0)
    ids, logps = rng.integers(0, 99, (2, 6, 4)), rng.normal(size=(2, 6, 4)).astype(np.float32)
    dtype = stored_dtype(6, entries=4, vocab_size=100)
    writer = PredictionWriter(str(tmp_path), dtype=dtype)
    writer.rows_per_shard = 1
    for row in (0, 1):
        part = slice(row, row + 1)
        writer.add(rows.take(part), ids_MTE=ids[part], logps_MTE=logps[part])
    writer.close(top_k=4)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [shard["rows"] for shard in manifest["shards"]] == [1, 1]
    store = RowStore.of_records(str(tmp_path), manifest["shards"], seq_len=6, pad_id=0)
    order = np.array([1, 0])
    found = TaughtRows(rows, store, 3, str(tmp_path), 0.5).take(order)
    is_token = rows.segments_NT[order][..., None] > 0
    assert np.array_equal(found.more[IDS], np.where(is_token, ids[order][..., :3], 0))
    assert np.array_equal(found.more[LOGPS], np.where(is_token, logps[order][..., :3] / 2, 0))
    assert (found.more[IDS].dtype, found.more[LOGPS].dtype) == (np.int32, np.float32)
    other = packed_rows()
    other.ids_NT[1, 3] += 1
    with pytest.raises(ConfigError, match="belong to other tokens"):
        TaughtRows(other, store, 3, str(tmp_path)).take(order)


def vllm_line(ids, *, k, own=True):
    """What vLLM reports of a prompt: k likeliest tokens, and the prompt's own where it is none of them."""
    told = [None]
    for token in ids[1:]:
        entry = {str(10 + n): {"logprob": -1.0 - n - token / 100, "rank": n + 1} for n in range(k)}
        if own:
            entry |= {str(token): {"logprob": -9.0, "rank": 50}}
        told.append(dict(reversed(entry.items())))
    return {"prompt_token_ids": list(ids), "prompt_logprobs": told}


def test_log_probabilities_of_vllm_are_found_by_tokens(tmp_path):
    rows, file = packed_rows(), tmp_path / "scored.jsonl"
    documents = [[3, 4], [8, 9], [3, 4, 5, 6], [5, 6, 7]]  # in another order than the rows
    lines = [vllm_line(ids, k=3) for ids in documents]
    lines[1] = {"id": "cmpl", "choices": [lines[1]]}  # a server's response
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    found = PromptLogprobs(str(file), entries=3, num_ids=100)
    found.require(rows, what="rows")
    ids, logps = found.of(rows)
    # What is predicted of the second document of the first row (8, 9) stands before its 9.
    assert ids[0, 3].tolist() == [10, 11, 12]
    assert logps[0, 3] == pytest.approx([-1.09, -2.09, -3.09])
    assert logps[1, 4] == pytest.approx([-1.06, -2.06, -3.06])
    assert not logps[0, 4].any()  # nothing follows the last token of a document
    with pytest.raises(ConfigError, match=r"line 4, token 1: 4 log-probabilities .* objective\.top_k=5"):
        PromptLogprobs(str(file), entries=5, num_ids=100).of(rows)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    with pytest.raises(ConfigError, match=r"it lacks 1 of 4 documents of rows, the first of 2 tokens \(3, 4, \.\.\.\)"):
        PromptLogprobs(str(file), entries=3, num_ids=100).require(rows, what="rows")
    for line in (
        '{"prompt_token_ids": [1, 2], "prompt_logprobs": [null]}',
        '{"prompt_token_ids": [1, 2], "prompt_logprobs": {"a": null, "b": null}}',
        '{"prompt_token_ids": [1, 1.7], "prompt_logprobs": [null, {}]}',
        '{"prompt_token_ids": [1, true], "prompt_logprobs": [null, {}]}',
    ):
        file.write_text(line + "\n")
        with pytest.raises(ConfigError, match="line 1 has no prompt_token_ids with as many prompt_logprobs"):
            PromptLogprobs(str(file), entries=3, num_ids=100)


def test_settings_that_do_not_go_together_are_refused():
    for words, problem in [
        (("objective=distillation",), r"data\.stories_ro\.teacher=null"),
        (("data.stories_ro.teacher=t",), r"data\.stories_ro\.teacher=t with objective=next_token"),
        (("task=prepare", "task.teacher=model"), r"task\.teacher=model with objective=next_token"),
        (("task=prepare", "objective=distillation", "task.teacher=model"), r"data\.stories_ro\.teacher=null"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            require_given(composed("data=stories_ro", "curriculum=single", *words))


def test_a_teacher_that_is_no_run_is_refused(tmp_path):
    words = ("data=stories_ro", "data.stories_ro.teacher=t", "objective=distillation", "task=prepare")
    with pytest.raises(ConfigError, match=r"task\.teacher=.*nowhere; it is no run folder"):
        teacher_of(composed(*words, f"task.teacher={tmp_path}/nowhere"))


@pytest.mark.parametrize(
    ("changed", "asked", "message"),
    [
        ({}, {}, None),
        ({"temperature": 2.0}, {"converts": True}, None),
        ({"tokenizer_hash": "b"}, {}, "its teacher has another tokenizer"),
        ({"rows": "0"}, {}, "x-64-train was written for other rows"),
        ({}, {"entries": 9}, r"objective\.top_k=9 and 8 are stored"),
        ({"temperature": 2.0}, {}, r"objective\.temperature=1 and it was written at 2"),
        ({"num_rows": 4}, {}, "has the first 4 rows and 5 are read"),
        (None, {}, "has no predictions of a teacher"),
    ],
)
def test_stored_predictions_of_another_kind_are_refused(tmp_path, changed, asked, message):
    key = ("x", "train", 64)
    split = {"shards": [{"sha256": "1"}, {"sha256": "2"}]}
    source = PreparedSource("x", "text", {64: "p"}, {64: {"splits": {"train": split}, "pad_id": 0}})
    about = {"format": 1, "tokenizer_hash": "a", "rows": rows_hash(source, key), "top_k": 8, "temperature": 1.0}
    about |= {"num_rows": 5, "shards": [], "seq_len": 64}
    if changed is not None:
        (tmp_path / "x-64-train").mkdir()
        write_sealed_json(f"{tmp_path}/x-64-train/manifest.json", about | changed)
    wanted = Wanted(**{"entries": 8, "temperature": 1.0, "converts": False, "tokenizer_hash": "a", **asked})
    how = {"source": source, "num_rows": 5, "wanted": wanted, "cache": None}
    if message is None:
        found = read_teacher(str(tmp_path), key, **how)
        assert (found.entries, found.factor) == (8, 2.0 if changed else 1.0)
        return
    with pytest.raises(ConfigError, match=message):
        read_teacher(str(tmp_path), key, **how)


# ---- whole runs ---------------------------------------------------------------------------------------------

TEACH = ("objective=distillation", "objective.top_k=12", "curriculum=single", "data=stories_ro")
TEACH += ("curriculum.stages.main.steps=100",)


@pytest.mark.slow
def test_a_run_learns_from_what_task_prepare_wrote(tmp_path):
    """Own model as teacher: the KL of a fresh adapter is 0. That run as teacher of another: it falls."""
    where = (f"data.stories_ro.teacher={tmp_path}/t", f"prepare.folder={tmp_path}/p")
    done = run(*TEACH, *where, "task=prepare", "task.teacher=model", output_dir=tmp_path / "a")
    assert done.returncode == 0, done.stderr
    again = run(*TEACH, *where, "task=prepare", "task.teacher=model", output_dir=tmp_path / "a")
    assert "has these predictions already" in again.stderr
    result = finished(*TEACH, *where, "objective.alpha=0.5", output_dir=tmp_path / "b")
    evaluations = [r for r in records(tmp_path / "b") if "eval/kl" in r]
    assert evaluations[0]["eval/kl"] == pytest.approx(0, abs=1e-4)
    assert evaluations[0]["eval/loss"] == pytest.approx(0.5 * evaluations[0]["eval/ce"], rel=1e-3)
    assert result["eval_measures"]["ce"] < evaluations[0]["eval/ce"]
    (teacher,) = (file.parent for file in (tmp_path / "b").glob("*/result.json"))
    second = (f"data.stories_ro.teacher={tmp_path}/t2", where[1])
    done = run(*TEACH, *second, "task=prepare", f"task.teacher={teacher}", output_dir=tmp_path / "a")
    assert done.returncode == 0, done.stderr
    finished(*TEACH, *second, output_dir=tmp_path / "d")
    kl = [r["eval/kl"] for r in records(tmp_path / "d") if "eval/kl" in r]
    assert kl[0] > 0.01
    assert kl[-1] < 0.5 * kl[0]
    for words, message in [
        (("objective.top_k=13",), "objective.top_k=13 and 12 are stored"),
        (("objective.temperature=2",), "objective.temperature=2 and it was written at 1"),
        (("model.chat_format=plain",), "was written for other rows"),
    ]:
        refused = run(*TEACH, *where, *words, output_dir=tmp_path / "c")
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr

"""task=generate on what task=export wrote, and on bases of 8 and 4 bits."""

import json
import shutil
import sys

import pytest
import torch

from tests.tasks.tiny_run import TOKENIZER, write_form, write_run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.models.adapters.quantised import Format
from tpu_experiments.storage import paths
from tpu_experiments.tasks import evaluate, generate
from tpu_experiments.tasks.export.forms import WRITERS

pytest_plugins = ("tests.gcs",)
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("root_logger")]
PROMPTS = ("Ce este Dunărea?", "Scrie o poveste scurtă despre un lup și o vulpe din pădure.")
NEW = 12
SMALL = ("task=generate", f"task.max_new_tokens={NEW}", "task.buckets=[32,96]", "hw.runtime=eager")


@pytest.fixture
def run(make_config, tmp_path):
    return write_run(tmp_path / "mine", make_config)


@pytest.fixture
def answers(make_config, tmp_path):
    """Text of the answers to the two prompts."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))

    def write(*overrides):
        output = tmp_path / "answers.jsonl"
        given = (f"task.prompts_file={tmp_path / 'prompts.txt'}", f"task.output={output}")
        generate.run(make_config(*SMALL, *given, *overrides))
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        output.unlink()
        return [line["text"] for line in lines]

    return write


def of_transformers(folder, *, change=None):
    """Greedy text of the folder's model and tokenizer by transformers, with its weights changed first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if change is not None:
        change(model)
    texts = []
    for prompt in PROMPTS:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, use_cache=True
        )
        written = out[0, ids.shape[1] :].tolist()
        ends = [place for place, token in enumerate(written) if token in (2, 4)]  # </s> and <|im_end|>
        texts.append(tokenizer.decode(written[: ends[0] if ends else None], skip_special_tokens=True).strip())
    return texts


def rounded(base):
    """Return a change that rounds the Linear weights of the layers to a base's codes and back."""
    format = Format(base)

    def change(model):
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                parameter.data = format.decode(format.quantise(parameter.data), dtype=torch.float32)

    return change


def test_the_merged_form_is_a_model_of_its_own(run, answers, make_config):
    folder = write_form(run, make_config)
    expected = of_transformers(folder)
    assert answers(f"task.run={run}") == expected, "float32: the merged weights compute what the adapter does"
    assert answers(f"task.run={run}", "task.weights=base") != expected
    shutil.rmtree(run / "adapter")
    assert answers(f"task.run={run}", "task.weights=merged") == expected
    elsewhere = run.parent / "elsewhere"
    folder.rename(elsewhere)
    assert answers(f"model.path={elsewhere}", f"model.tokenizer_path={elsewhere}") == expected


@pytest.mark.slow
@pytest.mark.parametrize("base", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_a_merged_model_in_8_and_4_bits(run, answers, make_config, base):
    folder = write_form(run, make_config)
    expected = of_transformers(folder, change=rounded(base))
    merged = (f"task.run={run}", "task.weights=merged", f"model.base={base}")
    assert answers(*merged) == expected
    if base == "nf4":
        assert expected != of_transformers(folder)
        assert answers(*merged[:2]) == of_transformers(folder), "in full where the command says nothing"


@pytest.mark.parametrize("base", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_the_same_text_by_xla(run, answers, base):
    """An adapter over a base that the command holds in 8 or 4 bits; the run held it in full."""
    given = (f"task.run={run}", f"model.base={base}", "task.buckets=[96]", "task.batch_rows=2")
    assert answers(*given, "hw.runtime=xla") == answers(*given)


@pytest.mark.parametrize("base", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_evaluation_of_a_run_on_a_base_of_fewer_bits(run, make_config, base):
    losses = {}
    for held in ("dense", base):
        given = ("task=evaluate", f"task.run={run}", f"model.base={held}", "hw.runtime=eager", "task.max_documents=2")
        evaluate.run(make_config(*given))
        file = "test_results.json" if held == "dense" else f"test_results-{base}.json"
        losses[held] = json.loads((run / file).read_text())["loss"]
    assert losses["dense"] != losses[base]
    assert losses[base] == pytest.approx(losses["dense"], rel=0.05), "codes of 4 bits lose little"


def test_arithmetic_in_float16(run, answers, make_config):
    """A GPU without bfloat16 computes so; greedy text of a tiny model rarely differs from float32's."""
    found = answers(f"task.run={run}", "task.dtype=float16")
    exact = answers(f"task.run={run}")
    assert [text[:3] for text in found] == [text[:3] for text in exact]
    with pytest.raises(ConfigError, match=r"torch_xla and TPUs compute in bfloat16 or float32; use task\.dtype"):
        make_config("task=generate", "task.dtype=float16", "hw.runtime=xla")
    with pytest.raises(ConfigError, match=r"model.base=int8 .*exceed float16's"):
        make_config(*SMALL, "task.dtype=float16", "model.base=int8")


# ---- llama.cpp ----------------------------------------------------------------------------------------------


def write_gguf(folder, file):
    """Write a merged Mistral, float32, as llama.cpp's `llama`, whose rotated halves are interleaved."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if token in special else 1 for token in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.to(torch.float32).numpy()
        for part, count in heads.items():
            if part in name:
                rows, columns = weight.shape
                halves = weight.reshape(count, 2, rows // count // 2, columns)
                weight = halves.swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def with_gguf(run, make_config):
    """The run with a GGUF file that loses nothing, and two that cannot be read: fewer bits, and an adapter."""
    merged = write_form(run, make_config)
    folder = run / "export" / "gguf"
    folder.mkdir()
    write_gguf(merged, folder / "mine-f16.gguf")
    for other in ("mine-q8_0.gguf", "adapter-f32.gguf"):
        (folder / other).write_text("not one")
    (folder / "export.json").write_text("{}")
    return run


def test_llama_cpp_writes_the_same_text(with_gguf, answers, make_config):
    expected = of_transformers(with_gguf / "export" / "merged")
    assert answers(f"task.run={with_gguf}", "task.weights=gguf") == expected
    file = with_gguf / "export" / "gguf" / "mine-f16.gguf"
    assert answers(f"task.run={with_gguf}", f"task.gguf={file}") == expected
    punished = ("task.repetition_penalty=1.3",)
    of_ours = answers(f"task.run={with_gguf}", *punished)
    assert of_ours != expected
    assert answers(f"task.run={with_gguf}", "task.weights=gguf", *punished) == of_ours
    cold = ("task.do_sample=true", "task.temperature=5", "task.top_k=1")
    assert answers(f"task.run={with_gguf}", "task.weights=gguf", *cold) == expected
    warm = ("task.do_sample=true", "task.top_k=0", "task.num_return_sequences=2")
    drawn = answers(f"task.run={with_gguf}", "task.weights=gguf", *warm)
    assert len(set(drawn)) == 4
    assert answers(f"task.run={with_gguf}", "task.weights=gguf", *warm) == drawn


def test_an_answer_that_llama_cpp_ends(with_gguf, make_config):
    """The token that ends it is llama.cpp's to know; here it is the first that it would write."""
    from tpu_experiments.export.generation import Ends
    from tpu_experiments.tasks.generate.llama_cpp import LlamaCpp

    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)
    ids = tokenizer("<s>Dunărea", add_special_tokens=False)["input_ids"]
    how = {"choice": make_config(*SMALL).task, "num_slots": 64, "max_new_tokens": 4, "num_threads": 1, "seed": 0}
    file = str(with_gguf / "export" / "gguf" / "mine-f16.gguf")
    *_, (plain,) = LlamaCpp(file, ends=Ends(frozenset({2})), **how).stream([ids], draws=[0], bucket=32)
    assert len(plain) == 4
    import gguf

    reader = gguf.GGUFReader(file, "r+")
    reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = plain[0]
    reader.data.flush()
    *_, (ended,) = LlamaCpp(file, ends=Ends(frozenset({2})), **how).stream([ids], draws=[0], bucket=32)
    assert ended == [2]


@pytest.mark.skipif("gguf" not in WRITERS, reason="task=export writes no GGUF here yet")
def test_llama_cpp_answers_from_what_task_export_wrote(run, answers, make_config):
    merged, _ = write_form(run, make_config), write_form(run, make_config, "gguf")
    assert answers(f"task.run={run}", "task.weights=gguf") == of_transformers(merged)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs hands aiohttp files of 1 MiB so
def test_exports_in_a_bucket(run, answers, make_config, gcs_bucket):
    folder = write_form(run, make_config)
    for file in (path for path in run.rglob("*") if path.is_file()):
        paths.copy_file(str(file), f"{gcs_bucket}/mine/{file.relative_to(run).as_posix()}")
    paths.write_text_atomic(f"{gcs_bucket}/mine/export/gguf/export.json", "{}")
    assert answers(f"task.run={gcs_bucket}/mine", "task.weights=merged") == of_transformers(folder)
    with pytest.raises(ConfigError, match=r"llama.cpp reads files of this machine; copy one of gs://"):
        answers(f"task.run={gcs_bucket}/mine", "task.weights=gguf")


REFUSED = {
    "no export": (["task.run={run}", "task.weights=merged"], r"task=export task.run=.* 'task.forms=\[merged\]'`\.$"),
    "no files": (["task.run={run}", "task.weights=gguf"], "gguf has no .gguf file"),
    "no file": (["task.run={run}", "task.gguf={run}/no.gguf"], "there is no such file"),
    "not one": (["task.run={run}", "task.gguf={run}/config.yaml"], "llama.cpp cannot load it"),
    "n-grams": (["task.run={run}", "task.weights=gguf", "task.no_repeat_ngram_size=3"], "llama.cpp cannot forbid"),
    "a type": (["task.run={run}", "task.weights=gguf", "task.dtype=float32"], "the file has its data type"),
    "two sources": (["task.run={run}", "task.weights=base", "task.gguf={run}/a.gguf"], "leave one out"),
    "an adapter too": (["task.gguf={run}/a.gguf", "task.adapter={run}/adapter"], "task.gguf= with task.adapter="),
    "no run": (["task.weights=merged"], "task.weights=merged without task.run="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(run, make_config, case):
    if case == "no files":
        (run / "export" / "gguf").mkdir(parents=True)
        (run / "export" / "gguf" / "export.json").write_text("{}")
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        generate.run(make_config(*SMALL, "task.prompt=a", *(word.format(run=run) for word in overrides)))


def test_the_extra_is_named_where_it_is_missing(with_gguf, make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError, match=r"install the extra: pip install 'tpu_experiments\[export\]'"):
        generate.run(make_config(*SMALL, "task.prompt=a", f"task.run={with_gguf}", "task.weights=gguf"))


def test_the_commands_seed_decides_what_is_sampled(run, answers):
    """The run has a seed of its own, which decides its weights alone."""
    sampled = (f"task.run={run}", "task.do_sample=true", "task.temperature=2.0")
    assert answers(*sampled, "seed=1") == answers(*sampled, "seed=1")
    assert answers(*sampled, "seed=1") != answers(*sampled, "seed=2")

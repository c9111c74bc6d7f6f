"""Every causal model type of the installed transformers: computed as transformers does, refused, or wrong.

    python -m tests.benchmarks.decoders RESULTS.jsonl [--only TYPE,...] [--seconds 120] [--gib 6]
    python -m tests.benchmarks.decoders RESULTS.jsonl --table

Of each type in `AutoModelForCausalLM`'s mapping a small checkpoint of random weights is written by `save_pretrained`
and loaded as training loads it, in a process of its own with limits of time and memory. Two documents in one row are
compared with what transformers computes of each alone: by each value of `model.attention`, by the layers folded into a
loop, and with an adapter on every Linear, beside PEFT's of the same weights, with its gradients. Tokens are generated
with a cache of keys and values. A type is `right` if all that was not refused agrees to 1e-5 of the largest logit,
`refused` if every way was, by one sentence. Where packed rows alone were refused, rows of one document are compared.
"""

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import resource
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.rope import row_limits
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.isolation import require_isolation, require_left_padding
from tpu_experiments.tasks.certify.numerics import (
    DOCUMENTS,
    GRADIENT_TOLERANCE,
    TOLERANCE,
    SmallCheckpoint,
    alone,
    rows_of,
    write_random,
)

ATTENTIONS = ("flash", "sdpa", "eager")
ADAPTERS = LoraConfig(r=4, alpha=8.0, targets=["all-linear"])
VOCABULARY = 320
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("unpadded_vocab_size", "ngram_vocab_size_base"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim_model_base", "embedding_size", "embedding_dim"), 64),
    **dict.fromkeys(("emb_dim", "lru_width", "attention_hidden_size", "word_embed_proj_dim", "mamba_d_ssm"), 64),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "backbone_hidden_size", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dim_ff", "dff", "ffn_hidden_size", "d_inner"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"), 96),
    **dict.fromkeys(("expert_ffn_hidden_size", "dense_intermediate_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_head", "dim_head", "swa_head_dim", "attention_head_size"), 16),
    **dict.fromkeys(("global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "attention_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "d_rel", "laurel_rank", "adapter_rank"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "index_topk_blocks"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "first_k_dense_replace", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "window_size"), 8),
    **dict.fromkeys(("local_attention", "sliding_window_size", "keep_window_size", "index_block_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    "index_topk": 64,
    "pronunciation_vocab_size": 910,
}
"""Values of small configs, by the names that config classes give to sizes."""
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MANY_STATES = {"mamba_n_heads": 8, "mamba_expand": 2}
MANY_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
WIDE = {"attention_hidden_size": 128, "attention_head_dim": 32}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
OWN: dict[str, dict[str, Any]] = {
    "bamba": MANY_STATES,
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": PLAIN_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": MANY_EXPERTS,
    "dots1": MANY_EXPERTS,
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MANY_STATES,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **WIDE},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, **WIDE},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further values that the config of a type needs."""
VARIANTS: dict[str, dict[str, Any]] = {
    "bert: an encoder": {"is_decoder": False},
    "falcon: ALiBi": {"alibi": True},
    "gemma4_text: layers that share keys": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "lfm2: convolutions": {"layer_types": ["conv", "full_attention"]},
    "llama: dynamic RoPE": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "llama: dynamic RoPE of long rows": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "llama: YaRN": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama: tied head": {"tie_word_embeddings": True},
    "llama4_text: scaled by position": {"floor_scale": 8, "attn_scale": 0.5},
    "ministral3: scaled by position": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "phi3: LongRoPE": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    },
    "phi3: LongRoPE of long rows": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 16,
        },
        "original_max_position_embeddings": 16,
    },
    "qwen2: windows in late layers": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_next: linear attention alone": {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2},
}
"""Further configurations, by their type and what is of its own in them."""


def small_config(name: str) -> PretrainedConfig:
    """Make a small config of a type or variant; one of an encoder attends to earlier tokens alone."""
    model_type, is_variant, _ = name.partition(":")
    kind = CONFIG_MAPPING[model_type]
    values = small_values(kind, own={**OWN.get(model_type, {}), **(VARIANTS[name] if is_variant else {})})
    config: PretrainedConfig = kind(**values)
    return config


def small_values(kind: type[PretrainedConfig], *, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for a config class: small sizes for all it has, and for its parts."""
    names = {kind.attribute_map.get(name, name) for name in (*SIZES, *IDS)}
    sizes = {kind.attribute_map.get(name, name): value for name, value in {**SIZES, **IDS}.items()}
    try:
        default: Any = kind()
        given = default.to_dict()
    except Exception:  # its defaults do not go together; the sizes may
        default, given = kind, {name: getattr(kind, name, None) for name in names}
    values = {
        name: value
        for name, value in sizes.items()
        if (isinstance(given.get(name), int) or (name in IDS and name in given)) and not _is_computed(kind, name)
    }
    kinds = given.get("layer_types")
    if isinstance(kinds, list) and kinds and not _is_computed(kind, "layer_types"):
        layers = max(2, *(kinds.index(each) + 1 for each in set(kinds)))
        values[kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # latent attention has all heads
        values["num_key_value_heads"] = values["num_attention_heads"]
    if given.get("is_decoder") is False:
        values["is_decoder"] = True
    for name, part in kind.sub_configs.items():
        inner = type(getattr(default, name, None)) if name in own or getattr(default, name, None) is not None else part
        if isinstance(inner, type) and issubclass(inner, PretrainedConfig) and inner is not PretrainedConfig:
            with contextlib.suppress(Exception):  # a part that has no defaults is left as it is
                values[name] = small_values(inner, own={})
    merged = values | {name: value for name, value in own.items() if not isinstance(value, dict)}
    for name, value in own.items():
        if isinstance(value, dict):
            merged[name] = {**merged.get(name, {}), **value}
    return merged


def _is_computed(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), property)


class Case(SmallCheckpoint):
    """One type's checkpoint, as the product loads it."""

    def __init__(self, model_type: str, folder: Path, reference: PreTrainedModel) -> None:
        super().__init__(folder, reference, name=model_type, lora=ADAPTERS)
        self.vocabulary = VOCABULARY
        self.found: dict[str, Any] = {"refusals": {}}

    def compare(self) -> dict[str, Any]:
        """Try every attention on packed rows, then on rows of one document."""
        for is_packed in (True, False):
            rows = self.rows(is_packed=is_packed)
            expected = alone(self.reference, rows)
            if not bool(expected.isfinite().all()):
                return self.found | {"outcome": "no config", "why": "transformers' own logits are not finite"}
            for attention in ATTENTIONS:
                key = attention if is_packed else f"{attention}, one document"
                try:
                    self._attend(attention, key, rows, expected)
                except ConfigError as error:
                    self.found["refusals"][key] = str(error)
            if "attention" in self.found:
                self.found["rows"] = "packed" if is_packed else "one document"
                break
        return self.found | {"outcome": self._outcome()}

    def _outcome(self) -> str:
        if "attention" not in self.found:
            return "refused"
        wrong = [k for k, v in self.found["apart"].items() if v > (GRADIENT_TOLERANCE if "grad" in k else TOLERANCE)]
        return f"wrong: {', '.join(wrong)}" if wrong else "right"

    def _attend(self, attention: str, key: str, rows: dict[str, Tensor], expected: Tensor) -> None:
        source = self.source(attention)
        describe(source, lora=LoraConfig(r=0))  # in the order of tasks/setup.py
        for name, limit in row_limits(source.config).items():
            if rows["ids"].shape[1] > limit:
                raise ConfigError(f"trainer.seq_len={rows['ids'].shape[1]} is longer than allowed ({name}={limit}).")
        require_isolation(source, is_packed=bool(rows["segments"].max() > 1))
        differences: dict[str, float] = self.found.setdefault("apart", {})
        for name, value in self.logits_apart(self.built(source), rows, expected).items():
            differences[key if name == "logits" else f"{key} {name}"] = value
        if "attention" in self.found:
            return
        self.found["attention"] = attention
        for name, check in (("folded", self._folded), ("adapter", self._adapter), ("generated", self._generated)):
            try:
                check(source, rows, expected, differences)
            except ConfigError as error:
                self.found["refusals"][name] = str(error)
        if "adapter" in self.found["refusals"]:
            self.lora = replace(ADAPTERS, targets=attention_leaves(self.built(source).module))
            with contextlib.suppress(ConfigError):
                self._adapter(source, rows, expected, differences)

    def _folded(
        self, source: HuggingFaceModel, rows: dict[str, Tensor], expected: Tensor, differences: dict[str, float]
    ) -> None:
        differences["folded"], self.found["folds"] = self.folds(source, rows, lora=None)

    def _generated(
        self, source: HuggingFaceModel, rows: dict[str, Tensor], expected: Tensor, differences: dict[str, float]
    ) -> None:
        """Compare the likeliest tokens after a prompt with those that transformers computes without a cache."""
        require_left_padding(source)
        ours, theirs = self.generates(source, rows["ids"][0, : DOCUMENTS[1]].tolist())
        differences["generated"] = float(ours != theirs)

    def _adapter(
        self, source: HuggingFaceModel, rows: dict[str, Tensor], expected: Tensor, differences: dict[str, float]
    ) -> None:
        found = self.adapts(source, rows, expected)
        self.found |= {"targets": found.targets, "adapter moves": found.moves}
        self.found |= {"peft": found.peft} if found.peft else {}
        differences["adapter"] = found.logits
        if found.gradients is not None:
            differences["gradients"] = found.gradients


def attention_leaves(module: nn.Module) -> list[str]:
    """Return the last parts of the names of attention's Linear modules."""
    linears = [name for name, part in module.named_modules() if type(part) is nn.Linear]
    return sorted({name.rpartition(".")[2] for name in linears if "att" in name.rpartition(".")[0]})


def tried(model_type: str) -> dict[str, Any]:
    """Compare one type in this process."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"  # no check is skipped because it passed before
        try:
            config = small_config(model_type)
            reference = write_random(config, Path(place))
            count = sum(p.numel() for p in reference.parameters())
            alone(reference, rows_of(DOCUMENTS[:1], vocabulary=VOCABULARY))
        except Exception as error:  # each class checks and computes in its own way
            return {"outcome": "no config", "why": one_line(error, most=300), "where": traceback.format_exc()[-1500:]}
        case = Case(model_type, Path(place), reference)
        try:
            return case.compare() | {"parameters": count}
        except Exception as error:
            where = traceback.format_exc()[-3000:]
            return case.found | {
                "outcome": "traceback",
                "why": one_line(error, most=300),
                "where": where,
                "parameters": count,
            }


def in_child(model_type: str, answers: Connection, *, gib: float) -> None:
    """Compare one type within a limit of memory, and send what was found."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    import torch_xla

    torch_xla.device()  # before the first backward pass: torch sets up its threads for the devices that it knows then
    with contextlib.redirect_stdout(io.StringIO()):
        answers.send(tried(model_type))


def compared(model_type: str, *, seconds: float, gib: float) -> dict[str, Any]:
    """Compare one type in a process of its own."""
    context = multiprocessing.get_context("fork")
    answers, sent = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(model_type, sent), kwargs={"gib": gib})
    begin = time.perf_counter()
    child.start()
    sent.close()
    try:
        found = answers.recv() if answers.poll(seconds) else {"outcome": "limit", "why": f"more than {seconds:.0f} s"}
    except EOFError:
        child.join()
        found = {"outcome": "limit", "why": f"ended with {child.exitcode} (memory: {gib:g} GiB)"}
    child.kill()
    child.join()
    taken = round(time.perf_counter() - begin, 1)
    return {"type": model_type, **found, "seconds": taken, "date": time.strftime("%Y-%m-%d")}


def line_of(result: Mapping[str, Any]) -> str:
    """Return one line of the log."""
    far = max(result.get("apart", {}).values(), default=0.0)
    why = result.get("why") or next(iter(result.get("refusals", {}).values()), "")
    return f"{result['type']:28} {result['outcome']:12.60} {result.get('attention', '')} {far:.1e} {why:.160}"


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of tests/benchmarks/decoders.md."""
    right = [each for each in results if each["outcome"] == "right"]
    groups = {
        "right, documents in one row": [each for each in right if each["rows"] == "packed"],
        "right, one document in a row; packed rows refused": [each for each in right if each["rows"] != "packed"],
    }
    yield "| outcome | types |"
    yield "|---|---|"
    for text, members in groups.items():
        by_attention = {name: [m["type"] for m in members if m["attention"] == name] for name in ATTENTIONS}
        for name, types in by_attention.items():
            if types:
                yield f"| {text}; `{name}` ({len(types)}) | {', '.join(types)} |"
    for each in results:
        if each["outcome"] != "right":
            reason = each.get("why") or list(each["refusals"].values())[-1]
            yield f"| {each['outcome']} | {each['type']}: {short(reason)} |"


def short(sentence: str) -> str:
    """Return what a refusal says between its key and its remedy."""
    parts = sentence.replace("|", "/").split("; ")
    return textwrap.shorten(parts[1] if len(parts) > 1 else parts[0], 170, placeholder=" ...")


def main() -> None:
    """Compare the types that the file of results lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="types, with commas; compared again")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--gib", type=float, default=6)
    parser.add_argument("--table", action="store_true", help="print what there is")
    args = parser.parse_args()
    lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
    results = {result["type"]: result for result in map(json.loads, lines)}
    only = [name for name in args.only.split(",") if name]
    for model_type in (
        () if args.table else only or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS} - set(results))
    ):
        result = compared(model_type, seconds=args.seconds, gib=args.gib)
        results[model_type] = result
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(line_of(result), flush=True)
    counts = Counter(result["outcome"].partition(":")[0] for result in results.values())
    print(f"transformers {transformers_version}: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    print(*table([results[name] for name in sorted(results)]), sep="\n")


if __name__ == "__main__":
    main()

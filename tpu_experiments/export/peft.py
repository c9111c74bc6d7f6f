"""Export of the adapter in PEFT's layout: `adapter_model.safetensors` and `adapter_config.json`.

PEFT loads it with `PeftModel.from_pretrained(base, folder)`; names are Hugging Face's with PEFT's prefix and suffix.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.model_schema import (
    LoraConfig,
    Value,
    has_patterns,
    is_saved,
    pattern_key,
    tokens_of,
    value_of_pattern,
)
from tpu_experiments.export.generation import GENERATION_CONFIG
from tpu_experiments.export.tokenizer import write_tokenizer
from tpu_experiments.models.adapters.experts import MATRICES
from tpu_experiments.runtime.stacked import (
    EMBEDDING_PARTS,
    TOKEN_ROWS,
    adapter_of,
    is_adapter_part,
    is_of_parameter,
    is_of_rows,
    weight_of,
)
from tpu_experiments.storage import paths
from tpu_experiments.storage.given_folders import ADAPTER_CONFIG, ADAPTER_FILE

PREFIX = "base_model.model."
DECODER = "model.language_model."
"""Prefix of a decoder's names in a vision-language model (Gemma 3 4B); in a pure decoder it is `model.`."""
LOW_RANK = ("lora_A", "lora_B")
INNER = ".base_layer"
"""Last part of the name of what PEFT has wrapped: a module with an adapter or rows, or the experts of a layer."""
ROWS = ".token_adapter"
"""Part of PEFT's names of trained rows."""
CLASSIFIER = "SEQ_CLS"
"""PEFT's `task_type` of adapters of a classifier."""
DECODER_TASK = "CAUSAL_LM"
"""PEFT's `task_type` of adapters of a decoder."""
TASK_TYPES = {"sequence_classification": CLASSIFIER}
"""The same by the head of a model's source, where it is none of a decoder."""
ROUNDED = "LR_QAT"
"""`peft_type` of adapters of rounded weights (models/adapters/low_rank_qat.py), which are this program's alone."""


def write_adapter(
    folder: str,
    *,
    parameters: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    lora: LoraConfig,
    base_path: str,
    revision: str | None,
    is_transposed: bool = False,
    rounded: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation: str | None = None,
    lines: Iterable[str] = (),
    task_type: str | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Write the adapter of host tensors `parameters` (`<module>.lora_A`, `.lora_B`, `.lora_magnitude_vector`).

    Those of experts are `<module>.parameter_adapters.<matrix>.lora_A` and `.lora_B`, an embedding's `.lora_embedding_A`
    and `.lora_embedding_B`, and trained rows `.trainable_tokens_delta`.

    Tensors of other names were trained whole: those of `lora.modules_to_save`, and a classifier's head. Of
    rounded weights (`.lora_weight_scale`) the `peft_type` is one that PEFT does not know: it would add B A to the base.

    Args:
        initial: PiSSA's A and B before training. The adapter is for the original base weights, not the reduced ones, so
            the export is B A - B0 A0, of rank 2 r.
        is_transposed: the base weights are (in, out), as in GPT-2's Conv1D.
        rounded: what the adapted weights are rounded to, if they are.
        tokenizer: written beside the adapter, with the chat template it was trained with.
        generation: text of generation_config.json; None writes none.
        lines: text that the tokenizer, read back, is compared on.
        tied: further names of parameters, as the head of a tied embedding has one; PEFT reads it under each.
        task_type: PEFT's name of what the model is for; None is a classifier where it has a head, and else a decoder.

    Returns:
        SHA-256 of the tensors' file by its name.
    """
    tensors, whole = without_start(parameters, initial=initial, lora=lora)
    layout = {_outer_name(name): t.detach().contiguous() for name, t in written_experts(tensors).items()}
    for name, others in (tied or {}).items():
        layout |= _of_tied_head(tensors, name.removesuffix(".weight"), others) if lora.ensure_weight_tying else {}
        layout |= {_outer_name(each): tensors[name].detach().clone() for each in others if name in tensors}
    paths.make_dirs(folder)
    content = save(layout, metadata={"format": "pt"})
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer, lines=lines)
    if generation is not None:
        paths.write_text_atomic(paths.join(folder, GENERATION_CONFIG), generation)
    paths.write_bytes_atomic(paths.join(folder, ADAPTER_FILE), content)
    config = adapter_config(
        lora, r=whole.r, alpha=whole.alpha, modules=_modules(parameters), base_path=base_path, revision=revision
    ) | {"fan_in_fan_out": is_transposed}
    others = [name for name in parameters if not is_adapter_part(name)]
    names_of = {name: (name, *(tied or {}).get(name, ())) for name in others}
    saved = [name for name, own in names_of.items() if any(is_saved(inner_name(each), lora) for each in own)]
    head = _head_modules(set(others).difference(saved))
    config["task_type"] = task_type or (CLASSIFIER if head else DECODER_TASK)
    whole_modules = sorted({*head, *(name.rpartition(".")[0] for name in saved)})
    config |= {"modules_to_save": whole_modules} if whole_modules else {}
    config |= {"ensure_weight_tying": True} if lora.ensure_weight_tying else {}
    matrices = _matrices(parameters)
    config |= {"target_parameters": matrices} if matrices else {}
    rows = {name.rpartition(".")[0] for name in parameters if is_of_rows(name)}
    config |= (
        {"trainable_token_indices": {name: tokens_of(lora, inner_name(name)) for name in sorted(rows)}} if rows else {}
    )
    shared = [each.removesuffix(".weight") for others in (tied or {}).values() for each in others]
    names = {name: inner_name(name) for name in (*_modules(parameters), *matrices, *shared)}
    if has_patterns(whole):
        config["rank_pattern"] = renamed(whole.rank_pattern, names, default=whole.r)
        config["alpha_pattern"] = renamed(whole.alpha_pattern, names, default=whole.alpha)
    config |= {"peft_type": ROUNDED, "rounded": dict(rounded)} if rounded else {}
    paths.write_text_atomic(paths.join(folder, ADAPTER_CONFIG), json.dumps(config, indent=2))
    return {ADAPTER_FILE: hashlib.sha256(content).hexdigest()}


def without_start(
    parameters: Mapping[str, Tensor], *, initial: Mapping[str, Tensor], lora: LoraConfig
) -> tuple[dict[str, Tensor], LoraConfig]:
    """Return the adapter for the original base with its config: of PiSSA B A - B0 A0, of rank 2 r; others unchanged.

    Args:
        initial: PiSSA's A and B before training.
    """
    tensors = dict(parameters)
    if not initial:
        return tensors, lora
    # DoRA's lengths stay: W + B A - B0 A0 has the rows of the reduced base with B A.
    for name, start in initial.items():
        tensors[name] = _with_initial(name, tensors[name], start.to(tensors[name]))
    factor = 2 if lora.scaling == "alpha_over_r" else math.sqrt(2)
    ranks = {key: 2 * rank for key, rank in lora.rank_pattern.items()}
    alphas = {key: factor * alpha for key, alpha in lora.alpha_pattern.items()}
    patterns = replace(lora, rank_pattern=ranks, alpha_pattern=alphas)
    return tensors, replace(patterns, r=2 * lora.r, alpha=factor * lora.alpha)


def wrapped(matrices: Collection[str]) -> dict[str, str]:
    """Return the modules that have the adapters of matrices of experts in PEFT's layout.

    PEFT wraps the module of the experts once for each of its matrices, in the order of its parameters, so that the last
    one's adapter has the shortest name.
    """
    found: dict[str, str] = {}
    for weight in matrices:
        path, _, leaf = weight.rpartition(".")
        outside = [each for each in MATRICES[MATRICES.index(leaf) + 1 :] if f"{path}.{each}" in matrices]
        found[weight] = path + INNER * len(outside)
    return found


def written_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the adapters of experts by PEFT's modules and in its shapes, the inverse of `read_experts`.

    A (E, r, in) is (E r, in) there, and B (E, out, r) is (out, r E).
    """
    found = {name: tensor for name, tensor in tensors.items() if not is_of_parameter(name)}
    for weight, module in wrapped(_matrices(tensors)).items():
        a, b = (tensors[f"{adapter_of(weight)}.{part}"] for part in LOW_RANK)
        found |= {f"{module}.lora_A": a.flatten(0, 1), f"{module}.lora_B": b.permute(1, 2, 0).flatten(1)}
    return found


def read_experts(tensors: Mapping[str, Tensor], *, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Return tensors with the adapters of experts under their own names and in their own shapes.

    Args:
        ranks: of the adapters of matrices of experts, by the names of the matrices.

    Raises:
        ValueError: the tensors of one are not there, or not of its rank.
    """
    found = dict(tensors)
    for weight, module in wrapped(ranks).items():
        a, b = (found.pop(f"{module}.{part}", torch.empty(0)) for part in LOW_RANK)
        r = ranks[weight]
        if a.ndim != 2 or b.ndim != 2 or not len(a) or len(a) % r or b.shape[1] != len(a):
            raise ValueError(
                f"{module}.lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} are no adapters of rank {r} of experts"
            )
        name = adapter_of(weight)
        found[f"{name}.lora_A"] = a.unflatten(0, (-1, r)).contiguous()
        found[f"{name}.lora_B"] = b.unflatten(1, (r, -1)).permute(2, 0, 1).contiguous()
    return found


def renamed(patterns: Mapping[str, Value], names: Mapping[str, str], *, default: Value) -> dict[str, Value]:
    """Return patterns that say of modules under other names what `patterns` say of them; unused ones are left out.

    They are the same where they fit the other names too, and else those names themselves.

    Args:
        names: the modules' names here by those there.
    """
    used = {pattern_key(patterns, name) for name in names.values()}
    same = {key: value for key, value in patterns.items() if key in used}
    wanted = {name: value_of_pattern(patterns, own, default=default) for name, own in names.items()}
    if all(value_of_pattern(same, name, default=default) == value for name, value in wanted.items()):
        return same
    return {name: value for name, value in wanted.items() if value != default}


def read_layout(
    layout: Mapping[str, Tensor],
    *,
    initial: Mapping[str, Tensor],
    tied: Mapping[str, Sequence[str]] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Return the parameters from an adapter's tensors, the inverse of `write_adapter`.

    Args:
        layout: tensors under PEFT's names.
        initial: PiSSA's A and B before training, whose part of the rank is cut off.
        tied: further names of parameters, as of `write_adapter`.
        ranks: of the adapters of matrices of experts, as of `read_experts`, which raises ValueError.
    """
    found = {inner_name(key): tensor for key, tensor in layout.items()}
    for first, others in (tied or {}).items():
        again = [inner_name(each) for each in others if inner_name(first) in found]
        if f"{inner_name(first).removesuffix('.weight')}.{EMBEDDING_PARTS[0]}" in found:
            again += [f"{inner_name(each).removesuffix('.weight')}.{part}" for each in others for part in LOW_RANK]
        found = {name: tensor for name, tensor in found.items() if name not in again}
    for name, start in initial.items():
        rank = start.shape[0] if name.endswith("lora_A") else start.shape[1]
        found[name] = (found[name][:rank] if name.endswith("lora_A") else found[name][:, :rank]).contiguous()
    return read_experts(found, ranks=ranks or {})


def _of_tied_head(tensors: Mapping[str, Tensor], embedding: str, heads: Iterable[str]) -> dict[str, Tensor]:
    """Return A and B of heads that are tied to an adapted embedding, which are its B and A transposed."""
    pair = [tensors.get(f"{embedding}.{part}") for part in EMBEDDING_PARTS]
    names = [_outer_name(f"{head.removesuffix('.weight')}.{part}") for head in heads for part in reversed(LOW_RANK)]
    return {name: own.detach().t().contiguous() for name, own in zip(names, pair * 2, strict=False) if own is not None}


def _outer_name(name: str) -> str:
    if is_of_rows(name):
        return f"{PREFIX}{name.removesuffix(f'.{TOKEN_ROWS}')}{ROWS}.{TOKEN_ROWS}"
    return f"{PREFIX}{name}.weight" if name.endswith(LOW_RANK) else f"{PREFIX}{name}"


def inner_name(key: str) -> str:
    """Return the name, of a tensor or module in PEFT's layout, that it has in a decoder."""
    name = key.removeprefix(PREFIX).replace(f"{ROWS}.", ".").replace(f"{INNER}.weight", ".weight")
    short = name.removesuffix(".weight")
    name = short if is_adapter_part(short) else name
    return "model." + name.removeprefix(DECODER) if name.startswith(DECODER) else name


def adapter_config(
    lora: LoraConfig, *, r: int, alpha: float, modules: list[str], base_path: str, revision: str | None
) -> dict[str, Any]:
    """Return the fields of PEFT's LoraConfig that define the adapter; the others keep PEFT's defaults."""
    return {
        "peft_type": "LORA",
        "task_type": DECODER_TASK,
        "base_model_name_or_path": base_path,
        "revision": revision,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.scaling == "alpha_over_sqrt_r",
        "use_dora": lora.dora,
        "target_modules": modules,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _modules(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the full names of the adapted modules, which are exact also where targets are globs."""
    others = (is_of_parameter, is_of_rows)
    parts = [name for name in parameters if is_adapter_part(name) and not any(is_one(name) for is_one in others)]
    return sorted({name.rpartition(".")[0] for name in parts})


def _matrices(parameters: Iterable[str]) -> list[str]:
    """Return the full names of the adapted matrices of experts."""
    return sorted({weight_of(name.rpartition(".")[0]) for name in parameters if is_of_parameter(name)})


def _head_modules(names: Iterable[str]) -> set[str]:
    """Return the modules of a classifier's head, by the first part of their names; a base model's pooler by two."""
    split = [name.split(".") for name in names]
    return {".".join(parts[:2]) if parts[1] == "pooler" else parts[0] for parts in split}


def _with_initial(name: str, tensor: Tensor, start: Tensor) -> Tensor:
    if name.endswith("lora_A"):
        return torch.cat([tensor, start], dim=0)
    return torch.cat([tensor, -start], dim=1)

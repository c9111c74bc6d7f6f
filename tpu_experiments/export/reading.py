"""Reading of LoRA adapters in PEFT's layout, of any origin, as tensors under the model's names."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import (
    LoraConfig,
    ModelConfig,
    is_named,
    is_saved,
    is_target,
    lora_of,
    pattern_problem,
    rounded_settings,
)
from tpu_experiments.config.regular_files import NotRegular
from tpu_experiments.export.peft import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CLASSIFIER,
    INNER,
    PREFIX,
    ROUNDED,
    inner_name,
    read_layout,
    renamed,
    wrapped,
)
from tpu_experiments.models.adapters.experts import MATRICES
from tpu_experiments.runtime.stacked import (
    EMBEDDING_PARTS,
    LEARNT_SCALE,
    MAGNITUDE,
    TOKEN_ROWS,
    is_adapter_part,
    is_of_linear,
    is_of_parameter,
    is_of_rows,
    weight_of,
)
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.tensors import require_finite

A, B = ".lora_A.weight", ".lora_B.weight"
EXPERTS, OF_ONE_EXPERT = "experts", re.compile(r"\.experts\.\d+\.")
"""End of the name of a module of experts in transformers; what names of adapters had in its version 4."""
EMBEDDING_A, EMBEDDING_B = (f".{part}" for part in EMBEDDING_PARTS)
REFUSED = (
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "arrow_config",
    "kasa_config",
)
"""Fields of PEFT's LoraConfig (0.21) that change or extend what an adapter computes; LoRA and DoRA have them empty."""
WHOLE = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of the embedding and the head, by which PEFT knows them."""
COPY, BEFORE = "modules_to_save", "original_module"
"""Parts of names under which PEFT writes a module that is trained whole once more, and as it was before."""
CHOOSING: dict[str, tuple[type, str]] = {
    "target_modules": (str, "a list of names or a pattern"),
    "exclude_modules": (str, "a list of names or a pattern"),
    "layers_to_transform": (int, "a number or a list of numbers"),
    "layers_pattern": (str, "a name or a list of names"),
}
"""Fields that say which modules have an adapter, with the kind of one value, which may be a list of such."""
OWN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base unchanged; with others PEFT changes the base when it loads."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA or DoRA adapter on the host."""

    lora: LoraConfig
    """Rank, scale and targets; the targets are the full names of the modules that have tensors."""
    tensors: dict[str, Tensor]
    """A and B of every adapted module, with DoRA the lengths of its rows, of rounded weights their scales, and of a
    classifier its head; rows of tokens, and an embedding's own weight where PEFT wrote that with its adapter."""
    base: str
    """Name or path of its base model as in adapter_config.json; may be empty."""
    rounded: dict[str, Any] | None = None
    """What the adapted weights are rounded to (`model_schema.rounded_settings`); None where they are not."""
    named: tuple[str, ...] = ()
    """Further targets of its adapter_config.json, whose modules have tensors unless some of the file are missing."""

    @property
    def whole(self) -> LoraConfig:
        """Return `lora` with the modules that have no tensors although adapter_config.json targets them."""
        return replace(self.lora, targets=[*self.lora.targets, *self.named])

    @property
    def carried(self) -> LoraConfig:
        """Return `whole` without the targets of which the file has no module, since a model may have none either."""
        owners = self.lora.targets
        named = [target for target in self.named if any(is_target(owner, target) for owner in owners)]
        return replace(self.lora, targets=[*owners, *named])


def read_adapter(folder: str, *, has_head: bool = False) -> Adapter:
    """Read the adapter in a local or remote folder; also one of rounded weights, which this program wrote.

    Args:
        has_head: it is a classifier's, with the tensors of a head.

    Raises:
        ConfigError: there is no adapter, it is neither LoRA nor DoRA, or it has no tensors, or NaN or infinite values.
    """
    try:
        config: dict[str, Any] = strict_json.loads(paths.read_bytes(paths.join(folder, ADAPTER_CONFIG)))
        layout = load(paths.read_bytes(paths.join(folder, ADAPTER_FILE)))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(
            f"{folder}; no {ADAPTER_CONFIG} or no {ADAPTER_FILE} there; name the folder of a LoRA adapter that PEFT or "
            "this program wrote."
        ) from error
    except NotRegular:
        raise
    except (ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder}; its adapter cannot be read ({error!r}); write or copy it again.") from error
    lora = _settings(config, place=paths.join(folder, ADAPTER_CONFIG))
    alone = next(filter(OF_ONE_EXPERT.search, sorted(layout)), None)
    if alone is not None:
        raise ConfigError(
            f"{folder}; {alone} is of one expert, which transformers 5 holds with the others; load it over its base "
            "with PEFT and save it again, which writes the form that is read here."
        )
    layout = _without_copies(layout, place=paths.join(folder, ADAPTER_FILE))
    names = {inner_name(name): name for name in sorted(_names_of_settings(layout, lora))}
    layout = _without_tied(_without_rows_of_head(layout, config.get("trainable_token_indices")), lora)
    dora, is_rounded = lora.dora, config.get("peft_type") == ROUNDED
    is_refused = config.get("task_type") == CLASSIFIER and not has_head and lora.modules_to_save
    more = [
        *([f"modules_to_save={lora.modules_to_save}"] if is_refused else []),
        *_more_in(config),
        *_more_among(layout, lora=lora, is_rounded=is_rounded),
    ]
    if more:
        raise ConfigError(
            f"{folder}; it is more than a LoRA or DoRA adapter ({', '.join(more)}); merge it into its base with PEFT's "
            "merge_and_unload, save that, and give its folder as model.path (of task=generate also as task.base)."
        )
    place = paths.join(folder, ADAPTER_FILE)
    if not layout:
        raise ConfigError(f"{place}; it holds no tensors, so that nothing would be added; write or copy it again.")
    for name, tensor in sorted(layout.items()):
        require_finite(tensor, name=name, place=place)
    try:
        tensors = read_layout(layout, initial={}, ranks=_ranks_of_matrices(layout, lora))
    except ValueError as error:
        raise ConfigError(f"{place}; {error}; write or copy it again.") from error
    absent = [name for name in lora.modules_to_save if not any(map(partial(_is_of, module=name), layout))]
    if absent:
        raise ConfigError(f"{place}; modules_to_save has {absent[0]}, and the file no tensor of it; copy it again.")
    owners = sorted({name.rpartition(".")[0] for name in tensors if is_adapter_part(name) and not is_of_rows(name)})
    targets = [name for name in owners if not is_of_parameter(name)]
    _require_targeted(targets, names, config, lora, place=place)
    linears = sorted({name.rpartition(".")[0] for name in tensors if is_of_linear(name)})
    lacking = [name for name in linears if dora and f"{name}.{MAGNITUDE}" not in tensors]
    if lacking:
        raise ConfigError(
            f"{place}; use_dora=true and {lacking[0]} has no {MAGNITUDE}; write or copy it again, or set "
            f"use_dora=false in {ADAPTER_CONFIG} if it is a plain LoRA adapter."
        )
    lora = replace(
        lora,
        targets=targets,
        target_parameters=[weight_of(name) for name in owners if is_of_parameter(name)],
        rank_pattern=renamed(lora.rank_pattern, names, default=lora.r),
        alpha_pattern=renamed(lora.alpha_pattern, names, default=lora.alpha),
        trainable_token_indices=_tokens(config.get("trainable_token_indices"), tensors, place=place),
    )
    rounded = dict(config.get("rounded") or {}) if is_rounded else None
    base, named = str(config.get("base_model_name_or_path") or ""), _named_targets(config)
    return Adapter(lora, tensors, base=base, rounded=rounded, named=tuple(n for n in named if n not in targets))


def _settings(config: Any, *, place: str) -> LoraConfig:
    """Return the rank, scale and kind of a LoRA adapter's settings; patterns are for names in its file.

    Raises:
        ConfigError: they are another kind of adapter's, or a value is not of its type, not finite or out of bounds.
    """
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{place}; it names no peft_type, so it is no adapter's; copy the adapter's own file again.")
    if kind not in ("LORA", ROUNDED):
        raise ConfigError(
            f"{place}; peft_type={kind}, and only LoRA and DoRA are read here; merge it into its base with PEFT's "
            "merge_and_unload, save that, and give its folder as model.path (of task=generate also as task.base)."
        )
    r, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(r, int) or isinstance(r, bool) or r < 1:
        raise ConfigError(f"{place}; r={r!r:.60}; a rank is a whole number from 1; copy the file again.")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not math.isfinite(alpha) or not alpha:
        raise ConfigError(
            f"{place}; lora_alpha={alpha!r:.60}; it must be a finite number and not 0, since B A is multiplied by it "
            "over the rank; copy the file again."
        )
    for name in ("use_dora", "use_rslora"):
        if config.get(name) not in (True, False, None):
            raise ConfigError(f"{place}; {name}={config[name]!r:.60}; it must be true or false; mend it.")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) and name for name in saved):
        raise ConfigError(f"{place}; modules_to_save={saved!r:.60}; it must be a list of names; copy the file again.")
    for name, (single, texts) in CHOOSING.items():
        value = config.get(name)
        if value is not None and not isinstance(value, single) and not _is_list_of(single, value):
            raise ConfigError(f"{place}; {name}={value!r:.60}; it must be {texts}; copy the file again.")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) and name for name in parameters):
        raise ConfigError(f"{place}; target_parameters={parameters!r:.60}; it must be a list of names; copy it again.")
    return LoraConfig(
        r=r,
        alpha=float(alpha),
        target_parameters=parameters,
        scaling="alpha_over_sqrt_r" if config.get("use_rslora") else "alpha_over_r",
        dora=bool(config.get("use_dora")),
        rank_pattern=_pattern(config, "rank_pattern", int, place=place),
        alpha_pattern=_pattern(config, "alpha_pattern", float, place=place),
        modules_to_save=list(saved),
        ensure_weight_tying=config.get("ensure_weight_tying") is True,
    )


def _pattern(config: Mapping[str, Any], key: str, kind: type[int] | type[float], *, place: str) -> dict[str, Any]:
    """Return the values of single modules in an adapter's settings.

    Raises:
        ConfigError: a key is no regular expression, or a value no rank or no factor.
    """
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{place}; {key}={given!r:.60}; it must be a table of names and numbers; copy it again.")
    for name, value in given.items():
        is_number = type(value) in (int, kind) and math.isfinite(value)
        if not is_number or not value or (kind is int and value < 1):
            raise ConfigError(
                f"{place}; {key} has {name!r:.60}: {value!r:.60}; a rank is a whole number from 1, and an alpha a "
                "finite number that is not 0; copy the file again."
            )
        if problem := pattern_problem(name):
            raise ConfigError(f"{place}; {key} has {name!r:.60}; {problem}.")
    return {name: kind(value) for name, value in given.items()}


def _require_targeted(
    owners: Iterable[str], names: Mapping[str, str], config: Mapping[str, Any], lora: LoraConfig, *, place: str
) -> None:
    """Require the modules that have adapters to be those that PEFT would give one.

    Args:
        names: names as in the file, by those in a decoder.

    Raises:
        ConfigError: PEFT would leave one out.
    """
    for owner in owners:
        is_shared = lora.ensure_weight_tying and f"{owner}.weight".endswith(WHOLE)  # one adapter, named by either
        is_router = any(is_named(f"{owner}.weight", each) for each in lora.target_parameters)
        own_names = (owner, names.get(owner, owner).removeprefix(PREFIX))
        if not (is_shared or is_router or any(_is_selected(name, config) for name in own_names)):
            shown = ", ".join(f"{key}={config[key]!r:.80}" for key in CHOOSING if config.get(key) not in (None, []))
            raise ConfigError(
                f"{place}; it has tensors of {owner}, which PEFT leaves out by {ADAPTER_CONFIG} ({shown}); copy both "
                "files of one adapter again."
            )


def _is_selected(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT (0.21, `check_target_module_exists`) gives a module an adapter.

    Also where the config has what is not followed here: no targets, or a regular expression that may take for ever.
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and not _is_endless(excluded) and _is_listed(name, excluded):
        return False
    if targets is None or _is_endless(targets) or str(targets).lower() == "all-linear":
        return True
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or [r"[^.]*"]
    if isinstance(targets, str) or name in targets or layers is None or layers == []:
        return _is_listed(name, targets)
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if any(pattern_problem(str(pattern)) for pattern in patterns):
        return True
    found = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns)
    number = next((int(match.group(1)) for match in found if match), None)
    return _is_listed(name, targets) and number in ([layers] if isinstance(layers, int) else layers)


def _is_listed(name: str, names: Any) -> bool:
    """Return whether names, by their ends, or a regular expression have a module."""
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(is_named(name, each) for each in names)


def _is_endless(names: Any) -> bool:
    return isinstance(names, str) and pattern_problem(names) is not None


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _named_targets(config: Mapping[str, Any]) -> list[str]:
    """Return the targets of adapter_config.json as `lora.targets` takes them; none where these are not all it says."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("exclude_modules") or config.get("layers_to_transform"):
        return []
    return [part for name in map(str, targets) for part in ([inner_name(name), f"*.{name}"] if "." in name else [name])]


def _without_copies(layout: dict[str, Tensor], *, place: str) -> dict[str, Tensor]:
    """Return the tensors without what PEFT writes again of a module that is trained whole in a resized base.

    It writes `X.weight`, which it reads, and beside it `X.modules_to_save.weight` with the same values and
    `X.original_module.weight`, those of before.

    Raises:
        ConfigError: the two that are trained differ.
    """
    again = {name: name.replace(f".{COPY}.", ".") for name in layout if f".{COPY}." in name}
    again = {name: plain for name, plain in again.items() if plain in layout}
    for name, plain in sorted(again.items()):
        if not torch.equal(layout[name], layout[plain]):
            raise ConfigError(f"{place}; {name} and {plain} are one weight, and their values differ; save it again.")
    before = {name for name in layout if f".{BEFORE}." in name and name.replace(f".{BEFORE}.", ".") in layout}
    return {name: tensor for name, tensor in layout.items() if name not in again and name not in before}


def _without_rows_of_head(layout: dict[str, Tensor], given: Any) -> dict[str, Tensor]:
    """Return the tensors without the embedding's rows once more, as those of a tied head that no key names.

    PEFT writes them where it writes embeddings whole, because they were resized.
    """
    rows = {name: inner_name(name).rpartition(".")[0] for name in layout if name.endswith(TOKEN_ROWS)}
    keys = [inner_name(key) for key in given] if isinstance(given, dict) else ["embed_tokens"]
    unnamed = {name for name, module in rows.items() if not any(is_named(module, key) for key in keys)}
    firsts = [layout[name] for name in rows if name not in unnamed]
    again = {name for name in unnamed if _is_one_of(layout[name], firsts)}
    return {name: tensor for name, tensor in layout.items() if name not in again}


def _without_tied(layout: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Return the tensors without those of the head that PEFT writes once more where it is trained as the embedding."""
    firsts = [tensor for name, tensor in layout.items() if inner_name(name).endswith(WHOLE[0])]
    heads = [n for n in layout if inner_name(n).endswith(WHOLE[1]) and not is_saved(n.removeprefix(PREFIX), lora)]
    again = {name for name in heads if _is_one_of(layout[name], firsts)}
    layout = {name: tensor for name, tensor in layout.items() if name not in again}
    if not lora.ensure_weight_tying:
        return layout
    saved = [tensor for name, tensor in layout.items() if is_saved(name.removeprefix(PREFIX), lora)]
    saved += [tensor.t() for name, tensor in layout.items() if name.endswith((EMBEDDING_A, EMBEDDING_B))]
    return {
        name: tensor
        for name, tensor in layout.items()
        if is_saved(name.removeprefix(PREFIX), lora) or not _is_one_of(tensor, saved)
    }


def _is_one_of(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(torch.equal(tensor, each) for each in others)


def _tokens(given: Any, tensors: Mapping[str, Tensor], *, place: str) -> dict[str, list[int]]:
    """Return the tokens of the rows among an adapter's tensors, by the name of the module.

    A list is of the embedding; a key without rows is of a head that is tied to it.

    Raises:
        ConfigError: they are no tokens, or not as many as there are rows.
    """
    modules = [name.rpartition(".")[0] for name in tensors if is_of_rows(name)]
    table = dict.fromkeys(modules, given) if isinstance(given, list) else given or {}
    if isinstance(table, dict):
        table = {inner_name(key): tokens for key, tokens in table.items()}
    lists = list(table.values()) if isinstance(table, dict) else [table]
    for each in lists:
        are_tokens = isinstance(each, list) and all(type(token) is int and token >= 0 for token in each)
        if not are_tokens or len(set(each)) != len(each):
            raise ConfigError(
                f"{place}; trainable_token_indices={given!r:.60}; it must be a list of different token ids, or a table "
                f"of such lists, in the {ADAPTER_CONFIG} beside it; copy it again."
            )
    found = {name: next((list(table[key]) for key in table if is_named(name, key)), []) for name in modules}
    for name, tokens in found.items():
        rows = tensors[f"{name}.{TOKEN_ROWS}"]
        if rows.ndim != 2 or len(rows) != len(tokens):
            raise ConfigError(
                f"{place}; {name} has rows {tuple(rows.shape)} and trainable_token_indices {len(tokens)} tokens of it; "
                "the two files do not belong together: copy them again."
            )
    absent = [key for key in table if not any(is_named(name, key) or found[name] == table[key] for name in modules)]
    if absent:
        raise ConfigError(
            f"{place}; trainable_token_indices has {absent[0]}, and the file no rows of it; copy it again."
        )
    return found


def _is_of(key: str, *, module: str) -> bool:
    """Return whether a tensor is of a module that was trained whole."""
    return is_saved(key.removeprefix(PREFIX), LoraConfig(r=1, modules_to_save=[module]))


def _module_of(key: str) -> str:
    """Return the name of the module that a tensor of A or B is of, as in the file; empty for another."""
    ends = (A, B, EMBEDDING_A, EMBEDDING_B)
    found = next((key.removesuffix(part) for part in ends if key.endswith(part)), "")
    return found.removeprefix(PREFIX)


def _matrices_in(layout: Iterable[str], lora: LoraConfig) -> list[str]:
    """Return the names, as in the file, of the matrices of experts that have adapters there."""
    modules = {_module_of(key).removesuffix(INNER).removesuffix(INNER) for key in layout}
    each = (f"{module}.{leaf}" for module in sorted(modules) if module.endswith(EXPERTS) for leaf in MATRICES)
    return [name for name in each if any(is_named(name, target) for target in lora.target_parameters)]


def _ranks_of_matrices(layout: Iterable[str], lora: LoraConfig) -> dict[str, int]:
    """Return the ranks of the adapters of experts by the names that the matrices have in a decoder."""
    return {inner_name(name): lora_of(lora, name).r for name in _matrices_in(layout, lora)}


def _names_of_settings(layout: Iterable[str], lora: LoraConfig) -> set[str]:
    """Return the names, as in the file, by which ranks and alphas of single modules apply: of modules and matrices."""
    matrices = _matrices_in(layout, lora)
    modules = {_module_of(key) for key in layout} - set(wrapped(matrices).values()) - {""}
    return modules | set(matrices)


def require_rounded_alike(adapter: Adapter, model: ModelConfig, *, key: str) -> None:
    """Require an adapter of rounded weights to be used with weights that are rounded so, and no other with such.

    Args:
        key: `key=value` of the adapter, for the message.

    Raises:
        ConfigError: it is not.
    """
    wanted, found = rounded_settings(model), adapter.rounded
    if wanted == found:
        return
    words = {"linear": "plain"} if found is None else {"linear": "lr_qat", **found}
    raise ConfigError(
        f"{key} with model.linear={model.linear}; it was trained with weights that are "
        f"{'not rounded' if found is None else 'rounded in another way'}; use "
        f"{' '.join(f'model.{name}={value}' for name, value in words.items())}."
    )


def _more_in(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the config fields, as `name=value`, that a plain LoRA adapter does not have."""
    if config.get("bias", "none") != "none":
        yield f"bias={config['bias']}"
    if config.get("init_lora_weights", True) not in OWN_STARTS:
        yield f"init_lora_weights={config['init_lora_weights']}"
    yield from (f"{name}={config[name]}" for name in REFUSED if config.get(name))


def _more_among(layout: Mapping[str, Tensor], *, lora: LoraConfig, is_rounded: bool) -> Iterator[str]:
    """Yield the first tensor, if any, that is neither A (r, in), B (out, r), DoRA's lengths (out,) nor trained whole.

    Nor trained scales (out, groups) of rounded weights, A (r, tokens) and B (features, r) of an embedding, rows of
    tokens, or an embedding or head that PEFT writes whole.
    """
    of_experts = set(wrapped(_matrices_in(layout, lora)).values())
    for name, tensor in sorted(layout.items()):
        if is_saved(name.removeprefix(PREFIX), lora) or _module_of(name) in of_experts:
            continue
        if lora.dora and name.removesuffix(".weight").endswith(f".{MAGNITUDE}") and tensor.ndim == 1:
            continue
        if is_rounded and name.endswith(f".{LEARNT_SCALE}") and tensor.ndim == 2:
            continue
        # PEFT writes an embedding or head whole that is adapted, or of another size than its base's.
        if (is_of_rows(name) or inner_name(name).endswith(WHOLE)) and tensor.ndim == 2:
            continue
        rank_dim, r = 0 if name.endswith((A, EMBEDDING_A)) else 1, lora_of(lora, _module_of(name)).r
        if not name.endswith((A, B, EMBEDDING_A, EMBEDDING_B)) or tensor.ndim != 2 or tensor.shape[rank_dim] != r:
            yield f"{name} {tuple(tensor.shape)} with r={r}"
            return

"""Single rows of an embedding or a head that are trained whole, as PEFT's `trainable_token_indices`.

The rows (n, H) are a parameter of their own beside the frozen matrix (V, H). Before every forward pass they take its
rows' place, so that the module's own class computes with them, and a head that is tied to the embedding has them too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.model_schema import LoraConfig, is_named
from tpu_experiments.runtime.stacked import TOKEN_ROWS, is_adapter_part

KEY = "lora.trainable_token_indices"


def add_token_rows(module: Any, lora: LoraConfig) -> None:
    """Give the embedding and the head of `lora.trainable_token_indices` their rows, empty.

    Raises:
        ConfigError: a key names neither, a token has no row, the matrix is trained otherwise too, or a tied head is
            named without its embedding, or with other tokens.
    """
    given = lora.trainable_token_indices
    places = vocabulary_modules(module) if given else {}
    for each in given:
        if not any(is_named(name, each) for name in places):
            raise ConfigError(
                f"{KEY} has {each!r}, which is neither the embedding nor the head. {suggest(each, places)}"
            )
    first: dict[int, str] = {}
    for name, part in places.items():
        key = next((key for key in given if is_named(name, key)), None)
        of_weight = first.setdefault(id(part.weight), name)
        if key is None:
            continue
        tokens, num_rows = given[key], part.weight.shape[0]
        if of_weight != name:
            own = next((given[each] for each in given if is_named(of_weight, each)), None)
            if own is None or sorted(own) != sorted(tokens):
                raise ConfigError(
                    f"{KEY} has {key!r} with {'other tokens than' if own else 'none of'} {of_weight}, which is the "
                    f"same matrix (tie_word_embeddings); name {of_weight} alone, whose rows are the head's too."
                )
            continue
        if max(tokens) >= num_rows:
            raise ConfigError(
                f"{KEY} has token {max(tokens)} of {key}, which has {num_rows} rows, 0 to {num_rows - 1}; take tokens "
                "of those, or add rows by model.vocab_size."
            )
        if part.weight.requires_grad or any(map(is_adapter_part, part._parameters)):
            raise ConfigError(
                f"{KEY} has {key!r}, which lora.modules_to_save or lora.targets has too; leave it out of one of them."
            )
        if getattr(part, "bias", None) is not None:
            raise ConfigError(f"{KEY} has {key!r}, a head with a bias, which PEFT drops; leave it out.")
        part.register_buffer("token_indices", torch.tensor(tokens, dtype=torch.int64, device="cpu"), persistent=False)
        rows = torch.empty(len(tokens), part.weight.shape[1], dtype=torch.float32, device=part.weight.device)
        part.register_parameter(TOKEN_ROWS, nn.Parameter(rows))


def vocabulary_modules(module: Any) -> dict[str, Any]:
    """Return the modules whose rows are tokens by name: the embedding, then the head of the vocabulary."""
    try:
        wanted = [module.get_input_embeddings(), module.get_output_embeddings()]
    except NotImplementedError:  # transformers' way of saying that a class names none
        return {}
    named = {id(part): name for name, part in module.named_modules()}
    return {named[id(part)]: part for part in wanted if part is not None}


def token_rows(module: nn.Module) -> dict[str, list[int]]:
    """Return the tokens whose rows are trained, by the name of the matrix."""
    owners = ((name, part) for name, part in module.named_modules() if TOKEN_ROWS in part._parameters)
    return {f"{name}.weight": indices_of(part).tolist() for name, part in owners}


def trained_rows_of(module: Any) -> Tensor | None:
    """Return the tokens whose rows of the head are trained, int64 (N,); None where none are."""
    head = module.get_output_embeddings()
    owners = (part for part in module.modules() if TOKEN_ROWS in part._parameters)
    return next((indices_of(part) for part in owners if head is not None and part.weight is head.weight), None)


def indices_of(owner: Any) -> Tensor:
    """Return the tokens of a module with rows, int64 (n,)."""
    indices: Tensor = owner.token_indices
    return indices


def with_token_rows(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters with the matrices that have trained rows in the place of those rows, in float32."""
    found = dict(parameters)
    for name in parameters:
        path, _, leaf = name.rpartition(".")
        if leaf == TOKEN_ROWS:
            owner: Any = module.get_submodule(path)
            found[f"{path}.weight"] = in_place_of_rows(owner.weight, found.pop(name), indices_of(owner))
    return found


def in_place_of_rows(weight: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
    """Return a matrix (V, H) with rows (n, H) in the place of its own, in the data type of the rows."""
    return weight.to(rows.dtype).index_copy(0, indices, rows)


def without_token_rows(module: nn.Module) -> None:
    """Take the rows from a module whose matrices hold them."""
    for part in module.modules():
        if part._parameters.pop(TOKEN_ROWS, None) is not None:
            del part._buffers["token_indices"]

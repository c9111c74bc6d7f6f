"""The entry of a StableHLO module: where its arguments and results lie, and which results take arguments' buffers."""

from collections.abc import Mapping, Sequence
from typing import Any


def annotated(
    text: str | bytes,
    *,
    aliases: Mapping[int, int],
    shardings: Sequence[str] | None = None,
    has_whole_results: bool = False,
) -> Any:
    """Return jax's module of StableHLO text with these attributes, in the MLIR context that is entered.

    Args:
        aliases: number of the result that takes an argument's buffer, and has its sharding, by the argument's number.
        shardings: of the arguments, in XLA's notation (`Mesh.sharding_text`); None where nothing is partitioned.
        has_whole_results: whether other results are whole on every device; else XLA chooses.
    """
    from jax._src.lib.mlir import ir

    module = ir.Module.parse(text)
    entry = next(op for op in module.body.operations if op.name.value == "main")
    index = ir.IntegerType.get_signless(32)
    is_whole = has_whole_results and shardings is not None
    whole = {"mhlo.sharding": ir.StringAttr.get("{replicated}")} if is_whole else {}
    results: list[dict[str, Any]] = [dict(whole) for _ in entry.type.results]
    arguments: list[Any] = []
    for number in range(len(entry.type.inputs)):
        lies = {} if shardings is None else {"mhlo.sharding": ir.StringAttr.get(shardings[number])}
        attributes = dict(lies)
        if number in aliases:
            attributes["tf.aliasing_output"] = ir.IntegerAttr.get(index, aliases[number])
            results[aliases[number]] |= lies
        arguments.append(ir.DictAttr.get(attributes))
    entry.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
    entry.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(result) for result in results])
    return module

"""Print the attention kernels' programs for the TPU, and what they compute interpreted, by this Python's jax.

    python -m tests.images.programs

Run in two environments, its two answers say whether their versions of jax make the same kernels.
"""

import base64
import dataclasses
import hashlib
import json
import re
import sys
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax._src.lib import tpu, xla_client
from jax._src.lib.mlir import ir

from tpu_experiments.runtime.kernels.attention import AttentionCall, Scores
from tpu_experiments.runtime.kernels.splash import arguments_of, attention_function, lowered

# Rows that vector memory holds, with a window, a cap, stacks of layers and several chips; a row that it does not hold
# (splash); an encoder.
CALLS = {
    "mistral": AttentionCall(2, 32, 8, 2048, 128, "bfloat16", Scores(128**-0.5), rotates=True),
    "mistral on 4 x 2 chips": AttentionCall(
        8, 32, 8, 2048, 128, "bfloat16", Scores(128**-0.5), rotates=True, num_shards=4, head_shards=2
    ),
    "gemma": AttentionCall(2, 4, 1, 512, 256, "bfloat16", Scores(256**-0.5, window=512), rotates=True),
    "gemma with a cap": AttentionCall(2, 4, 1, 512, 256, "bfloat16", Scores(256**-0.5, soft_cap=50.0), rotates=True),
    "qwen": AttentionCall(1, 14, 2, 8192, 64, "bfloat16", Scores(64**-0.5), rotates=True),
    "long": AttentionCall(1, 8, 2, 32768, 128, "bfloat16", Scores(128**-0.5), rotates=True, holds_rows=False),
    "long, with a window": AttentionCall(
        1, 8, 2, 16384, 128, "bfloat16", Scores(128**-0.5, window=4096), rotates=True, holds_rows=False
    ),
    "encoder": AttentionCall(2, 12, 12, 1024, 64, "bfloat16", Scores(0.125, window=129, causal=False), rotates=True),
}
INTERPRETED = {
    "causal": AttentionCall(1, 4, 2, 256, 64, "float32", Scores(0.125, window=100, soft_cap=9.0), rotates=True),
    "splash": AttentionCall(1, 2, 1, 256, 128, "float32", Scores(0.1), max_block=128, holds_rows=False),
}
DIRECTIONS: Any = ("forward", "backward")


def main() -> None:
    """Print JSON: versions, digests of programs and digests of results."""
    programs = {
        f"{name}, {direction}": digest_of(lowered(call, direction=direction, target="tpu"))
        for name, call in CALLS.items()
        for direction in DIRECTIONS
    }
    stacked = dataclasses.replace(CALLS["mistral on 4 x 2 chips"], layers=4)
    programs["stacks of mistral, backward"] = digest_of(lowered(stacked, direction="backward", target="tpu"))
    results = {
        f"{name}, {direction}": _results(call, direction)
        for name, call in INTERPRETED.items()
        for direction in DIRECTIONS
    }
    json.dump({"jax": version("jax"), "programs": programs, "results": results}, sys.stdout)


def digest_of(module: bytes) -> str:
    """Return a digest of a program, with its kernels, up to names and the order of operations that are independent."""
    options = xla_client._xla.HloPrintOptions()
    options.print_metadata = False
    options.print_large_constants = True
    text = xla_client._xla.HloModule.from_serialized_hlo_module_proto(module).to_string(options)
    text = text.replace('\\"', '"')
    text = re.sub(r'"body":\s*"([^"]*)"', lambda found: f'"body": "{kernel_digest(found[1])}"', text)
    known: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        found = re.match(r"\s*(ROOT )?(%[\w.-]+) = (.*)", line)
        if found is None:
            begun = re.match(r"(?:ENTRY )?(%[\w.-]+) ", line)
            current = begun[1] if begun else current
            continue
        known[found[2]] = _hash(re.sub(r"%[\w.-]+", lambda name: known[name[0]], found[3]))
        if found[1]:
            known[current] = known[found[2]]  # a computation is what it returns
    return known[current]


def kernel_digest(body: str) -> str:
    """Return a digest of a kernel's Mosaic: what is stored, in order, out of what was loaded between which stores."""
    with ir.Context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(base64.b64decode(body))
        return _region_digest(module.operation.regions[0], {})


def _region_digest(region: Any, known: dict[Any, str]) -> str:
    effects = []
    for number, block in enumerate(region.blocks):
        known.update({argument: f"{number} {at} {argument.type}" for at, argument in enumerate(block.arguments)})
        for op in block.operations:
            operation = op.operation
            name = operation.name.replace("tpu.transpose", "vector.transpose")  # what jax 0.7.2 calls it
            attributes = [f"{each.name}={each.attr}" for each in operation.attributes if each.name != "sym_name"]
            inner = [_region_digest(each, known) for each in operation.regions]
            parts = [name, *sorted(attributes), *(known[value] for value in operation.operands), *inner]
            parts += [str(result.type) for result in operation.results]
            if name.endswith("load"):
                parts.append(str(len(effects)))
            found = _hash(" ".join(parts))
            known.update({result: f"{found} {at}" for at, result in enumerate(operation.results)})
            if not operation.results or inner:
                effects.append(found)
    return _hash(" ".join(effects))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _results(call: AttentionCall, direction: Any) -> list[str]:
    generator = np.random.default_rng(0)
    given = [
        generator.standard_normal(each.shape, dtype=np.float32)
        if each.dtype == np.float32
        else np.ones(each.shape, each.dtype)
        for each in arguments_of(call, direction=direction)
    ]
    run = jax.jit(attention_function(call, direction=direction, target="interpreted"))
    return [hashlib.sha256(np.asarray(each).tobytes()).hexdigest() for each in run(*given)]


if __name__ == "__main__":
    main()

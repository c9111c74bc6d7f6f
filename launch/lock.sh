#!/usr/bin/env bash
# Writes launch/requirements.lock anew from pyproject.toml, keeping pins that still fit;
# --upgrade, or --upgrade-package NAME, moves them.
set -euo pipefail
here=${BASH_SOURCE[0]}
cd -- "$(dirname -- "$here")/.."
# One lock for every supported Python; 3.11 is the lowest, so its versions are found first.
# No index address is written: the lock names versions and hashes only.
bash launch/local.sh uv pip compile pyproject.toml \
    --extra xla --extra tpu --extra ray --extra wandb --extra mlflow --extra trackio --extra harness --extra optuna --extra gpu \
    --extra export --extra serve --extra dev \
    --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
    --custom-compile-command "bash launch/lock.sh" \
    --output-file launch/requirements.lock --quiet "$@"

# The environment of TorchTPU (hw.runtime=torchtpu): the same packages with its torch, for the Pythons that it has wheels for.
wanted=$(bash launch/local.sh python - <<'PY'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
others = ("torch_xla", "compressed-tensors", "xllamacpp", "gguf")
packages = [*project["dependencies"], *extras["dev"], *extras["torchtpu"]]
print("\n".join(package for package in packages if not package.startswith(others)))
PY
)
bash launch/local.sh uv pip compile - --python-version 3.12 --generate-hashes --no-emit-index-url \
    --custom-compile-command "bash launch/lock.sh" --no-annotate \
    --output-file launch/requirements-torchtpu.lock --quiet "$@" <<<"$wanted"

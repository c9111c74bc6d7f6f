#!/usr/bin/env bash
# Writes launch/requirements.lock anew from pyproject.toml, keeping pins that still fit;
# --upgrade, or --upgrade-package NAME, moves them.
set -euo pipefail
here=${BASH_SOURCE[0]}
cd -- "$(dirname -- "$here")/.."
# One lock for every supported Python; 3.11 is the lowest, so its versions are found first.
# No index address is written: the lock names versions and hashes only.
bash launch/local.sh uv pip compile pyproject.toml \
    --extra tpu --extra ray --extra wandb --extra optuna --extra gpu --extra export --extra dev \
    --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
    --custom-compile-command "bash launch/lock.sh" \
    --output-file launch/requirements.lock --quiet "$@"

#!/usr/bin/env bash
# xpk: a workload on a v6e-16 of a cluster that xpk made. Never run. Checked with xpk 1.16.0 alone: its own parser, and
# `--dry-run --skip-validation --output-manifest-file=`, whose JobSet has four pods of 4 chips.
#
#     pip install xpk
#     xpk cluster create --cluster=CLUSTER --tpu-type=v6e-16 --num-slices=1 --spot --project=PROJECT --zone=ZONE
#     REPOSITORY=https://... BUCKET=gs://BUCKET/runs bash launch/gke/xpk.sh --cluster=CLUSTER --project=PROJECT --zone=ZONE
#
# xpk 1.16.0 runs the containers in privileged mode, so run.py may lock the memory that libtpu needs. The nodes' account
# has to be let write the bucket. xpk knows no secrets: for a gated model take jobset_v6e16.yaml. One host:
# --tpu-type=v6e-8 and HW=v6e8. More words go to xpk (--num-slices stays 1: more slices are as many runs).
set -euo pipefail
: "${REPOSITORY:?https address of the repository to clone}" "${BUCKET:?gs:// address of the output_dir}"
# 75: stopped on request, after a checkpoint. 1: another host was taken away, which the rest see within seconds; xpk would
# give the workload up. 2, settings that were refused, ends it. What run.py says of itself is in every pod's log.
# One line: xpk pastes it into YAML. The pod's shell reads the variables, from the environment that --env gives it.
# shellcheck disable=SC2016
command='git clone --depth=1 "$REPOSITORY" /code && cd /code && exec bash launch/startup.sh -- python run.py \
experiment="$EXPERIMENT" hw="$HW" output_dir="$BUCKET"'
exec xpk workload create --workload="${WORKLOAD:-mistral7b-ro}" --tpu-type=v6e-16 --num-slices=1 \
    --docker-image=python:3.11-bookworm --max-restarts=20 --restart-on-exit-codes=1,75 \
    --termination-grace-period-seconds=60 --env="REPOSITORY=$REPOSITORY" --env="BUCKET=$BUCKET" \
    --env="EXPERIMENT=${EXPERIMENT:-mistral7b_ro}" --env="HW=${HW:-v6e16}" --env=PYTHON=python3.11 \
    --command="${command//$'\\\n'/}" "$@"

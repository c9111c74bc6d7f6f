#!/usr/bin/env bash
# Makes a TPU VM ready from a checkout: environment, compile cache, devices; the same command again finds it ready.
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: bash launch/startup.sh [KEY=VALUE...] [-- COMMAND [ARGUMENT...]]

Makes .venv from the lock (launch/local.sh), fetches compiled programs from the run's bucket, and has task=doctor look
at versions, machine and devices; exit code 0 means that training can start. KEY=VALUE are those of the run, as
`hw=v6e8 output_dir=gs://BUCKET/runs`; without them they are taken from COMMAND, and without hw= the machine says it.
COMMAND then runs inside the environment; what it compiles goes to the bucket every five minutes and at its end.

TPU_EXPERIMENTS_TORCH_INDEX   address of an index that has torch as `+cpu`: 3 GB of CUDA libraries are left out
PYTHON, TPU_EXPERIMENTS_VENV, TPU_EXPERIMENTS_LOCK   as launch/local.sh takes them
TEXT
}

say() { printf 'launch/startup.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=${here%/*}
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s' "$PWD/$1" ;; esac; }
lock=$(absolute "${TPU_EXPERIMENTS_LOCK:-$here/requirements.lock}")
venv=$(absolute "${TPU_EXPERIMENTS_VENV:-$root/.venv}")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tpu_experiments
checks=versions,variables,runtime_version,lock_file,memlock,hugepages,devices,disk,compile_cache
overrides=() command=()

inside() { bash "$here/local.sh" "$@"; }

# Sets overrides and command; those of a command are the words behind run.py, less what it does.
read_words() {
    local word is_behind=''
    while (($#)) && [[ $1 != -- ]]; do
        [[ $1 == *=* ]] || die "$1 is no KEY=VALUE; a command comes behind --."
        overrides+=("$1") && shift
    done
    (($# < 2)) || command=("${@:2}")
    ((${#overrides[@]} == 0)) || return 0
    for word in ${command[@]+"${command[@]}"}; do
        if [[ $word == run.py || $word == */run.py ]]; then
            is_behind=yes
        elif [[ $is_behind && $word == *=* && $word != task* && $word != +* && $word != *,* ]]; then
            overrides+=("$word")
        fi
    done
}

as_root() { if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi; }

# The images of TPU VMs are Ubuntu 22.04, whose own Python is 3.10. torch_xla loads libpython, which python3.11 there
# neither has built in nor depends on.
ensure_python() {
    local name
    local look='import ctypes, ensurepip, sys, venv; ctypes.CDLL("libpython%d.%d.so.1.0" % sys.version_info[:2])'
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13; do
        ! "$name" -Ic "$look" 2>/dev/null || return 0
    done
    [[ -z ${PYTHON:-} ]] ||
        die "$PYTHON cannot make virtual environments, or has no shared libpython, which torch_xla loads;" \
            "install what is missing (apt-get install python3.11-venv libpython3.11), or set PYTHON to another."
    command -v apt-get >/dev/null || return 0 # launch/local.sh says what is missing
    say "installing python3.11 with apt-get"
    as_root apt-get -qq -o DPkg::Lock::Timeout=300 update >&2 || true
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -o DPkg::Lock::Timeout=300 install -y python3.11 python3.11-venv libpython3.11 >&2 ||
        die "python3.11 could not be installed; the lines above say why."
}

# A v5e or later TPU starts and ends sooner with large pages for all memory (jax, cloud_tpu_init.py). A container may not
# change them: then task=doctor says what to do on its host.
enable_hugepages() {
    local setting=/sys/kernel/mm/transparent_hugepage/enabled
    [[ -f $setting && $(<"$setting") != '[always]'* ]] || return 0
    grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor || return 0 # Google's, and below its chips from v5e on
    grep -qsxE '0x(0063|006f|0076)' /sys/bus/pci/devices/*/device || return 0
    ! as_root sh -c "echo always >$setting" 2>/dev/null || say "transparent hugepages enabled"
}

sha_of() { sha256sum <"$1" | cut -d ' ' -f 1; }

# Whether launch/local.sh made the environment from this lock, or `install_cpu_torch` did and signed for it.
is_made() {
    local stamped=()
    [[ -x $venv/bin/python && -f $venv/.tpu_experiments ]] || return 1
    mapfile -t stamped <"$venv/.tpu_experiments"
    [[ ${stamped[0]:-} == "$(sha_of "$lock")" && ${stamped[2]:-} == "$venv" ]]
}

# Prints a lock whose torch is the one for CPUs, with the hash of the wheel that the index gave, and without CUDA.
cpu_lock() {
    local version made name python=${PYTHON:-} wheel
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$lock")
    made=$1/$(sha_of "$lock").lock
    if [[ ! -f $made ]]; then
        for name in python3.11 python3.12 python3.13; do
            [[ -n $python ]] || ! command -v "$name" >/dev/null || python=$name
        done
        rm -rf "$1" && mkdir -p "$1" && "$python" -m venv "$1/pip" >&2 || return 1
        say "fetching torch $version for CPUs"
        "$1/pip/bin/python" -m pip download --quiet --no-deps --dest "$1" \
            --index-url "$TPU_EXPERIMENTS_TORCH_INDEX" "torch==$version+cpu" >&2 || return 1
        rm -rf "$1/pip"
        wheel=$(find "$1" -name 'torch-*.whl')
        {
            awk '/^[a-z0-9]/ { keep = !/^(torch|triton|nvidia-[a-z0-9-]*)==/ } keep' "$lock"
            printf 'torch==%s+cpu \\\n    --hash=sha256:%s\n' "$version" "$(sha_of "$wheel")"
        } >"$made.new"
        mv -f "$made.new" "$made"
    fi
    printf '%s' "$made"
}

# 3 GB less to download and to keep, where an index has torch without CUDA.
install_cpu_torch() {
    local folder=$cache/torch_cpu made
    if ! made=$(cpu_lock "$folder"); then
        say "TPU_EXPERIMENTS_TORCH_INDEX does not give it; taking torch from the lock, with its CUDA libraries"
        return 0
    fi
    UV_FIND_LINKS=$folder PIP_FIND_LINKS="${PIP_FIND_LINKS:+$PIP_FIND_LINKS }$folder" \
        TPU_EXPERIMENTS_LOCK=$made inside true
    # From now on launch/local.sh takes it for what the lock asks for.
    sed "1s/.*/$(sha_of "$lock")/" "$venv/.tpu_experiments" >"$venv/.tpu_experiments.new"
    mv -f "$venv/.tpu_experiments.new" "$venv/.tpu_experiments"
}

prepare() {
    local started=$SECONDS hw='' word
    ensure_python
    enable_hugepages
    [[ -z ${TPU_EXPERIMENTS_TORCH_INDEX:-} ]] || is_made || install_cpu_torch
    inside true
    say "environment ready after $((SECONDS - started)) s"
    for word in ${overrides[@]+"${overrides[@]}"}; do
        [[ $word != hw=* && $word != experiment=* && $word != debug=* ]] || hw=given
    done
    if [[ -z $hw ]]; then
        hw=$(inside python -m launch.on_vm hw) || exit $?
        say "this machine is hw=$hw"
        overrides=("hw=$hw" ${overrides[@]+"${overrides[@]}"})
    fi
    started=$SECONDS
    inside python -m launch.on_vm pull "${overrides[@]}" >&2
    say "compile cache looked after in $((SECONDS - started)) s"
    started=$SECONDS
    # 256 rows: a multiple of the chips of every machine; what a run trains on does not matter here.
    inside python run.py task=doctor "task.checks=[$checks]" trainer.global_batch_rows=256 "${overrides[@]}" >&2 ||
        { say "not ready: mend what has failed above, then run the same command again"; exit 1; }
    say "machine looked at in $((SECONDS - started)) s"
}

case ${1:-} in
    -h | --help) usage && exit 0 ;;
esac
read_words "$@"
mkdir -p "$cache"
exec {turn}>"$cache/startup.lock"
flock "$turn" # two set-ups at once take turns
prepare
exec {turn}>&-
say "ready after $SECONDS s"
if ((${#command[@]})); then
    cd -- "$root"
    exec bash "$here/local.sh" python -m launch.on_vm run "${overrides[@]}" -- "${command[@]}"
fi

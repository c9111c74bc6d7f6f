#!/usr/bin/env bash
# What the launcher says to a TPU VM, over ssh, from the folder of the code. Knows nothing of Google Cloud but sudo.
#     keep-secrets            KEY=VALUE lines on stdin into a file only this user reads
#     start ID [WORD ...]     run.py with these words as a systemd unit; ID again is not started again
#     look OFFSET             a line of state, then what the log has after OFFSET bytes
#     stop                    SIGTERM to the run, and wait until it has saved and ended
#     ask-stop                SIGTERM to the run
#     pack FOLDER             the results of a run, or of every point of a sweep, as a tar stream
#     fetched                 the results have arrived; the watchdog no longer keeps the VM for them
#     mount DISK FOLDER       the attached disk, read-only
set -euo pipefail

state=${TPUEXP_STATE:-$HOME/.tpu_experiments}
unit=tpuexp-run
# Of one look; a log that grows faster is caught up with in the next.
max_log_bytes=262144
inside=(bash launch/local.sh python)
# A checkpoint to a bucket; the machine itself is gone 30 s after a spot reclaim, whatever stands here.
stop_seconds=110
mkdir -p "$state"
chmod 700 "$state"

is_running() { systemctl is-active --quiet "$unit"; }

keep_secrets() {
    umask 077
    cat >"$state/secrets.new"
    mv -f "$state/secrets.new" "$state/secrets"
}

start() {
    local id=$1
    shift
    touch "$state/lease"
    if [[ $(cat "$state/id" 2>/dev/null) == "$id" ]] && { is_running || [[ -e $state/exit ]]; }; then
        return
    fi
    # Of a slice one VM may have been restarted while the earlier run continues on the others.
    ! is_running || sudo systemctl stop "$unit"
    rm -f "$state/exit" "$state/stop"
    printf '%s\0' "$@" >"$state/words"
    # Until the launcher says `fetched`, this disk has the only copy of the results, for which the watchdog keeps the VM.
    rm -f "$state/only_copy"
    [[ "$*" == *output_dir=*://* ]] || touch "$state/only_copy"
    : >"$state/log"
    printf '%s' "$id" >"$state/id"
    # KillMode=mixed: SIGTERM to the first process, which hands it on, SIGKILL to the rest after the time. After= the
    # network, so that at a shutdown the run is stopped while it can still reach its bucket. The limits are those that a
    # login has on Google's images (limits.conf), which no unit gets: libtpu locks memory for DMA, and systemd gives 8 MiB.
    sudo systemd-run --quiet --collect --unit="$unit" --uid="$(id -u)" --gid="$(id -g)" \
        -p KillMode=mixed -p TimeoutStopSec=$stop_seconds -p After=network-online.target \
        -p LimitMEMLOCK=infinity -p LimitNOFILE=100000 \
        -p WorkingDirectory="$PWD" -p Environment=HOME="$HOME" -p Environment=TPUEXP_STATE="$state" \
        bash "$PWD/launch/worker.sh" unit
}

# The unit: run.py with the secrets in its environment and nowhere else; its exit code is kept.
unit() {
    local words=() where=() runner=() word code=0 child='' trapped='' stopped='' told=''
    [[ ! -e $state/words ]] || mapfile -d '' -t words <"$state/words"
    if [[ -e $state/secrets ]]; then
        set -a
        # shellcheck source=/dev/null
        source "$state/secrets"
        set +a
    fi
    if [[ -n ${TPUEXP_PYTHON:-} ]]; then
        inside=("$TPUEXP_PYTHON") runner=("$TPUEXP_PYTHON")
    else
        # Programs that were compiled go to the run's bucket, from where the next machine has them.
        for word in "${words[@]}"; do
            [[ $word != hw=* && $word != output_dir=* ]] || where+=("$word")
        done
        runner=("${inside[@]}" -m launch.on_vm run "${where[@]}" -- python)
    fi
    trap stop_child TERM INT
    probe || code=$?
    if [[ -n $stopped ]]; then
        code=75 # before anything was trained
    elif ((!code)); then
        follow "${runner[@]}" run.py "${words[@]}" || code=$?
    fi
    printf '%s\n' "$code" >"$state/exit.new"
    mv -f "$state/exit.new" "$state/exit"
}

# startup.sh has started the devices from a login; this starts them as the run will, with the limits of its unit. Of a
# sweep side by side the run's hw= is one chip, so the machine is asked which it is.
probe() {
    local hw
    hw=$("${inside[@]}" -m launch.on_vm hw 2>>"$state/log") || return 0 # a type that conf/hw lacks: startup.sh was given hw=
    [[ $hw != cpu && -z $stopped ]] || return 0
    follow "${inside[@]}" run.py task=doctor 'task.checks=[memlock,devices]' "hw=$hw" trainer.global_batch_rows=256
}

stop_child() {
    trapped=yes stopped=yes
    [[ -z $child ]] || { told=yes && kill -TERM "$child" 2>/dev/null; } || true
}

# Runs a command with its output in the log, hands it the unit's signal to stop, and returns its exit code.
follow() {
    local code='' last
    "$@" >>"$state/log" 2>&1 &
    child=$!
    [[ -z $stopped || -n $told ]] || stop_child # the signal came before there was a child
    # A signal ends `wait` with 143, which is not the command's code: it is asked again (127: it was told before).
    while true; do
        trapped='' last=$code code=0
        wait "$child" || code=$?
        [[ $code != 127 || -z $last ]] || code=$last
        [[ -n $trapped ]] || break
    done
    child=''
    return "$code"
}

look() {
    local run=none code=- at=- stop=no preempted worker bytes
    touch "$state/lease"
    if [[ -e $state/exit ]]; then
        run=exited code=$(cat "$state/exit") at=$(stat -c %.3Y "$state/exit")
    elif is_running; then
        run=running
    elif [[ -e $state/id ]]; then
        run=lost # the unit is gone and has left no code: the machine was restarted
    fi
    [[ ! -e $state/stop ]] || stop=asked
    preempted=$(metadata preempted)
    worker=$(metadata attributes/agent-worker-number)
    bytes=$(stat -c %s "$state/log" 2>/dev/null || echo 0)
    printf 'tpuexp worker=%s run=%s code=%s stop=%s preempted=%s bytes=%s at=%s\n' "${worker:-0}" "$run" "$code" "$stop" \
        "${preempted:-FALSE}" "$bytes" "$at"
    if [[ $1 != none ]] && ((bytes > $1)); then
        # head ends first where the log has grown since, which is no failure.
        { tail -c "+$(($1 + 1))" "$state/log" || true; } | head -c $((bytes - $1 < max_log_bytes ? bytes - $1 : max_log_bytes))
    fi
}

metadata() {
    curl -sf -m 5 -H 'Metadata-Flavor: Google' \
        "${TPUEXP_METADATA:-http://metadata.google.internal}/computeMetadata/v1/instance/$1" || true
}

stop() {
    touch "$state/stop"
    ! is_running || sudo systemctl stop "$unit"
    # Killed after its time, it has left no code, as if the machine had been restarted; and would be started again.
    [[ ! -e $state/id || -e $state/exit ]] || printf '137\n' >"$state/exit"
}

ask_stop() {
    touch "$state/stop"
    ! is_running || sudo systemctl stop --no-block "$unit"
}

pack() {
    local found=() name
    cd -- "$1"
    for name in {,*/}{result.json,test_results.json,README.md,config.yaml,adapter,model,run.log}; do
        # Of folders only those of a sweep, which are its points.
        [[ ! -e $name || ($name == */* && ! -e sweep.json) ]] || found+=("$name")
    done
    for name in sweep.json leaderboard.csv leaderboard.md tensorboard logs; do
        [[ ! -e $name || ! -e sweep.json ]] || found+=("$name")
    done
    ((${#found[@]})) || found=(--files-from=/dev/null)
    tar -czf - "${found[@]}"
}

mount_disk() {
    local device=/dev/disk/by-id/google-$1
    [[ -e $device ]] || device=$(lsblk -dpno NAME,TYPE | awk '$2 == "disk" { last = $1 } END { print last }')
    sudo mkdir -p "$2"
    mountpoint -q "$2" || sudo mount -o ro,noload "$device" "$2"
}

case ${1:-} in
    keep-secrets) keep_secrets ;;
    start) start "${@:2}" ;;
    unit) unit ;;
    look) look "${2:-none}" ;;
    stop) stop ;;
    ask-stop) ask_stop ;;
    pack) pack "$2" ;;
    fetched) rm -f "$state/only_copy" ;;
    mount) mount_disk "$2" "$3" ;;
    *) sed -n '2,11p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac

#!/usr/bin/env bash
# The VM's own end, when nobody else ends it. Google runs this file as root at every boot (start-up script); it installs
# itself as a service, which deletes the queued resource of this VM
#   - when it has been up for tpuexp-seconds (the launcher's limit of hours or money), and
#   - when for tpuexp-idle-seconds there was no run, no login and no word of the launcher;
# and which stops the run, so that it saves, as soon as the machine is to be taken away.
# It needs nothing but curl, systemd and the VM's service account, with the right to delete TPUs (roles/tpu.admin).
set -euo pipefail

metadata_url=${TPUEXP_METADATA:-http://metadata.google.internal}/computeMetadata/v1
tpu_url=${TPUEXP_API:-https://tpu.googleapis.com}/v2
home=${TPUEXP_HOME:-/var/lib/tpu_experiments}
tick_seconds=10
unit=tpuexp-run

say() { printf 'tpuexp-watchdog: %s\n' "$*"; }

metadata() { curl -sf -m 5 -H 'Metadata-Flavor: Google' "$metadata_url/$1"; }

attribute() { metadata "instance/attributes/$1"; }

install_self() {
    mkdir -p "$home"
    cp -- "${BASH_SOURCE[0]}" "$home/watchdog.new"
    chmod 755 "$home/watchdog.new"
    mv -f "$home/watchdog.new" "$home/watchdog.sh"
    systemctl is-active --quiet tpuexp-watchdog ||
        systemd-run --quiet --collect --unit=tpuexp-watchdog -p Restart=always -p RestartSec=10 "$home/watchdog.sh" watch
}

# Seconds since the boot, which is when the machine began to cost; a restart of this service does not start them anew.
up_seconds() { awk '{ print int($1) }' "${TPUEXP_UPTIME:-/proc/uptime}"; }

is_used() {
    systemctl is-active --quiet "$unit" && return
    [[ -n $(who) ]]
}

# The launcher touches a file at every look.
newest_lease() {
    local newest
    newest=$(stat -c %Y "${TPUEXP_HOMES:-/home}"/*/.tpu_experiments/lease 2>/dev/null | sort -n | tail -n 1 || true)
    printf '%s' "${newest:-0}"
}

delete_self() {
    local token address
    say "deleting $resource: $1"
    systemctl stop "$unit" 2>/dev/null || true
    token=$(metadata instance/service-accounts/default/token | sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
    address="$tpu_url/projects/$project/locations/$zone/queuedResources/$resource?force=true"
    # The token goes through stdin: words of a command are seen by every process.
    printf 'Authorization: Bearer %s\n' "$token" | curl -sf -m 60 -X DELETE -H @- -o /dev/null "$address"
}

watch() {
    local project zone resource max_seconds idle_seconds used_at now why='' lease
    project=$(attribute tpuexp-project) zone=$(attribute tpuexp-zone) resource=$(attribute tpuexp-resource)
    max_seconds=$(attribute tpuexp-seconds) idle_seconds=$(attribute tpuexp-idle-seconds)
    used_at=$(date +%s)
    say "$resource is deleted after $max_seconds s, or $idle_seconds s without use"
    while true; do
        now=$(date +%s)
        ! is_used || used_at=$now
        lease=$(newest_lease)
        ((lease <= used_at)) || used_at=$lease
        if [[ $(metadata instance/preempted) == TRUE ]]; then
            systemctl stop --no-block "$unit" 2>/dev/null || true
        fi
        if (($(up_seconds) >= max_seconds)); then
            why="up for $max_seconds s"
        elif ((now - used_at >= idle_seconds)); then
            why="unused for $idle_seconds s"
        fi
        # Until it works: what fails now (no right, no network) may be mended while the machine still costs.
        [[ -z $why ]] || delete_self "$why" || say "the deletion was refused; again in $tick_seconds s"
        sleep $tick_seconds
    done
}

if [[ ${1:-} == watch ]]; then watch; else install_self; fi

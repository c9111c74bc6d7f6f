#!/usr/bin/env bash
# The VM's own end, when nobody else ends it. Google runs this file as root at every boot (start-up script); it installs
# itself as a service, which deletes the queued resource of this VM
#   - when it has been up for tpuexp-seconds (the launcher's limit of hours or money), and
#   - when for tpuexp-idle-seconds there was no run, no login and no word of the launcher, on any VM of the slice, and no
#     result that is on this disk alone;
# and which stops the run, so that it saves, as soon as the machine is to be taken away.
# It needs nothing but curl, systemd, on a slice python3, and the VM's service account with tpu.nodes.delete;
# `watchdog.sh check` prints whether it has that.
set -euo pipefail

metadata_url=${TPUEXP_METADATA:-http://metadata.google.internal}/computeMetadata/v1
tpu_url=${TPUEXP_API:-https://tpu.googleapis.com}/v2
home=${TPUEXP_HOME:-/var/lib/tpu_experiments}
tick_seconds=10
unit=tpuexp-run
# On a slice the VMs tell each other here for how many seconds they have been unused, and nothing else.
port=${TPUEXP_PORT:-29502}

say() { printf 'tpuexp-watchdog: %s\n' "$*"; }
said=''
say_once() {
    [[ $said == "$*" ]] || say "$*"
    said=$*
}

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

# Seconds since the first boot, which is when the machine began to cost; neither a restart of this service nor a reboot
# starts them anew.
up_seconds() {
    local up
    up=$(awk '{ print int($1) }' "${TPUEXP_UPTIME:-/proc/uptime}")
    mkdir -p "$home"
    [[ -s $home/began ]] || printf '%s\n' $(($(date +%s) - up)) >"$home/began"
    printf '%s' $(($(date +%s) - $(cat "$home/began")))
}

# A run that has finished, and whose results nobody has fetched from this disk.
has_only_copy() {
    local folder
    for folder in "${TPUEXP_HOMES:-/home}"/*/.tpu_experiments; do
        [[ ! -e $folder/only_copy || $(cat "$folder/exit" 2>/dev/null) != 0 ]] || return 0
    done
    return 1
}

is_used() {
    systemctl is-active --quiet "$unit" || has_only_copy || pgrep -f '(^|[ /])run\.py( |$)' >/dev/null || has_login
}

# An ssh session without a terminal (VS Code, a tunnel) is not in `who`, and logind has it. A connection that has not
# logged in is none: the internet knocks at port 22 all day. `closing` is what a login left running behind.
has_login() {
    local sessions=()
    [[ -z $(who) ]] || return 0
    mapfile -t sessions < <(loginctl list-sessions --no-legend 2>/dev/null | awk '{ print $1 }')
    ((${#sessions[@]})) || return 1
    { loginctl show-session -p Remote -p State "${sessions[@]}" 2>/dev/null || true; } |
        awk -v RS= '/Remote=yes/ && !/State=closing/ { found = 1 } END { exit !found }'
}

# Addresses of the slice's other VMs, from the metadata: `name:uid:address` of each, in the order of their numbers.
find_peers() {
    local endpoints own number=0 endpoint
    # 22 is an answer without it; no answer ends this service, which systemd starts again.
    endpoints=$(attribute worker-network-endpoints) || { (($? == 22)) && return || exit 1; }
    own=$(attribute agent-worker-number) || own=0
    IFS=, read -ra endpoints <<<"$endpoints"
    for endpoint in "${endpoints[@]}"; do
        if ((number == own)); then address=${endpoint##*:}; else peers+=("${endpoint##*:}"); fi
        number=$((number + 1))
    done
}

# Serves the file of this VM's unused seconds to the others, to nobody beyond the network, and as nobody.
tell_peers() {
    mkdir -p "$home/unused"
    systemctl is-active --quiet tpuexp-unused ||
        systemd-run --quiet --collect --unit=tpuexp-unused -p Restart=always -p RestartSec=10 -p DynamicUser=yes \
            python3 -m http.server "$port" --bind "$address" --directory "$home/unused"
}

# Whether every other VM of the slice says that it has been unused for so long. One that does not answer may be in use:
# in doubt the slice stays, until tpuexp-seconds.
are_peers_unused() {
    local peer seconds
    for peer in ${peers[@]+"${peers[@]}"}; do
        seconds=$(curl -sf -m 5 "http://$peer:$port/seconds") || seconds=''
        if [[ ! $seconds =~ ^[0-9]+$ ]]; then
            say_once "unused for $idle_seconds s, and stays: $peer of this slice does not say whether it is used"
            return 1
        elif ((seconds < idle_seconds)); then
            say_once "unused for $idle_seconds s, and stays: $peer of this slice is used, or was until lately"
            return 1
        fi
    done
}

# The launcher touches a file at every look.
newest_lease() {
    local newest
    newest=$(stat -c %Y "${TPUEXP_HOMES:-/home}"/*/.tpu_experiments/lease 2>/dev/null | sort -n | tail -n 1 || true)
    printf '%s' "${newest:-0}"
}

# The API's answer to the deletion of the queued resource $1; more words are curl's. A queued resource has no
# permission of its own: tpu.nodes.delete is asked for.
ask_deletion() {
    local token
    token=$(metadata instance/service-accounts/default/token | sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
    # The token goes through stdin: words of a command are seen by every process.
    printf 'Authorization: Bearer %s\n' "$token" | curl -s -m 60 -X DELETE -H @- "${@:2}" \
        "$tpu_url/projects/$project/locations/$zone/queuedResources/$1?force=true"
}

delete_self() {
    say "deleting $resource: $1"
    systemctl stop "$unit" 2>/dev/null || true
    ask_deletion "$resource" -f -o /dev/null
}

# One line: whether the deletion would be allowed, who asks, and what the API said. Asked by the very call, for a resource
# that does not exist, which the API looks for after the right: 404 is a yes, 403 a no. So no other API has to be
# switched on, and conditions of a role, scopes and the network are in the answer. A role that was just given takes a
# minute: asked again for so long.
check() {
    local project zone resource account answer='' code='' verdict=unanswered tries=6
    project=$(attribute tpuexp-project) zone=$(attribute tpuexp-zone) resource=$(attribute tpuexp-resource)
    account=$(metadata instance/service-accounts/default/email) || account=none
    while ((tries)); do
        answer=$(ask_deletion "$resource-none" -m 10 -w '\n%{http_code}') || true
        code=${answer##*$'\n'}
        case $code in
            2?? | 404) verdict=granted tries=1 ;;
            401 | 403) verdict=refused ;;
            *) verdict=unanswered ;;
        esac
        tries=$((tries - 1))
        ((!tries)) || sleep $tick_seconds
    done
    answer=$(sed -n '/"message"/ { s/.*"message" *: *"\([^"]*\)".*/\1/p; q }' <<<"$answer")
    printf 'tpuexp-watchdog=%s account=%s code=%s %s\n' "$verdict" "$account" "${code:-000}" "$answer"
}

watch() {
    local project zone resource max_seconds idle_seconds used_at now why lease peers=() address=''
    project=$(attribute tpuexp-project) zone=$(attribute tpuexp-zone) resource=$(attribute tpuexp-resource)
    max_seconds=$(attribute tpuexp-seconds) idle_seconds=$(attribute tpuexp-idle-seconds)
    used_at=$(date +%s)
    find_peers
    ((!${#peers[@]})) || tell_peers
    say "$resource is deleted after $max_seconds s, or $idle_seconds s without use"
    while true; do
        now=$(date +%s) why=''
        ! is_used || used_at=$now
        lease=$(newest_lease)
        ((lease <= used_at)) || used_at=$lease
        if ((${#peers[@]})); then
            printf '%s\n' $((now - used_at)) >"$home/unused/seconds.new"
            mv -f "$home/unused/seconds.new" "$home/unused/seconds"
        fi
        if [[ $(metadata instance/preempted) == TRUE ]]; then
            systemctl stop --no-block "$unit" 2>/dev/null || true
        fi
        if (($(up_seconds) >= max_seconds)); then
            why="up for $max_seconds s"
        elif ((now - used_at >= idle_seconds)) && are_peers_unused; then
            why="unused for $idle_seconds s"
        fi
        # Again until it works: what fails now (no right, no network) may be mended while the machine still costs.
        [[ -z $why ]] || delete_self "$why" || say "the deletion was refused; again in $tick_seconds s"
        sleep $tick_seconds
    done
}

case ${1:-} in
    watch) watch ;;
    check) check ;;
    *) install_self ;;
esac

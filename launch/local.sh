#!/usr/bin/env bash
# Makes the environment if it is missing or broken, then runs the arguments inside it.
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: bash launch/local.sh COMMAND [ARGUMENT...]

Runs COMMAND from the repository root inside .venv, which is made first if it is missing:
    bash launch/local.sh python run.py
    bash launch/local.sh pytest

PYTHON                 the Python to make .venv with (3.11, 3.12 or 3.13)
TPU_EXPERIMENTS_VENV   another place for .venv; this script owns it and removes what the lock lacks
TPU_EXPERIMENTS_LOCK   another lock than launch/requirements.lock
TEXT
}

say() { printf 'launch/local.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s' "$PWD/$1" ;; esac; }

here=$(absolute "${BASH_SOURCE[0]}")
root=$(cd -- "${here%/*}/.." && pwd -P)
lock=$(absolute "${TPU_EXPERIMENTS_LOCK:-$root/launch/requirements.lock}")
venv=$(absolute "${TPU_EXPERIMENTS_VENV:-$root/.venv}")
venv=${venv%/}
stamp=$venv/.tpu_experiments
# Measured: 8.4 GB with Python 3.11; torch 2.9.0 brings the CUDA libraries even where no GPU is.
need_kb=$((10 * 1000 * 1000))

# Prints version, real path and what is wrong; runs on any Python since 2.7.
probe='
import os, sys
problem = "-"
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION").split()
except (AttributeError, OSError, ValueError):
    libc = ["none", "0.0"]
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    problem = "version"
elif sys.maxsize < 2**32 or libc[0] != "glibc" or [int(n) for n in libc[1].split(".")] < [2, 28]:
    problem = "libc"
else:
    try:
        import ensurepip, venv
    except ImportError:
        problem = "venv"
    else:
        try:
            import ctypes
            ctypes.CDLL("libpython%d.%d.so.1.0" % tuple(sys.version_info[:2]))
        except (ImportError, OSError):
            problem = "libpython"
print("%d.%d.%d %s %s" % (tuple(sys.version_info[:3]) + (problem, sys.executable)))
'

# Forgets each package with a missing or short file, so that the installer writes it again:
# installers trust a package whose .dist-info is there, and a killed one can leave it incomplete.
forget_incomplete='
import csv, pathlib, shutil, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
def is_whole(info):
    record = info / "RECORD"
    if not record.is_file():
        return False
    rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines()))
    return bool(rows) and all(
        len(row) == 3 and (site / row[0]).is_file()
        and (not row[2] or (site / row[0]).stat().st_size == int(row[2]))
        for row in rows
        if not row[0].endswith(".pyc")
    )
for info in sorted(site.glob("*.dist-info")):
    if not is_whole(info):
        shutil.rmtree(info)
        print(info.name.removesuffix(".dist-info"))
'

version_of() {
    "$1" -ISc 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Sets state: complete, absent, no_python, other_python, moved, unfinished or other_lock.
assess() {
    state=absent
    if [[ ! -e $venv/pyvenv.cfg ]]; then
        # A folder that this script made has our lock file beside it, even if venv was killed at once. It is made before
        # the folder's first file, so it is looked for after them: another run may begin between the two looks.
        [[ -z $(ls -A "$venv" 2>/dev/null) || -e $venv.lock ]] ||
            die "$venv holds files but is no virtual environment;" \
                "move it away or set TPU_EXPERIMENTS_VENV."
        return
    fi
    local version
    version=$(version_of "$venv/bin/python")
    state=no_python
    [[ -n $version && -d $venv/lib/python$version/site-packages ]] || return 0
    state=other_python
    [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == "$version" ]] || return 0
    state=unfinished
    [[ -f $stamp ]] || return 0
    local stamped_lock='' stamped_python='' stamped_venv=''
    { read -r stamped_lock && read -r stamped_python && read -r stamped_venv; } <"$stamp" ||
        return 0
    state=moved
    [[ $stamped_venv == "$venv" ]] || return 0
    state=other_lock
    [[ $stamped_lock == "$lock_sha" && $stamped_python == "$version" ]] || return 0
    state=complete
}

check_machine() {
    local system machine
    system=$(uname -s) machine=$(uname -m)
    [[ $system == Linux && $machine == x86_64 ]] ||
        die "torch_xla 2.9.0 is published for Linux on x86_64 only" \
            "and this is $system on $machine; use such a machine, for example a TPU VM or Colab."
    command -v flock >/dev/null ||
        die "the command flock is missing; install util-linux (apt-get install util-linux)."
}

check_disk() {
    local folder=$venv free_kb held_kb=0
    [[ -d $folder ]] || folder=${venv%/*}
    free_kb=$(df -Pk "$folder" | awk 'END { print $4 }')
    if [[ -d $venv ]]; then
        held_kb=$(du -sk "$venv/" | awk '{ print $1 }')
    fi
    ((free_kb + held_kb >= need_kb)) ||
        die "$folder has $((free_kb / 1000000)) GB free and the environment needs about 10 GB;" \
            "free some space or set TPU_EXPERIMENTS_VENV to a folder on a larger disk."
}

# Sets python (its real path) and python_version; a pyenv shim can exist and fail, so each is run.
find_python() {
    local name facts problem path seen='' lacks_venv='' lacks_libc='' lacks_libpython=''
    local names=(python3.11 python3.12 python3.13 python3)
    [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
    for name in "${names[@]}"; do
        facts=$("$name" -Esc "$probe" 2>/dev/null) || continue
        read -r python_version problem path <<<"$facts"
        case $problem in
            -) python=$path && return ;;
            venv) lacks_venv=${lacks_venv:-$path ${python_version%.*}} ;;
            libc) lacks_libc=$path ;;
            libpython) lacks_libpython=${lacks_libpython:-$path $python_version} ;;
            *) seen="$seen${seen:+, }$name is $python_version" ;;
        esac
    done
    if [[ -n $lacks_libpython ]]; then # Debian's and Ubuntu's python3.11 comes without it
        python=${lacks_libpython% *} python_version=${lacks_libpython##* }
        say "$python lacks libpython${python_version%.*}.so.1.0, which torch_xla loads; on Debian or Ubuntu run:" \
            "apt-get install libpython${python_version%.*}; until then only hw.runtime=eager runs"
        return
    elif [[ -n $lacks_venv ]]; then
        die "${lacks_venv% *} cannot make virtual environments;" \
            "on Debian or Ubuntu run: apt-get install python${lacks_venv##* }-venv"
    elif [[ -n $lacks_libc ]]; then
        die "$lacks_libc is no 64-bit Python on glibc 2.28 or later," \
            "which torch_xla 2.9.0 needs; use Debian 10, Ubuntu 20.04 or later."
    fi
    [[ -n $seen ]] || seen="none of these runs: ${names[*]}"
    die "needs Python 3.11, 3.12 or 3.13 ($seen);" \
        "run apt-get install python3.11 python3.11-venv libpython3.11, or pyenv install 3.11," \
        "or set PYTHON to one."
}

create() {
    find_python
    check_disk
    say "making $venv with Python $python_version: about 8.5 GB;" \
        "about 1 min with a fast registry, 5-10 min otherwise"
    rm -f "$stamp"
    "$python" -m venv --clear "$venv" >&2 ||
        die "$python could not make $venv; the lines above say why."
}

complete_unfinished() {
    local forgotten
    say "$venv was left unfinished; completing it"
    check_disk
    forgotten=$("$venv/bin/python" -Ic "$forget_incomplete")
    [[ -z $forgotten ]] || say "incomplete, to be installed again: ${forgotten//$'\n'/, }"
}

install_with_uv() {
    local entry version
    # uv is the one package pip fetches, with the hashes the lock gives for it.
    entry=$(awk '/^uv==/ { on = 1 } on { print } on && !/\\$/ { exit }' "$lock")
    version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' <<<"$entry")
    [[ -n $version ]] || return 1
    if [[ $("$venv/bin/uv" --version 2>/dev/null) != "uv $version"* ]]; then
        say "fetching the installer, uv $version"
        "$venv/bin/python" -m pip install --quiet --no-deps --require-hashes \
            -r /dev/stdin <<<"$entry" >&2 || return 1
    fi
    "$venv/bin/uv" pip sync --require-hashes --python "$venv/bin/python" "$lock" >&2
}

install() {
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$venv/bin/python" -m ensurepip --upgrade >/dev/null ||
            die "$venv has no pip and ensurepip fails there; remove $venv and run again."
    fi
    install_with_uv && return
    say "uv could not be used; installing with pip, which is slower"
    "$venv/bin/python" -m pip install --require-hashes -r "$lock" >&2 ||
        die "the packages of $lock could not be installed; the lines above say why." \
            "Run the same command again to continue from here."
}

write_stamp() {
    printf '%s\n' "$lock_sha" "$(version_of "$venv/bin/python")" "$venv" >"$stamp.new"
    mv -f "$stamp.new" "$stamp"
}

repair() {
    case $state in
        absent) create ;;
        no_python) say "$venv has lost its Python; making it anew" && create ;;
        other_python) say "$venv has another Python than $PYTHON; making it anew" && create ;;
        moved)
            # Making it anew would empty the place that the link leads to, which is somebody else's environment.
            [ -L "$venv" ] && die "$venv is a link to $(readlink "$venv"); remove the link, or set TPU_EXPERIMENTS_VENV to where it leads"
            say "$venv was made in another place, to which its scripts point" && create
            ;;
        other_lock)
            say "$lock has changed since $venv was made; bringing it up to date"
            check_disk
            ;;
        unfinished) complete_unfinished ;;
    esac
    rm -f "$stamp"
    install
    write_stamp
    say "$venv is ready after $SECONDS s"
}

prepare() {
    local lock_fd lock_sha
    [[ -f $lock ]] || die "$lock is missing."
    lock_sha=$(sha256sum <"$lock")
    lock_sha=${lock_sha%% *}
    assess
    [[ $state != complete ]] || return 0
    check_machine
    mkdir -p "${venv%/*}"
    exec {lock_fd}>"$venv.lock"
    if ! flock -n "$lock_fd"; then
        say "another run is making $venv; waiting for it"
        flock "$lock_fd"
    fi
    # Another run may have finished since the first look.
    assess
    [[ $state == complete ]] || repair
    # The command must not inherit the lock: it may run for days.
    exec {lock_fd}>&-
}

case ${1:-} in
    '') usage && exit 2 ;;
    -h | --help) usage && exit 0 ;;
esac
prepare
unset PYTHONHOME
if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then
    # Starting torch_xla and transformers compiles 4,000 modules (8 s of CPU) where their bytecode is not kept.
    # What the variable is set for, a tree without __pycache__, holds.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$venv/pycache
fi
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
cd -- "$root"
exec -- "$@"

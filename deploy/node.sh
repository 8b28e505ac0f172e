#!/bin/sh
# One machine of a cluster. cluster.yaml and deploy/onprem.yaml run this, on the head and on every worker:
#
#   node.sh setup [cpu|gpu]     install the project into .venv by its lock file; put `ray` and `serve-app` on the PATH
#   node.sh start ray start ... Ray with the project's environment and the cluster's token, kept by a keeper
#       with --block it stays until the node ends, for a container or systemd; SIGTERM drains a worker, then ends it
#   node.sh stop                end the node; on the head: the other nodes first
#   node.sh ray ...             any command of Ray's, with the cluster's address and token
#   node.sh serve-app ...       the same with ours, such as `serve-app deploy --config FILE`
#   node.sh token               make the cluster's token (on the machine that runs `ray up`)
#
# SERVE_APP_PYTHON=/path/to/python in the machine's environment names an environment that is already there: then
# `setup` installs nothing, and this folder's code runs with it.
set -eu
ulimit -n "$(ulimit -Hn)" # Ray wants a file descriptor for each connection
root=$(cd "$(dirname "$0")/.." && pwd -P)
MARKER='# serve-app: ray and serve-app of this cluster'

# A Python that preflight.py accepts, first the one that is tested as a whole; any Python 3 where there is none, whose answer then names what is missing.
usable_python() {
    for name in python3.11 python3.12 python3.13 python3; do
        if command -v "$name" >/dev/null && "$name" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
            echo "$name"
            return
        fi
    done
    echo python3
}

# Debian's packages that the build needs, where this user may install them.
bring_packages() {
    missing=$("$@" --packages)
    if [ -n "$missing" ] && command -v apt-get >/dev/null; then
        as_root=
        [ "$(id -u)" = 0 ] || as_root='sudo -n'
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
        # shellcheck disable=SC2086 # several words on purpose
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    fi
}

set_up() {
    if [ -z "${SERVE_APP_PYTHON:-}" ]; then
        python=$(usable_python)
        bring_packages "$python" -I "$root/serve_app/system/preflight.py" ${1:+--device "$1"}
        "$python" -I "$root/scripts/install.py" --device "${1:-}"
    fi
    # `ray down`, `ray exec` and `ray attach` look for `ray` in a login shell
    if ! grep -qF "$MARKER" "$HOME/.bashrc" 2>/dev/null; then
        printf 'export PATH="%s/deploy/bin:$PATH"  %s\n' "$root" "$MARKER" >>"$HOME/.bashrc"
    fi
}

if [ "${1:-}" = setup ]; then
    shift
    set_up "$@"
    exit
fi
if [ -n "${SERVE_APP_PYTHON:-}" ]; then
    export PYTHONPATH="$root"
    exec "$SERVE_APP_PYTHON" -P -m serve_app.cluster.node "$@"
fi
if [ ! -x "$root/.venv/bin/python" ]; then
    echo "node.sh: nothing is installed in $root/.venv; run \`node.sh setup\` first" >&2
    exit 1
fi
exec "$root/.venv/bin/python" -P -m serve_app.cluster.node "$@"

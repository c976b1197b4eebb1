#!/usr/bin/env bash
# Measures algos/ppo.py and TRL 0.8.6 in turn, then writes results.csv and README.md. DRY=1 prints the commands.
#   REPEATS        rounds over the main modes (3)
#   EXTRA_REPEATS  of these, so many with the techniques switched off and with our flags in TRL (1)
#   ITERATIONS     of a run, the first not counted (2)
#   FORCE=1        measure although the machine is busy
#   PEER           environment of make_peer_env.sh (paths are relative to the repository)
#   RESULTS        another CSV file; README.md goes beside it
#   PLAINRL_BENCH_TINY=1  a model of 2 layers, to try this out; with RESULTS elsewhere
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/throughput
peer=${PEER:-$here/.peers/trl-0.8.6}
results=${RESULTS:-$here/results.csv}
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
ours() { run python $here/ppo_gpt2_small.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
trl() { run "$peer/bin/python" $here/peer_trl_0_8_6.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
fail() { echo "error: $*" >&2; exit 2; }

load=$(cut -d ' ' -f 1 /proc/loadavg)
if [ -z "${DRY:-}" ]; then
    [ -x "$peer/bin/python" ] || fail "no environment in $peer: bash $here/make_peer_env.sh, or set PEER"
    [ -z "${PLAINRL_BENCH_TINY:-}" ] || [ -n "${RESULTS:-}" ] || fail "PLAINRL_BENCH_TINY needs RESULTS"
    [ -n "${FORCE:-}" ] || awk "BEGIN { exit !($load <= 1.5) }" || fail "load average $load > 1.5: wait, or set FORCE=1"
fi
export OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=$work/model
common=(--model "$model" --results "$work/results.csv")
run python $here/ppo_gpt2_small.py --prepare "$model"
for repeat in $(seq "${REPEATS:-3}"); do
    ours fp32
    trl tuned
    ours fp32-2-layers
    ours bf16
    trl defaults
    [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
    ours fp32-highest
    trl same-flags
    ours fp32-sdpa
    ours fp32-decode-4
    ours fp32-malloc
    ours fp32-2-layers-no-cache
    ours bf16-2-layers
done
run mkdir -p "$(dirname "$results")"
run mv "$work/results.csv" "$results" # all or nothing, and the commit in the rows is that of a tree without it
run python $here/ppo_gpt2_small.py --table --results "$results"

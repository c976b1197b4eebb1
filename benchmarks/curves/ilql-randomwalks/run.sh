#!/usr/bin/env bash
# ILQL on random walks, five seeds, sampled and greedily from start m; SFT on the best tenth; two other graphs.
# DRY=1 prints the commands; SEEDS chooses some of the seeds, without collecting them.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/ilql-randomwalks
task=benchmarks/tasks/randomwalks.py
for seed in ${SEEDS-1 2 3 4 5}; do
    common=(--seed "$seed" --threads 1)
    run python algos/ilql.py "${common[@]}" --run-dir "$out/default-seed$seed" --eval-every 40
    run python algos/ilql.py "${common[@]}" --run-dir "$out/greedy-m-seed$seed" --eval-every 1000 \
        --eval-temperature 0 --eval-prompts $task:eval_prompts:starts=m,samples=1
    run python algos/sft.py --config benchmarks/tasks/randomwalks/sft.yaml "${common[@]}" \
        --run-dir "$out/sft-best-tenth-seed$seed" --eval-every 40 --total-steps 167 --dataset $task:best \
        --eval-dataset None
    for graph in 0 2; do
        [ "$seed" -gt 3 ] || run python algos/ilql.py --config benchmarks/tasks/randomwalks/ilql.yaml "${common[@]}" \
            --run-dir "$out/graph-$graph-seed$seed" --eval-every 40 --dataset $task:rewarded:graph_seed=$graph \
            --eval-prompts $task:eval_prompts:graph_seed=$graph --metric $task:metric:graph_seed=$graph
    done
done
[ -n "${SEEDS+x}" ] || run python benchmarks/check.py --collect ilql-randomwalks \
    "$out"/{default,greedy-m,sft-best-tenth}-seed{1,2,3,4,5} "$out"/graph-{0,2}-seed{1,2,3}

#!/usr/bin/env bash
# ILQL on random walks, sampled and greedily from start m; SFT on the best tenth; two other graphs.
. "$(dirname "$0")/../common.sh"
task=benchmarks/tasks/randomwalks.py
settings=benchmarks/tasks/randomwalks
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    train default ilql --eval-every 40
    [ "$seed" -le 5 ] || continue
    train greedy-m ilql --eval-every 1000 --eval-temperature 0 --eval-prompts $task:eval_prompts:starts=m,samples=1
    train sft-best-tenth sft --config $settings/sft.yaml --eval-every 40 --total-steps 167 --dataset $task:best \
        --eval-dataset None
    [ "$seed" -le 3 ] || continue
    for graph in 0 2; do
        train graph-$graph ilql --config $settings/ilql.yaml --eval-every 40 \
            --dataset $task:rewarded:graph_seed=$graph --eval-prompts $task:eval_prompts:graph_seed=$graph \
            --metric $task:metric:graph_seed=$graph
    done
done

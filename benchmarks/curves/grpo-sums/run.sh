#!/usr/bin/env bash
# GRPO on sums with written steps, five seeds; three with the rewards shuffled among the prompts, of PPO, and of expert
# iteration.
# DRY=1 prints the commands.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/grpo-sums
tasks=benchmarks/tasks/arithmetic
for seed in 1 2 3 4 5; do
    run python algos/grpo.py --seed "$seed" --threads 2 --run-dir "$out/default-seed$seed" --eval-every 5
done
for seed in 1 2 3; do
    run python algos/grpo.py --seed "$seed" --threads 1 --run-dir "$out/shuffled-seed$seed" --eval-every 5 \
        --reward $tasks.py:shuffled_reward --total-episodes 20480
    run python algos/ppo.py --config $tasks/ppo_sums.yaml --seed "$seed" --threads 1 --run-dir "$out/ppo-seed$seed"
    run env OMP_NUM_THREADS=1 python benchmarks/expert_iteration.py --seed "$seed" --rounds 5 \
        --run-dir "$out/expert-iteration-seed$seed"
done
run python benchmarks/check.py --collect grpo-sums "$out"/default-seed{1,2,3,4,5} \
    "$out"/{shuffled,ppo,expert-iteration}-seed{1,2,3}

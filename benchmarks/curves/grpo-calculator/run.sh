#!/usr/bin/env bash
# GRPO with a calculator; one that answers "?" alone; problems of two calls; and PPO.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks/calculator
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    train default grpo --config $tasks/grpo.yaml
    [ "$seed" -le 3 ] || continue
    train no-answers grpo --config $tasks/grpo.yaml --rollout $tasks.py:episode:answers=false --total-episodes 15360
    train two grpo --config $tasks/grpo_two.yaml
    train ppo ppo --config $tasks/ppo.yaml
done

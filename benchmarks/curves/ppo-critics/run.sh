#!/usr/bin/env bash
# Critics of PPO on sums, with and without 24 iterations before the policy moves.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks
ppo() { train "$1" ppo --config $tasks/arithmetic/ppo_sums.yaml --eval-every 8 "${@:2}" --total-episodes 17408; }
for seed in ${SEEDS:-1 2 3}; do
    ppo head
    ppo head-warm --value-warmup 24
    ppo own --value-model $tasks/arithmetic.py:base_model
    ppo own-warm --value-model $tasks/arithmetic.py:base_model --value-warmup 24
    train grpo grpo --config $tasks/arithmetic/grpo.yaml --total-episodes 17408 --eval-every 2
done

#!/usr/bin/env bash
# Critics of PPO on sums: a head on the policy, or a trunk of its own, with and without 24 iterations before the policy
# moves; beside GRPO. 34 iterations of 512 episodes.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks
ppo() {  # variant, flags
    train "$1" ppo --config $tasks/arithmetic/ppo_sums.yaml --total-episodes 17408 --eval-every 8 --save-every 0 "${@:2}"
}
for seed in ${SEEDS:-1 2 3}; do
    ppo head
    ppo head-warm --value-warmup 24
    ppo own --value-model $tasks/arithmetic.py:base_model
    ppo own-warm --value-model $tasks/arithmetic.py:base_model --value-warmup 24
    train grpo grpo --config $tasks/arithmetic/grpo.yaml --total-episodes 17408 --eval-every 2 --save-every 0
done

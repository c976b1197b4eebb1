#!/usr/bin/env bash
# GRPO on sums with written steps; the rewards shuffled among the prompts, PPO, and expert iteration.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks/arithmetic
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    train default grpo --eval-every 5
    [ "$seed" -le 3 ] || continue
    train shuffled grpo --eval-every 5 --reward $tasks.py:shuffled_reward --total-episodes 20480
    train ppo ppo --config $tasks/ppo_sums.yaml
    expert=$out/expert-iteration-seed$seed
    if chosen expert-iteration && missing "$expert"; then
        run env OMP_NUM_THREADS=1 python benchmarks/expert_iteration.py --seed "$seed" --rounds 5 --run-dir "$expert"
    fi
done

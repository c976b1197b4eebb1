#!/usr/bin/env bash
# Over-optimisation on random walks, three seeds: reward models from 100, 300, 1000 and all 2744 pairs, 25 epochs of
# them and at least 400 steps, and PPO against each with several KL coefficients.
# DRY=1 prints the commands.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/overoptimisation-randomwalks
task=benchmarks/tasks/randomwalks.py
reward() {  # pairs, seed, flags
    run python algos/reward.py --config benchmarks/tasks/randomwalks/reward.yaml --seed "$2" --threads 1 \
        --run-dir "$out/reward-$1-seed$2" --norm-prompts $task:eval_prompts --eval-every 2000 "${@:3}"
}
ppo() {  # pairs, KL coefficient, seed
    run python algos/ppo.py --config benchmarks/tasks/randomwalks/ppo.yaml --seed "$3" --threads 1 \
        --run-dir "$out/pairs-$1-kl-$2-seed$3" --reward "$out/reward-$1-seed$3/hf_model" --kl-coef "$2" \
        --vf-coef 0.1 --total-episodes 5120 --rollout-batch-size 128 --batch-size 128 --eval-every 8 \
        --eval-dataset $task:eval_prompts:samples=25
}
for seed in 1 2 3; do
    reward 100 $seed --dataset $task:pairs:split=train,count=100 --total-steps 400
    reward 300 $seed --dataset $task:pairs:split=train,count=300 --total-steps 400
    reward 1000 $seed --dataset $task:pairs:split=train,count=1000 --total-steps 400
    reward all $seed --dataset $task:pairs:split=train --epochs 25
done
for kl in 0 0.2 1 0.05; do
    for seed in 1 2 3; do
        for pairs in 100 300 1000 all; do
            ppo $pairs $kl $seed
        done
    done
done
run python benchmarks/check.py --collect overoptimisation-randomwalks \
    "$out"/{reward-{100,300,1000,all},pairs-{100,300,1000,all}-kl-{0,0.05,0.2,1}}-seed{1,2,3}

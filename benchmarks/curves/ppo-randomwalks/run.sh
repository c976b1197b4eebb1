#!/usr/bin/env bash
# PPO on random walks, five seeds: default, two of six layers, LoRA, a reward model; three with a strong KL penalty, and
# with LoRA at every linear layer but the last.
# DRY=1 prints the commands.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/ppo-randomwalks
for seed in 1 2 3 4 5; do
    run python algos/ppo.py --seed "$seed" --run-dir "$out/default-seed$seed" --eval-every 20
done
for seed in 1 2 3; do
    run python algos/ppo.py --seed "$seed" --run-dir "$out/kl-coef-10-seed$seed" --eval-every 20 \
        --kl-coef 10 --vf-coef 0.1 --total-episodes 10240
done
for seed in 1 2 3; do
    run python algos/ppo.py --seed "$seed" --run-dir "$out/lora-all-linear-seed$seed" --eval-every 20 \
        --lora-r 8 --lr 5e-3
done
run python benchmarks/tasks/randomwalks_reward.py "$out/classifier"
for seed in 1 2 3 4 5; do
    run python algos/ppo.py --seed "$seed" --run-dir "$out/two-layers-seed$seed" --eval-every 20 \
        --num-layers-unfrozen 2 --lr 5e-3
    run python algos/ppo.py --seed "$seed" --run-dir "$out/lora-seed$seed" --eval-every 20 \
        --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj c_fc lm_head
    run python algos/ppo.py --seed "$seed" --run-dir "$out/reward-model-seed$seed" --eval-every 20 \
        --reward "$out/classifier"
done
run python benchmarks/check.py --collect ppo-randomwalks "$out"/{default,two-layers,lora,reward-model}-seed{1,2,3,4,5} \
    "$out"/{kl-coef-10,lora-all-linear}-seed{1,2,3}

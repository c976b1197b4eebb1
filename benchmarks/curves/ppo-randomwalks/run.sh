#!/usr/bin/env bash
# PPO on random walks; two of six layers, LoRA with and without the output layer, a strong KL penalty, its own critic.
. "$(dirname "$0")/../common.sh"
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    train default ppo --eval-every 20
    [ "$seed" -le 5 ] || continue
    train two-layers ppo --eval-every 20 --num-layers-unfrozen 2 --lr 5e-3
    train lora ppo --eval-every 20 --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj c_fc lm_head
    [ "$seed" -le 3 ] || continue
    train kl-coef-10 ppo --eval-every 20 --kl-coef 10 --vf-coef 0.1 --total-episodes 10240
    train lora-all-linear ppo --eval-every 20 --lora-r 8 --lr 5e-3
    train own-critic ppo --eval-every 20 --save-every 0 --value-model benchmarks/tasks/randomwalks.py:base_model
done

#!/usr/bin/env bash
# GRPO on a pretrained model: sums in text with all weights, questions in chats with adapters.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
slim=1
for seed in ${SEEDS:-1 2 3}; do
    train sums grpo --config $settings/grpo_sums.yaml
    train colors grpo --config $settings/grpo_colors.yaml
    train chat-sums grpo --config $settings/grpo_sums.yaml --dataset $settings.py:chat_sums \
        --eval-dataset $settings.py:chat_sums:split=test,copies=4 --reward $settings.py:chat_sum_reward --metric None \
        --stop --max-new-tokens 16 --total-episodes 960
done

#!/usr/bin/env bash
# GRPO on a pretrained model: sums in text with all weights, questions in chats with adapters.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
for seed in ${SEEDS:-1 2 3}; do
    train sums grpo --config $settings/grpo_sums.yaml
    slim sums
    train colors grpo --config $settings/grpo_colors.yaml
    slim colors
done

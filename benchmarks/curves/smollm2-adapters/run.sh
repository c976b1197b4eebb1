#!/usr/bin/env bash
# Learning rates of LoRA adapters and of all weights of a pretrained model: 30 steps of sft, five of grpo.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
slim=1
short="--total-episodes 320 --eval-every 5"
sft() { train "sft-$1" sft --config $settings/sft_reviews.yaml --metric None --eval-prompts None "${@:2}"; }
grpo() { train "grpo-$1" grpo --config $settings/grpo_sums.yaml $short "${@:2}"; }
for seed in ${SEEDS:-1}; do
    for lr in 1e-5 3e-5 1e-4; do sft "full-$lr" --lr "$lr"; done
    for adapters in 16-1e-4 16-3e-4 16-1e-3 16-3e-3 4-1e-3 64-1e-3; do
        sft "r$adapters" --lora-r "${adapters%%-*}" --lr "${adapters#*-}"
    done
    for lr in 1e-6 3e-6 1e-5; do grpo "full-$lr" --lr "$lr"; done
    for adapters in 16-1e-4 16-3e-4 16-1e-3 4-3e-4 64-3e-4; do
        grpo "r$adapters" --lora-r "${adapters%%-*}" --lr "${adapters#*-}"
    done
done

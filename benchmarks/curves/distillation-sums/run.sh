#!/usr/bin/env bash
# GRPO, whose model is then a teacher: by its log-probabilities of what the student writes, or by its own texts.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks/arithmetic
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    teacher=$out/grpo-seed$seed/hf_model
    texts=$out/texts-seed$seed.jsonl
    train grpo grpo --config $tasks/grpo.yaml --eval-every 5
    train distilled grpo --config $tasks/grpo.yaml --reward None --ref-model "$teacher" --kl-coef 1 --unbiased-kl \
        --loss-mean token --group-size 2 --rollout-batch-size 128 --batch-size 128 --total-episodes 9600 --eval-every 5
    if chosen sft && missing "$texts"; then
        run python $tasks.py "$teacher" "$texts" --problems 4096 --samples 1 --seed "$seed" --threads 1
    fi
    train sft sft --config $tasks/sft_sums.yaml --model $tasks.py:base_model --dataset "$texts" --eval-every 5
done

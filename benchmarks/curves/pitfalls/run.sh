#!/usr/bin/env bash
# What each pitfall costs: runs of scripts with one planted bug (its number in benchmarks/planted/README.md), beside
# runs without it that have the same seed and flags.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks
with_bug() {  # number, function, its arguments, of which the variant is the first
    local copy
    copy=runs/planted/$(git rev-parse --short HEAD 2>/dev/null || echo here)-$1
    if chosen "$3" && missing "$copy"; then run python benchmarks/planted/planted.py --bugs "$1" --copy "$copy"; fi
    "${@:2}"
}
sums() { train "$1" grpo --config $tasks/arithmetic/grpo.yaml --eval-every 5 "${@:2}"; }  # variant, flags
countdown() {
    train "$1" grpo --config $tasks/arithmetic/grpo_countdown.yaml --eval-every 3 --loss-mean token --micro-batch-size 16
}
hinted() {
    train "$1" grpo --config $tasks/arithmetic/grpo.yaml --eval-every 5 --dataset $tasks/hinted.py:prompts \
        --eval-dataset $tasks/hinted.py:prompts:split=test,count=500 --reward $tasks/hinted.py:reward \
        --metric $tasks/hinted.py:metric
}
calculator() { train "$1" grpo --config $tasks/calculator/grpo.yaml --eval-every 8; }
whitened() { train "$1" ppo --config $tasks/randomwalks/ppo.yaml --micro-batch-size 16; }
learned() {  # a reward that 300 pairs have taught, which is true near the reference only
    train "$1" grpo --model $tasks/randomwalks.py:base_model --dataset $tasks/randomwalks.py:prompts \
        --eval-dataset $tasks/randomwalks.py:eval_prompts:samples=25 --reward "$out/reward-seed$seed/hf_model" \
        --metric $tasks/randomwalks.py:metric --max-new-tokens 9 --total-episodes 10240 --rollout-batch-size 256 \
        --micro-batch-size 128 --decode-batch-size 1024 --lr 6e-4 --lr-schedule linear --adam-betas 0.9 0.95 \
        --attn-implementation eager --eval-every 4 --kl-coef 0.3 "${@:2}"
}
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    sums sums
    with_bug 130 sums top-k
    with_bug 131 sums top-p
    with_bug 16 sums end-token
    sums sums-at-0.7 --temperature 0.7
    with_bug 17 sums temperature --temperature 0.7
    hinted hinted
    with_bug 19 hinted positions
    countdown countdown
    with_bug 133 countdown mean-of-means
    calculator calculator
    with_bug 108 calculator tool-trained
    whitened ppo
    with_bug 8 whitened whitening
    train reward reward --config $tasks/randomwalks/reward.yaml --eval-every 2000 \
        --dataset $tasks/randomwalks.py:pairs:split=train,count=300 --total-steps 400
    learned learned
    with_bug 132 learned k1
    with_bug 39 learned turned
    with_bug 22 learned drifting
done

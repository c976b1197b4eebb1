#!/usr/bin/env bash
# GRPO on sums from a sampler that is not the policy: older weights, rounded weights, weights never handed over. All
# corrections; equal episodes and seeds.
. "$(dirname "$0")/../common.sh"
sampler=benchmarks/tasks/stale.py:episode
one() {  # variant, options of the sampler, correction
    train "$1" grpo --total-episodes 20480 --eval-every 5 --save-every 0 --rollout "$sampler:$2" --correction "$3"
}
for seed in ${SEEDS:-1 2 3}; do
    one on-policy age=0 none
    for age in 1 4 16; do
        for correction in none truncate mask sequence-mask decoupled; do
            one "age-$age-$correction" "age=$age" "$correction"
        done
    done
    one bfloat16 precision=bfloat16 none
    one float16 precision=float16 none
    one int8 precision=int8 none
    one int8-truncate precision=int8 truncate
    one forgotten handed=false none
    one forgotten-truncate handed=false truncate
done

#!/usr/bin/env bash
# GRPO from a sampler that is not the policy, on sums and on the countdown: older weights with all corrections; on sums
# also rounded weights and weights never handed over. Equal episodes and seeds.
. "$(dirname "$0")/../common.sh"
sampler=benchmarks/tasks/stale.py:episode
one() {  # variant, options of the sampler, correction, other flags
    train "$1" grpo "${@:4}" --save-every 0 --rollout "$sampler:$2" --correction "$3"
}
ages() {  # beginning of the variants' names, flags
    one "$1on-policy" age=0 none "${@:2}"
    for age in 1 4 16; do
        for correction in none truncate mask sequence-mask decoupled; do
            one "$1age-$age-$correction" "age=$age" "$correction" "${@:2}"
        done
    done
}
sums="--total-episodes 20480 --eval-every 5"
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    ages "" $sums
    one bfloat16 precision=bfloat16 none $sums
    one float16 precision=float16 none $sums
    one int8 precision=int8 none $sums
    one int8-truncate precision=int8 truncate $sums
    one forgotten handed=false none $sums
    one forgotten-truncate handed=false truncate $sums
    ages countdown- --config benchmarks/tasks/arithmetic/grpo_countdown.yaml --eval-every 10
done

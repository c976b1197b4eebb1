#!/usr/bin/env bash
# Measures algos/grpo.py and TRL 1.16.0 in turn; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin grpo grpo_gpt2_small.py
peer 1.16 peer_trl_1_16_grpo.py
for repeat in $(seq "$repeats"); do
    for precision in fp32 bf16; do
        ours $precision-plain
        trl $precision-plain-same-flags-kept-memory
        [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
        trl $precision-plain-same-flags
        trl $precision-plain-defaults
        trl $precision-plain-micro-32
        for kind in kl epochs equal; do
            ours $precision-$kind
            trl $precision-$kind-same-flags-kept-memory
        done
    done
done
finish

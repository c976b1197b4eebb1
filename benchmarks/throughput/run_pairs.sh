#!/usr/bin/env bash
# Measures algos/reward.py, algos/dpo.py and TRL 1.16.0 in turn, with 6 STEPS a run, the first two not counted;
# settings: common.sh.
. "$(dirname "$0")/common.sh"
begin pairs pairs_mixed_lengths.py
peer 1.16 peer_trl_1_16_pairs.py
for repeat in $(seq "$repeats"); do
    for kind in reward-fp32 reward-bf16 dpo-fp32 dpo-bf16; do
        ours $kind
        trl $kind-defaults
        trl $kind-same-flags-kept-memory
        case $kind in dpo-*) trl $kind-precompute-kept-memory ;; esac
        [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
        trl $kind-same-flags
        case $kind in dpo-*) trl $kind-precompute ;; esac
    done
done
finish

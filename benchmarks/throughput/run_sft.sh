#!/usr/bin/env bash
# Measures algos/sft.py and TRL 1.16.0 in turn, with 6 STEPS a run, the first two not counted; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin sft sft_mixed_lengths.py
peer 1.16 peer_trl_1_16_sft.py
for repeat in $(seq "$repeats"); do
    for precision in fp32 bf16; do
        ours $precision-packing
        trl $precision-padding-free-kept-memory
        ours $precision-micro-2
        [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
        ours $precision
        trl $precision-padding-free
        trl $precision-same-flags
        trl $precision-defaults
    done
done
finish

#!/usr/bin/env bash
# Measures algos/ddpo.py and TRL 0.8.6 in turn; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin ddpo ddpo_small_unet.py
peer 0.8.6 peer_trl_0_8_6_ddpo.py
for repeat in $(seq "$repeats"); do
    ours fp32
    trl tuned
    trl same-flags-kept-memory
    ours bf16
    trl bf16-same-flags
    [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
    ours fp32-micro-4
    trl same-flags
    trl defaults
done
finish

#!/usr/bin/env bash
# Measures what losses need, of the scripts and of TRL 1.16.0; REPEATS are timed updates of a process; settings:
# common.sh.
#   QWEN3  0: without the model of the shape of Qwen3-0.6B, which takes 16 GB of memory and 15 GB of disk
. "$(dirname "$0")/common.sh"
begin memory memory.py no-model
peer 1.16 peer_trl_1_16_memory.py
for vocabulary in 50257 151936; do
    for count in 4 16; do
        for loss in sft dpo ppo-scoring ppo-update ilql; do
            sizes=(--loss $loss --vocabulary $vocabulary --rows $count)
            measure "$loss,plainrl,after,$vocabulary,$count" python "$script" "${sizes[@]}"
            case $loss in sft | dpo)
                measure "$loss,trl,trl,$vocabulary,$count" "$peer_python" "$peer_script" "${sizes[@]}"
                ;;
            esac
        done
    done
done
if [ "${QWEN3:-1}" != 0 ]; then
    for iteration in sft reward dpo ppo "ppo with adapters"; do
        measure "qwen3,plainrl,$iteration" python "$script" --qwen3 "$iteration"
    done
fi
finish

#!/usr/bin/env bash
# Measures sampling in turn with transformers' generate, on 48 ROWS; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin sampling sampling_mixed_lengths.py no-model
for repeat in $(seq "$repeats"); do
    for shape in gpt2 qwen3; do
        for rank in 0 8; do
            measure "$shape,$rank,now,[0-9]*,$repeat" python "$script" --shape $shape --lora-r $rank --repeat "$repeat"
        done
    done
done
finish

#!/usr/bin/env bash
# DDPO on coloured shapes: compressibility, the same with shuffled rewards, brightness, and LoRA.
. "$(dirname "$0")/../common.sh"
task=benchmarks/tasks/shapes.py
for seed in ${SEEDS:-1 2 3 4 5}; do
    train default ddpo --eval-every 40
    [ "$seed" -le 3 ] || continue
    train shuffled ddpo --reward $task:shuffled
    train brightness ddpo --reward $task:brightness --num-epochs 16
    train lora ddpo --lora-r 8 --lr 3e-3
done

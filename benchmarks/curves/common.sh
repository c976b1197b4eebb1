# What the run.sh of all claims share. Run several seeds at a time with `python benchmarks/seeds.py CLAIM`, which also
# stores the curves. In the environment:
#   SEEDS     some of the seeds
#   VARIANTS  some of the variants
#   DRY=1     prints the commands
# copy: where the scripts lie, if not here. slim=1: a finished run keeps no checkpoint and no best model, some 2 GB.
set -euo pipefail
claim=$(basename "$(cd "$(dirname "$0")" && pwd)")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=runs/curves/$claim

run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }

chosen() { [[ " ${VARIANTS:-$1} " == *" $1 "* ]]; }

missing() { [ -n "${DRY:-}" ] || [ ! -e "$1" ]; }

train() {  # variant, script, flags. A run that is finished is not repeated, one that was stopped goes on.
    if chosen "$1"; then
        run python "${copy:+$copy/}algos/$2.py" --seed "$seed" --threads 1 --run-dir "$out/$1-seed$seed" --resume auto "${@:3}"
        [ -z "${slim:-}" ] || run rm -rf "$out/$1-seed$seed/checkpoints" "$out/$1-seed$seed/hf_model_best"
    fi
}

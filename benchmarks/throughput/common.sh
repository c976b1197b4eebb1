# Sourced by the run_*.sh of this folder, which say what is measured, in turn. Each writes results_NAME.csv, and
# report.py the page from all of them. A measurement that was stopped goes on: its rows are in .work/COMMIT/NAME, until
# `rm -r benchmarks/throughput/.work` or another commit (with uncommitted changes, each begins anew).
#   DRY=1          print the commands
#   BF16=0         without the modes in bf16
#   REPEATS        rounds over the main modes (3)
#   EXTRA_REPEATS  of these, so many with techniques switched off and with slower settings of the peer (1)
#   ITERATIONS     of a run of ppo, grpo and ddpo, the first not counted (2)
#   STEPS          of a run of the others (each says how many)
#   THREADS        (2)
#   FORCE=1        measure although the machine is busy, keep runs with steal
#   RESULTS        another folder for results_*.csv and README.md
#   PEER_0_8_6, PEER_1_12, PEER_1_16  environments of make_peer_env*.sh (.peers/trl-0.8.6 and so on)
#   PLAINRL_BENCH_TINY=1  small models, to try this out; with RESULTS elsewhere
# Seconds of a round, and of what is measured once, by the older results: ppo 190 + 260, sft 120 + 110, pairs 560, grpo
# 120 + 540 in fp32 alone, ilql 120, ddpo 100 + 130, sampling 330 (three of its four models), memory 1640 once. Not in
# this: starting some 215 processes, about 15 s each, and the modes that have no such result (TRL 1.12, bf16 of grpo
# and of TRL 0.8.6).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=benchmarks/throughput
folder=${RESULTS:-$here}
repeats=${REPEATS:-3}
fail() { echo "error: $*" >&2; exit 2; }
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }

export OMP_NUM_THREADS=${THREADS:-2} CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore HF_DATASETS_DISABLE_PROGRESS_BARS=1
COMMIT=$(git rev-parse HEAD)
# results and pages, those of intel/ among them, since * matches a slash, are no code
git diff --quiet HEAD -- . ":!$here/*results_*.csv" ":!$here/*README.md" || COMMIT=$COMMIT-dirty
export COMMIT
[ -z "${PLAINRL_BENCH_TINY:-}" ] || [ -n "${RESULTS:-}" ] || [ -n "${DRY:-}" ] || fail "PLAINRL_BENCH_TINY needs RESULTS"

# begin NAME SCRIPT [no-model]: makes the work directory and the model in it
begin() {
    name=$1
    script=$here/$2
    work=$here/.work/$COMMIT${PLAINRL_BENCH_TINY:+-tiny}/$name
    case $COMMIT in *-dirty) run rm -rf "$work" ;; esac
    run mkdir -p "$work"
    run rm -rf "$work/model"
    rows=$work/results_$name.csv
    trap 'rm -rf "$work/model"' EXIT
    [ -n "${3:-}" ] || run python "$script" --prepare "$work/model"
}

# peer VERSION SCRIPT: what `trl` runs
peer() {
    local environment=PEER_${1//./_}
    peer_python=${!environment:-$here/.peers/trl-$1}/bin/python
    peer_script=$here/$2
    [ -n "${DRY:-}" ] || [ -x "$peer_python" ] || fail "no $peer_python: bash $here/make_peer_env*.sh, or set $environment"
}

# measure ROW COMMAND: unless such a row is there (ROW: how it begins, a pattern of grep), and up to three times where
# the hypervisor took too much (exit code 75 of measurement.py)
measure() {
    local row=$1 try code
    shift
    case $row in *bf16*) [ "${BF16:-1}" != 0 ] || return 0 ;; esac
    if [ -z "${DRY:-}" ] && [ -f "$rows" ] && grep -q "^$row," "$rows"; then
        echo "measured before: $row"
        return
    fi
    for try in 1 2 3; do
        code=0
        run "$@" --results "$rows" || code=$?
        [ $code = 75 ] || break
    done
    [ $code != 75 ] || fail "steal was too much in three runs: start again later, it goes on here"
    [ $code = 0 ] || exit $code
}
ours() { measure "[a-z_]*,$1,$repeat" python "$script" --mode "$1" --repeat "$repeat" --model "$work/model"; }
trl() { measure "trl,$1,$repeat" "$peer_python" "$peer_script" --mode "$1" --repeat "$repeat" --model "$work/model"; }

# finish: all rows are there
finish() {
    run mkdir -p "$folder"
    run cp "$rows" "$folder/"
    run python $here/report.py "$folder"
}

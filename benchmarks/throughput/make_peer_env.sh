#!/usr/bin/env bash
# Makes the virtual environment of peer_trl_0_8_6.py with Python 3.11: TRL 0.8.6 and libraries of its time, on this
# project's torch. Usage: make_peer_env.sh [DIRECTORY]; PYTHON names the interpreter.
set -euo pipefail
directory=${1:-$(cd "$(dirname "$0")" && pwd)/.peers/trl-0.8.6}
"${PYTHON:-python3.11}" -m venv "$directory"
"$directory/bin/pip" install -q "torch>=2.11,<2.14" trl==0.8.6 transformers==4.40.2 accelerate==0.30.1 peft==0.10.0 \
    datasets==2.19.2 diffusers==0.27.2 "huggingface_hub<0.26" "numpy<2" pyarrow==16.1.0 pandas==2.2.3 rich
"$directory/bin/python" -c 'import trl; from trl import PPOTrainer; print("TRL", trl.__version__, "in", trl.__path__[0])'

#!/usr/bin/env bash
# Makes the virtual environment of peer_trl_1_12_ppo.py with Python 3.11: TRL 1.12.0, the last release with PPO, on this
# project's torch and libraries. Usage: make_peer_env_trl_1_12.sh [DIRECTORY]; PYTHON names the interpreter.
set -euo pipefail
directory=${1:-$(cd "$(dirname "$0")" && pwd)/.peers/trl-1.12}
"${PYTHON:-python3.11}" -m venv "$directory"
"$directory/bin/pip" install -q "torch>=2.11,<2.14" trl==1.12.0 transformers==5.23.0 accelerate==1.15.0 \
    datasets==5.2.0 tokenizers==0.23.3 "numpy>=2,<3"
"$directory/bin/python" -c 'import trl; from trl.experimental.ppo import PPOTrainer; print("TRL", trl.__version__)'

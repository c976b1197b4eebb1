"""What a terminal of 80 columns shows in the first two minutes, as text: `python benchmarks/recording.py` writes
RECORDING.md.

Seconds stand before the lines. Of the live line, which is drawn several times a second, one picture a second is kept.
"""

import codecs
import fcntl
import os
import platform
import pty
import re
import shutil
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ["python algos/ppo.py --check", "python algos/ppo.py", "python algos/ppo.py"]
INTRODUCTION = """# The first two minutes

`python benchmarks/recording.py` has run these commands in a terminal of 80 columns, on a CPU ({cpu}, {cores} cores).
Seconds stand before the lines. The live line at the bottom of the terminal is marked by `>`; one picture of it a second
is kept, and less where only the seconds have changed.

```
{lines}
```
"""


def in_terminal(argv, columns, cwd, env, seconds=600):
    """([(seconds since the start, text)] that a command writes to a terminal of so many columns, its exit code)."""
    begin = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces = []
    while time.monotonic() - begin < seconds:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        pieces.append((time.monotonic() - begin, decoder.decode(piece)))
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return pieces, os.waitstatus_to_exitcode(status)


def transcript(pieces, begin=0.0):
    """Lines of text, each behind its seconds: those that stay, and of the live line one picture a second."""
    lines = []
    last_picture = begin - 1
    last_kind = ""
    rest = ""
    for seconds, text in pieces:
        seconds += begin
        text = re.sub(r"\x1b\[\?25[lh]", "", text.replace("\r\n", "\n"))  # the cursor, shown and hidden
        text = rest + text.replace("\n\r\x1b[1A", "")  # the end of the live line
        *parts, rest = re.split(r"(?<=[\r\n])", text)
        for part in parts:
            line = part.replace("\x1b[2K", "").strip("\r\n")
            kind = re.sub(r"[\d,.]+", "", line)
            if part.endswith("\n"):
                lines.append(f"{seconds:6.1f}   {line}".rstrip())
            elif line and seconds - last_picture >= 1 and kind != last_kind:
                lines.append(f"{seconds:6.1f} > {line}")
                last_picture = seconds
                last_kind = kind
    return lines


def main():
    lines = []
    begin = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("algos", "common", "benchmarks"):
            shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=shutil.ignore_patterns("curves", ".peers"))
        for command in COMMANDS:
            lines += ["", f"{begin:6.1f} $ {command}"]
            pieces, code = in_terminal(command.split(), 80, folder, os.environ)
            if code != 0:
                sys.exit(f"{command} ended with {code}")
            lines += transcript(pieces, begin)
            begin += pieces[-1][0]
    text = INTRODUCTION.format(
        cpu=platform.processor() or platform.machine(), cores=os.cpu_count(), lines="\n".join(lines)
    )
    (ROOT / "benchmarks/RECORDING.md").write_text(text)


if __name__ == "__main__":
    main()

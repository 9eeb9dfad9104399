"""Commands on a terminal of a given width, and what they draw there."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

from tests.support.commands import ROOT


def drawn(argv, columns: int, **environment) -> tuple[int, list[str]]:
    """(exit code, everything that stood on a line at some time) of a command on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"} | environment
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=variables)
    os.close(theirs)
    data = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        data += part
    os.close(ours)
    text = data.decode("utf-8", "replace").replace("\n", "\r").replace("\x1b[A", "")  # one row up, in the same column
    return process.wait(), [line for line in text.split("\r") if line.strip()]

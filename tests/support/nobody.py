"""Commands run by a user with no rights: nobody, where the tests are root's, and the user otherwise."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534


def prefix() -> list[str]:
    """The words before a command that make it nobody's. Skips if this machine has no mount namespaces for root.

    Root's Python is often in a folder that is closed to others: the command sees it in a file system of its own.
    """
    if os.geteuid() != 0:
        return []
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("needs unshare and setpriv to run as nobody")
    python = Path(sys.base_prefix).resolve()
    closed = next((p for p in reversed(python.parents) if not p.stat().st_mode & 0o005 == 0o005), None)
    script = f"exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups "
    if closed:
        old, new, above = (shlex.quote(str(p)) for p in (python, tempfile.mkdtemp(), closed))
        script = (
            f"mount --bind {old} {new} && mount -t tmpfs -o mode=755 none {above} && mkdir -p {old} && "
            f"mount --bind {new} {old} && rmdir {new} 2>/dev/null; {script}"
        )
    words = ["unshare", "--mount", "sh", "-c", f'{script}"$@"', "sh"]
    tried = subprocess.run([*words, sys.executable, "-c", "import torch"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"nobody cannot run this Python here: {tried.stderr.strip()[-200:]}")
    return words


def closed(path: Path) -> Path:
    """The file or folder, which only its owner may open now; nobody may not, and a user may not open his own."""
    path.chmod(0o700 if os.geteuid() == 0 else 0)
    return path

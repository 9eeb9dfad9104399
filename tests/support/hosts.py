"""Two hosts of one machine: what ends them."""

from tests.support import ranks


def end_hosts(process):
    """SIGTERM first: the script takes its hosts away."""
    process.terminate()
    try:
        process.wait(timeout=20)
    finally:
        ranks.kill_session(process)

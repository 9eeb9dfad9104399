"""A program: the watchdogs of ranks 0 and 1 in one process. Prints rank 0's port; a line of input ends it."""

import json
import sys
from pathlib import Path

from finetune.distributed.env import RankEnv
from finetune.distributed.watchdog import Watchdog


def main(token: str, timeout_s: float) -> None:
    listener = Watchdog.listen("127.0.0.1")
    address = listener.getsockname()
    common = timeout_s, Path("stacks"), lambda text: print(text, file=sys.stderr, flush=True), lambda error: False
    first = Watchdog(RankEnv(0, 2, 0, 2), *common, token, listener=listener)
    first.start()
    second = Watchdog(RankEnv(1, 2, 1, 2), *common, token, address=address)
    second.start()
    print(json.dumps(address[1]), flush=True)
    sys.stdin.readline()
    first.close()
    second.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

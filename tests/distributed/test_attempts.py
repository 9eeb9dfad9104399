"""Ranks that torchrun starts again meet in its store, which keeps what earlier ones wrote."""

import json
import threading

import torch.distributed as dist

from finetune.distributed.env import RankEnv
from finetune.torch_engine.parallel.process_groups import create_store

PATIENCE_S = 10.0


def start(size: int, port: int, word: str) -> list:
    """What the ranks of one start read where each has written a word."""
    found = [None] * size

    def run(rank: int) -> None:
        env = RankEnv(rank, size, 0, 1, "127.0.0.1", port, "torchrun")
        store = create_store(env, PATIENCE_S)
        store.set(f"word-{rank}", word)
        found[rank] = [store.get(f"word-{other}").decode() for other in range(size)]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_each_start_meets_anew_in_a_store_that_outlives_it_whatever_an_agent_counts(monkeypatch):
    """On three ranks, on two and on three again; between them ranks that came alone and are gone."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for number, size in enumerate((3, 2, 3)):
        assert start(size, server.port, f"start {number}") == [[f"start {number}"] * size] * size
        # Of two, one may live still: it is told by a start of as many ranks as its own.
        told = [server.check([f"attempt of {other}"]) for other in range(number)]
        assert told == [size == 3 for _ in range(number)], number
        server.set(f"arrival-{server.add('arrivals', 1)}", json.dumps([str(number), 3]))
        server.add("arrivals", 1)  # it ended before it said who it is

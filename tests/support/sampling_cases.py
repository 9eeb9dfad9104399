"""Sampled answers of ranks that keep their shards, beside those of one process."""

from finetune.distributed.env import RankEnv
from finetune.generation import Sampling
from finetune.torch_engine.parallel import process_groups
from tests.support import cases, generation_cases, ranks

PROMPTS = generation_cases.PROMPTS
SEEDS = [[(1, row, sample) for sample in range(3)] for row in range(len(PROMPTS))]
MOST = [8, 5, 8]
ENDS = {1, 9}


def sampled(engine, rows: range) -> list:
    """[ids, log-probabilities, ended] of each answer to the prompts of these rows."""
    chosen = [[each[row] for row in rows] for each in (PROMPTS, SEEDS, MOST)]
    found = engine.sample(*chosen, ENDS, Sampling(1.0))
    return [[answer.ids, answer.log_probs, answer.ended] for answers in found for answer in answers]


def over_ranks(rank: int, size: int, wanted: list) -> list[dict]:
    """[{"found", "alone"}] of each (layout, kind, architecture, tokens of a prefill; 0: padded rows). Of every rank."""
    found = []
    for layout, kind, architecture, prefill in ranks.each_in_groups_of_its_own(rank, size, wanted):
        groups = process_groups.ProcessGroups.of(RankEnv(rank, size), cases.LAYOUTS[layout], cases.DEVICE)
        engine = generation_cases.trained(kind, groups, architecture)
        engine.parallel.gathers_all = False
        if not prefill:
            engine.verify("padded")
        engine.forward.row_length = prefill
        mine = range(engine.data_rank, len(PROMPTS), size)
        many = sampled(engine, mine)
        none = sampled(engine, range(rank, 1, size))  # a prompt for one of the ranks
        alone = None
        if rank == 0:
            one = generation_cases.trained(kind, architecture=architecture)
            alone = [sampled(one, range(i, len(PROMPTS), size)) for i in range(size)]
        found.append({"found": many, "few": none, "alone": alone, "kept": engine.keeps_shards})
    return found

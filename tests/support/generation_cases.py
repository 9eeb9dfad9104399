"""Answers of a model over ranks, beside those of one process."""

from finetune.distributed.env import RankEnv
from finetune.run.evaluation import exact_match
from finetune.torch_engine.parallel import process_groups
from tests.support import cases, ranks

# Prompts of unequal lengths, and fewer of them than ranks take part.
PROMPTS = [[7 * i % 120 + 3 for i in range(n)] for n in (3, 11, 6)]
MOST = 8
STOP = {1}  # without a token that ends answers, a row that ended goes on as long as the others of its batch
STEPS = 3  # untrained, a tiny model repeats one token


def trained(kind: str, groups=process_groups.SINGLE_PROCESS, architecture: str = "llama", stages: int = 1):
    engine = cases.build(cases.CASES[kind], groups, architecture, stages)
    cases.train(engine, STEPS)
    return engine


class Text:
    """A tokenizer of numbers."""

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


def answers_of(engine, keeps_shards: bool = False) -> dict:
    """Greedy answers: of each rank's share of PROMPTS, of one prompt on every rank, of rows that end early, and of
    fewer prompts than ranks; their scores; and the loss of a step after them.
    """
    engine.parallel.gathers_all = not keeps_shards
    expected = Text().decode([int(n) for n in engine.generate(PROMPTS[:1], 2, set())[0]])
    examples = [(prompt, expected, "file") for prompt in PROMPTS]
    score, texts = exact_match(engine, Text(), examples, 2, STOP, batch_size=2)
    _, longer = exact_match(engine, Text(), examples, MOST, STOP, batch_size=2, whole=True)
    (one,) = engine.generate(PROMPTS[1:2], MOST, set())
    ended = engine.generate(PROMPTS, MOST, {one[2]}, lambda row, ids: row == 1 and len(ids) == 2)
    alone, _ = exact_match(engine, Text(), examples[:1], 2, STOP)
    step = engine.train_step(cases.rank_batches(engine, cases.rows_of_step(STEPS)), 1e-3)
    texts = {"texts": texts, "longer": longer, "one": one, "ended": ended}
    return {**texts, "scores": [score, alone], "loss": step.nll / step.num_targets}


def over_ranks(rank: int, size: int, wanted: list) -> list[dict]:
    """[{"found", "alone"}] of each (layout, kind, architecture, keeps shards); called in every rank."""
    found = []
    for layout, kind, architecture, keeps in ranks.each_in_groups_of_its_own(rank, size, wanted):
        dims = cases.LAYOUTS[layout]
        groups = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, cases.DEVICE)
        many = answers_of(trained(kind, groups, architecture), keeps)
        alone = answers_of(trained(kind, architecture=architecture, stages=dims.pp)) if rank == 0 else None
        found.append({"cell": [layout, kind, architecture, keeps], "found": many, "alone": alone})
    return found

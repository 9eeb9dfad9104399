"""What every Engine and every Parallelism must do, whatever implements it: one check per protocol."""

import inspect

import numpy as np
import pytest

from finetune.data.collate import microbatches
from finetune.distributed.env import RankEnv
from finetune.engine import Engine
from finetune.errors import NonFiniteError
from finetune.torch_engine.parallel.parallelism import Parallelism
from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS, ProcessGroups
from recursive.config import ArchConfig, PretrainConfig
from recursive.data.arrays import Rows
from recursive.data.carry import Carry
from recursive.data.data import batch_of
from recursive.torch_engine.engine import build as build_recursive
from tests.support import cases

LR = 1e-2
RECURSIVE = ArchConfig(
    hidden_size=16, num_heads=2, L_layers=1, expansion=2, L_cycles=2, halt_max_steps=2, forward_dtype="float32"
)
IDS = np.random.default_rng(0).integers(1, 20, (8, 12)).astype(np.int32)
ROWS = Rows(IDS, np.roll(IDS, -1, 1).astype(np.int64), np.zeros(8, np.int32), 0, 20, 1, None, {"rows": 0})


def members(protocol) -> set[str]:
    """Public names that a protocol asks for."""
    named = {name for name, _ in inspect.getmembers(protocol) if not name.startswith("_")}
    return named | set(inspect.get_annotations(protocol))


def check_engine(build, dataset, tmp_path) -> None:
    """`build()`: the same new engine each time, in one process, with adapters on it; `dataset`: eight rows or more."""
    engine = build()
    missing = {name for name in members(Engine) if not hasattr(engine, name)} - {"layout"}
    assert not missing, missing
    used, reason = engine.verify("auto")["batch_layout"]
    assert used == engine.layout in ("padding_free", "padded") and reason
    trainable, total = engine.parameter_counts()
    assert 0 < trainable < total
    engine.begin_memory(0)
    batches = _batches(engine, dataset, range(8))

    _check_try_step_changes_nothing(engine, batches)
    _check_undone_steps_leave_nothing(engine, batches)
    first = engine.evaluate(batches)
    results = [engine.train_step(batches, LR) for _ in range(4)]
    assert [r.num_targets for r in results] == [first.num_targets] * 4 and all(r.grad_norm > 0 for r in results)
    assert results[0].nll == pytest.approx(first.nll, rel=1e-5)
    assert engine.evaluate(batches).nll < first.nll
    assert engine.memory().total > 0 and engine.reset_memory() >= 0

    _check_accumulation(build, dataset)
    _check_state(engine, build, batches)
    _check_snapshot(engine, batches)
    _check_not_finite(engine, batches)
    _check_generation(engine)
    _check_single_rank_collectives(engine)
    assert all(isinstance(content, dict) for content in engine.describe_weights("base", "digest").values())
    with engine.profiler([]) as after_step:
        after_step()


def _batches(engine, dataset, rows, tokens: int = 10**6):
    return microbatches(dataset, rows, engine.layout, 8, tokens, engine.pad_id)


def _state(engine) -> tuple:
    return engine.trainable_state(), engine.optimizer_state(), engine.rng_state()


def _copy(state: tuple) -> tuple:
    trainable, (moments, values), rng = state
    return tuple({k: np.array(v) for k, v in d.items()} for d in (trainable, moments, rng)), values


def _equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def _check_try_step_changes_nothing(engine, batches) -> None:
    before, _ = _copy(_state(engine))
    engine.try_step(batches[0], several=True)
    after, _ = _copy(_state(engine))
    assert all(map(_equal, before, after))


def _check_undone_steps_leave_nothing(engine, batches) -> None:
    before, values = _copy(_state(engine))
    with engine.undone():
        engine.train_step(batches, 0.1)
        assert not _equal(before[0], _copy(_state(engine))[0][0])
    after, same = _copy(_state(engine))
    assert all(map(_equal, before, after)) and values == same


def _check_accumulation(build, dataset) -> None:
    """Many microbatches are one batch: same loss, same norm. The tolerance is fp32 sums in another order."""
    results = []
    for tokens in (10**6, 1):
        engine = build()
        engine.verify("auto")
        batches = _batches(engine, dataset, range(8), tokens)
        results.append(engine.train_step(batches, LR))
    one, many = results
    assert one.nll == pytest.approx(many.nll, rel=1e-5) and one.grad_norm == pytest.approx(many.grad_norm, rel=1e-4)


def _check_state(engine, build, batches) -> None:
    """State loaded into a new engine continues bitwise as the old one does."""
    (trainable, moments, rng), values = _copy(_state(engine))
    assert trainable and moments and rng and values == engine.optimizer_values()
    other = build()
    other.verify("auto")
    other.load_state(trainable, moments, values, rng)
    assert not other.reseeded
    mine, theirs = engine.train_step(batches, LR), other.train_step(batches, LR)
    assert (mine.nll, mine.grad_norm) == (theirs.nll, theirs.grad_norm)
    assert _equal(*({k: np.array(v) for k, v in e.trainable_state().items()} for e in (engine, other)))


def _check_snapshot(engine, batches) -> None:
    """Later steps leave what a snapshot returned as it was, until the next one."""
    engine.prepare_snapshot()
    for _ in range(2):
        before, values = _copy(_state(engine))
        with engine.snapshot():
            (trainable, (moments, kept_values), rng) = _state(engine)
        engine.train_step(batches, LR)
        assert all(map(_equal, before, (trainable, moments, rng))) and kept_values == values
        assert not _equal(before[0], _copy(_state(engine))[0][0])


def _check_not_finite(engine, batches) -> None:
    """A step that is not finite raises and leaves weights and moments as they were."""
    (trainable, moments, rng), values = _copy(_state(engine))
    broken = {k: np.full_like(v, np.inf) for k, v in trainable.items()}
    engine.load_state(broken, moments, values, rng)
    with pytest.raises(NonFiniteError):
        engine.train_step(batches, LR)
    assert _equal(broken, engine.trainable_state()) and _equal(moments, engine.optimizer_state()[0])
    engine.load_state(trainable, moments, values, rng)


def _check_generation(engine) -> None:
    before, _ = _copy(_state(engine))
    with engine.full_weights():
        greedy = engine.generate([[3, 4, 5], [6, 7]], 5, set())
    assert [len(ids) for ids in greedy] == [5, 5]
    after, _ = _copy(_state(engine))  # answers between steps must not change the dropout of those that follow
    assert all(map(_equal, before, after))
    assert engine.generate([[3, 4, 5]], 5, {greedy[0][2]})[0] == greedy[0][: greedy[0].index(greedy[0][2])]
    stopped = engine.generate([[3, 4, 5]], 5, set(), lambda row, ids: len(ids) >= 2)
    assert len(stopped[0]) <= 3
    sampled = []
    for _ in range(2):
        engine.seed(7)
        sampled.append(engine.generate([[3, 4, 5]], 5, set(), temperature=1.0, top_k=0, top_p=1.0))
    assert sampled[0] == sampled[1]
    assert engine.vocab_size() > 0 and (engine.context_limit() is None or engine.context_limit() > 0)


def _check_single_rank_collectives(engine) -> None:
    assert engine.rank == engine.data_rank == 0
    assert engine.all_reduce_max(3) == 3
    assert engine.all_gather_object({"a": 1}) == [{"a": 1}] and engine.broadcast_object("x") == "x"
    assert engine.shard_list([1, 2, 3]) == [1, 2, 3] and engine.shard_writer is None


def parallelism(rank: int, size: int, layouts: list, distribution: str, kinds: list) -> list[dict]:
    """The report of each (layout, case); called in every rank of a process group."""
    reports = []
    for layout in layouts:
        for kind in kinds:
            dims = cases.LAYOUTS[layout]
            groups = ProcessGroups.of(RankEnv(rank, size), dims, cases.DEVICE)
            stages = dims.pp

            def build(groups=groups, kind=kind, stages=stages):
                return cases.build(cases.CASES[kind], groups, stages=stages, distribution=distribution)

            def alone(kind=kind, stages=stages):
                return cases.build(cases.CASES[kind], stages=stages)

            reports.append({"layout": layout, "kind": kind, **check_parallelism(build, alone)})
    return reports


def check_parallelism(build, alone) -> dict:
    """`build()`: this rank's engine; `alone()`: a single process's, of the same model. Called in every rank.

    Figures of three steps against the single process; then what the protocol hands out and takes back: state of the
    single process, loaded into a distributed engine and gathered again, is bitwise the same, and continues as its own
    does.
    """
    engine, single = build(), alone()
    parallel = engine.parallel
    missing = {name for name in members(Parallelism) if not hasattr(parallel, name)}
    report = {"implementation": type(parallel).__name__, "missing": sorted(missing), "loss": 0.0, "norm": 0.0}
    for step in range(3):
        mine, theirs = (e.train_step(cases.rank_batches(e, cases.rows_of_step(step)), 1e-3) for e in (engine, single))
        report["loss"] = max(report["loss"], abs(mine.nll / theirs.nll - 1))
        report["norm"] = max(report["norm"], abs(mine.grad_norm / theirs.grad_norm - 1))
        report["targets"] = mine.num_targets == theirs.num_targets
    trainable, (moments, values), rng = single.trainable_state(), single.optimizer_state(), single.rng_state()
    moved = build()
    moved.load_state(trainable, moments, values, rng)
    back, (moments_back, values_back) = moved.trainable_state(), moved.optimizer_state()
    on_rank0 = engine.rank == 0
    report["weights come back"] = not on_rank0 or _equal(trainable, back)
    report["moments come back"] = not on_rank0 or _equal(moments, moments_back)
    report["values come back"] = values_back == values | {"degrees": list(moved.groups.dims.mesh_shape)}
    mine, theirs = (e.train_step(cases.rank_batches(e, cases.rows_of_step(3)), 1e-3) for e in (moved, single))
    report["continues"] = abs(mine.nll / theirs.nll - 1)
    with parallel.full_weights(), parallel.full_weights():
        pass
    parallel.reshard()
    parallel.drop_gradients()
    report["gradients left"] = any(p is not None and p.grad is not None for p in parallel.local_params.values())
    return report


def recursive_engine():
    settings = PretrainConfig(arch=RECURSIVE, grad_clip_norm=1.0)
    return build_recursive(settings, ROWS, SINGLE_PROCESS, Carry(4, 2, halting=False))


def check_recursive_engine() -> None:
    """The third engine, whose microbatches are slots: the same checks of steps, state, failures and generation."""
    build = recursive_engine
    engine, batches = build(), [batch_of(ROWS, np.arange(4), trim=True), batch_of(ROWS, np.arange(4, 8), trim=True)]
    missing = {name for name in members(Engine) if not hasattr(engine, name)}
    assert not missing, missing
    engine.verify("auto")
    engine.begin_memory(0)
    for _ in range(3):
        result = engine.train_step(batches[:1], LR)
    assert result.grad_norm > 0 and engine.memory().total > 0 and engine.reset_memory() >= 0
    one, many = (build().train_step(b, LR) for b in ([batch_of(ROWS, np.arange(4), True)], _halves()))
    assert one.nll == pytest.approx(many.nll, rel=1e-5) and one.grad_norm == pytest.approx(many.grad_norm, rel=1e-4)
    assert engine.evaluate(batches).num_targets == sum(b.num_targets for b in batches)
    _check_state(engine, build, batches[:1])
    _check_snapshot(engine, batches[:1])
    _check_not_finite(engine, batches[:1])
    _check_generation(engine)
    _check_single_rank_collectives(engine)
    assert all(isinstance(content, dict) for content in engine.describe_weights("", "").values())
    with engine.profiler([]) as after_step:
        after_step()


def _halves() -> list:
    return [batch_of(ROWS, np.arange(i, i + 2), True, slots=np.arange(i, i + 2)) for i in (0, 2)]

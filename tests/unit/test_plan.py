"""The plan: every pair once, equal shards, halos; brute force against the definition."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspec.attention import plan as plan_module
from torchspec.attention.plan import Task, build_plan

lengths = st.lists(st.integers(0, 23), min_size=1, max_size=7)
sizes = st.integers(1, 5)
windows = st.none() | st.integers(1, 30)


def ends(lengths):
    return tuple(np.cumsum([0, *lengths]).tolist())


def plans(cu, size, window=None):
    return [build_plan(cu, size, rank, window) for rank in range(size)]


def pairs(tasks):
    """The (row, key) pairs of tasks, by the letter of Task's docstring."""
    found = []
    for task in tasks:
        n, m = task.q1 - task.q0, task.k1 - task.k0
        for i in range(n):
            seen = [
                j
                for j in range(m)
                if (not task.causal or j <= i + m - n) and (task.left is None or j >= i + m - n - task.left)
            ]
            assert seen, f"{task} has a row without keys"
            found += [(task.q0 + i, task.k0 + j) for j in seen]
    return found


def wanted(cu, window, entries=0):
    """The causal relation of a pack, by definition."""
    document = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    reach = cu[-1] + 1 if window is None else window - entries
    return {
        (q, k) for q in range(cu[-1]) for k in range(q + 1) if document[q] == document[k] and q - k < reach
    }


def covered(all_plans, entries=0):
    """(pairs over ranks and ring steps, pairs over ranks against the gathered trunk), in pack positions."""
    ring, gather = [], []
    for mine in all_plans:
        for other in all_plans:
            tasks = mine.tasks(other.rank, entries)
            assert not any(b.causal and not a.causal for a, b in pairwise(tasks))
            for i, j in pairs(tasks):
                ring.append((int(mine.index[i]), int(other.index[j])))
        gather += [(int(mine.index[i]), j) for i, j in pairs(mine.tasks(None, entries))]
    return ring, gather


def assert_covers_once(cu, size, window, entries=0):
    expected = wanted(cu, window, entries)
    for found in covered(plans(cu, size, window), entries):
        assert len(found) == len(set(found))
        assert set(found) == expected


@settings(max_examples=150, deadline=None)
@given(lengths, sizes, windows, st.integers(0, 6))
def test_every_pair_is_covered_exactly_once(lengths, size, window, entries):
    assert_covers_once(ends(lengths), size, window, entries if window else 0)


@settings(max_examples=50, deadline=None)
@given(lengths, sizes, windows, st.data())
def test_rows_are_a_subset_of_the_queries(lengths, size, window, data):
    for plan in plans(ends(lengths), size, window):
        total = plan.rows[plan.rank]
        cuts = sorted(
            data.draw(st.lists(st.integers(0, total), max_size=6).filter(lambda x: len(x) % 2 == 0))
        )
        rows = tuple(zip(cuts[::2], cuts[1::2]))
        selected = [i for a, b in rows for i in range(a, b)]
        everything = pairs(plan.tasks(None))
        expected = [(new, k) for new, old in enumerate(selected) for q, k in everything if q == old]
        assert sorted(pairs(plan.tasks(None, rows=rows))) == sorted(expected)


@settings(max_examples=80, deadline=None)
@given(lengths, sizes, windows, st.integers(1, 4), st.data())
def test_blocks_see_what_lies_before_their_anchor(lengths, size, window, slots, data):
    cu = ends(lengths)
    positions = st.integers(0, cu[-1] - 1) if cu[-1] else st.nothing()
    anchors = tuple(sorted(data.draw(st.lists(positions, max_size=8)))) if cu[-1] else ()
    all_plans = plans(cu, size, window)
    expected = []
    for i, p in enumerate(anchors):
        first = p - all_plans[0].visible(p)
        for j in range(slots):
            reach = window or cu[-1] + slots
            expected += [((i, j), k) for k in range(first, p) if p + j - k < reach]
    ring, gather = [], []
    for mine in all_plans:
        own = [i for i, p in enumerate(anchors) if mine.places[0][p] == mine.rank]
        assert [anchors[i] for i in own] == mine.own_anchors(anchors)
        for other in all_plans:
            for i, j in pairs(mine.block_tasks(other.rank, anchors, slots)):
                ring.append(((own[i // slots], i % slots), int(other.index[j])))
        gather += [
            ((own[i // slots], i % slots), j) for i, j in pairs(mine.block_tasks(None, anchors, slots))
        ]
    assert sorted(ring) == sorted(gather) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(lengths, sizes)
def test_ranks_share_the_pack(lengths, size):
    cu = ends(lengths)
    all_plans = plans(cu, size)
    assert sorted(np.concatenate([p.index for p in all_plans])) == list(range(cu[-1]))
    for p in all_plans:
        assert p.rows == all_plans[0].rows
        assert len(p.index) == p.rows[p.rank]
        assert sorted(p.index) == p.index.tolist()
        owner, row = p.places
        assert (owner[p.index] == p.rank).all()
        assert (row[p.index] == np.arange(len(p.index))).all()
    spread = max(all_plans[0].rows) - min(all_plans[0].rows)
    assert spread <= 1


@settings(max_examples=100, deadline=None)
@given(lengths, sizes, st.integers(1, 7))
def test_shifts_equal_the_global_shift(lengths, size, passes):
    assert_shifts(ends(lengths), size, passes)


def assert_shifts(cu, size, passes):
    document = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    for plan in plans(cu, size):
        halo = plan.halo(passes)
        assert not set(halo) & set(plan.index)
        assert len(set(halo)) == len(halo)
        available = np.concatenate([plan.index, halo])
        needed = set()
        for distance in range(passes + 1):
            for position, where in zip(plan.index, plan.shift(distance, passes)):
                target = position + distance
                if target < cu[-1] and document[target] == document[position]:
                    assert available[where] == target
                    needed.add(target)
                else:
                    assert where == -1
        assert set(halo) <= needed  # nothing travels in vain


def test_zigzag_tasks_are_what_the_ring_needs():
    """Two documents of 8 over two ranks; rank 0 has chunks 0 and 3 of each, rank 1 chunks 1 and 2."""
    zero, one = plans((0, 8, 16), 2)
    assert zero.index.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert one.index.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert zero.tasks(0) == (Task(0, 4, 0, 4, True), Task(4, 8, 4, 8, True))
    assert zero.tasks(1) == (Task(2, 4, 0, 4, False), Task(6, 8, 4, 8, False))  # late rows, all keys
    assert one.tasks(0) == (Task(0, 4, 0, 2, False), Task(4, 8, 4, 6, False))  # all rows, early keys
    assert zero.tasks(None) == (
        Task(0, 2, 0, 2, True),
        Task(2, 4, 0, 8, True),
        Task(4, 6, 8, 10, True),
        Task(6, 8, 8, 16, True),
    )


def test_ring_steps_are_balanced():
    for size in (2, 4, 8):
        all_plans = plans((0, 32 * size), size)
        for step in range(1, size):
            work = {len(pairs(p.tasks((p.rank - step) % size))) for p in all_plans}
            assert len(work) == 1


def test_plans_are_cached():
    assert build_plan((0, 5), 2, 0) is build_plan((0, 5), 2, 0)
    assert build_plan((0, 5), 2, 0).tasks(1) is build_plan((0, 5), 2, 0).tasks(1)


BAD = {
    r"cu_seqlens is \[0, 4, 3\]; it must start at 0 and never fall": dict(cu_seqlens=(0, 4, 3)),
    r"cu_seqlens is \[1, 4\]": dict(cu_seqlens=(1, 4)),
    r"cu_seqlens is \[\]": dict(cu_seqlens=()),
    r"rank is 2 of size 2": dict(rank=2),
    r"rank is 0 of size 0": dict(size=0),
    r"window is 0; it must be at least 1": dict(window=0),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        build_plan(**{**dict(cu_seqlens=(0, 5), size=2, rank=0), **BAD[message]})


def test_bad_queries():
    plan = build_plan((0, 5), 1, 0)
    with pytest.raises(ValueError, match="passes is 0; it must be at least 1"):
        plan.halo(0)
    with pytest.raises(ValueError, match="distance is 3"):
        plan.shift(3, 2)
    for rows in (((3, 6),), ((2, 4), (3, 5)), ((3, 1),), ((-1, 2),)):
        with pytest.raises(ValueError, match="ascending ranges of the 5 local rows"):
            plan.tasks(None, rows=rows)
    with pytest.raises(ValueError, match="anchors has 5; positions of this pack are 0 to 4"):
        plan.block_tasks(None, (5,), 2)
    with pytest.raises(ValueError, match="not ascending"):
        plan.block_tasks(None, (3, 1), 2)
    with pytest.raises(ValueError, match="slots is 0"):
        plan.block_tasks(None, (1,), 0)


@pytest.mark.parametrize("bug", ["swapped chunks", "off-by-one window", "late rows miss a key"])
def test_planted_bugs_are_noticed(bug, monkeypatch):
    real = plan_module._pair

    def broken(query, run, window):
        for task in real(query, run, window):
            if bug == "late rows miss a key" and not task.causal and task.k1 - task.k0 > 1:
                task = task._replace(k1=task.k1 - 1)
            if bug == "off-by-one window" and task.left is not None:
                task = task._replace(left=task.left + 1)
            yield task

    monkeypatch.setattr(plan_module, "_pair", broken)
    plan_module._row_tasks.cache_clear()
    cu = (0, 16, 19)
    all_plans = plans(cu, 2, window=4)
    found = covered(all_plans)[0]
    if bug == "swapped chunks":
        all_plans[0].index[[0, -1]] = all_plans[0].index[[-1, 0]]
        found = covered(all_plans)[0]
        build_plan.cache_clear()
    plan_module._row_tasks.cache_clear()
    assert sorted(found) != sorted(wanted(cu, 4))


@pytest.mark.parametrize("late", [1, -1])
def test_a_halo_off_by_one_is_noticed(late, monkeypatch):
    real = plan_module.Plan.halo
    monkeypatch.setattr(plan_module.Plan, "halo", lambda self, passes: real(self, passes + late))
    with pytest.raises((AssertionError, IndexError)):
        assert_shifts((0, 32), 2, 3)

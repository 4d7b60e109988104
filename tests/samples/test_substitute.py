"""Replacements: the same in every run, never the bad one, never from outside the sampler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.samples import substitute as s
from holdfast.samples.substitute import BatchHints, Drawn


@given(position=st.integers(0, 2**31), number=st.none() | st.integers(0, 2**20))
def test_a_code_says_which_sample(position: int, number: int | None) -> None:
    code = s.code(position, number)
    assert s.position_of(code) == position
    assert s.number_of(code) == number
    assert -(2**63) <= code < 2**63


def test_only_what_was_drawn_is_a_candidate() -> None:
    drawn = Drawn()
    assert drawn.candidates(1) == []
    drawn.add(["a", "b"])
    assert sorted(drawn.candidates(1)) == ["a", "b"]
    drawn.add(range(3 * s.REMEMBERED))
    for seed in range(50):
        chosen = drawn.candidates(seed)
        assert len(set(chosen)) == s.CANDIDATES
        assert chosen == drawn.candidates(seed)
        assert all(2 * s.REMEMBERED <= one < 3 * s.REMEMBERED for one in chosen)


@given(
    seed=st.integers(0, 2**32),
    position=st.integers(0, 7),
    left_out=st.sets(st.integers(0, s.CANDIDATES - 1)),
)
def test_who_is_left_out_does_not_change_the_order_of_the_others(
    seed: int, position: int, left_out: set[int]
) -> None:
    index = list(range(8))
    candidates = tuple((number, 100 + number) for number in range(s.CANDIDATES))
    some = tuple(one for one in candidates if one[0] not in left_out)
    full = s.order(BatchHints({}, candidates, seed), index, position)
    part = s.order(BatchHints({}, some, seed), index, position)
    assert part == [one for one in full if one[0] not in left_out]


def test_a_sample_does_not_stand_in_for_itself() -> None:
    brief = BatchHints({}, ((0, 5), (1, 6)), 1)
    ranked = s.order(brief, [5, 7, 5, 8], 2)
    assert {key for _, key in ranked} == {6, 7, 8}


def test_a_candidate_is_found_by_its_code() -> None:
    brief = BatchHints({}, ((3, "x"),), 1)
    assert s.sample_of(["a", "b"], brief, s.code(1)) == "b"
    assert s.sample_of(["a", "b"], brief, s.code(1, 3)) == "x"
    assert s.sample_of(["a", "b"], brief, s.code(1, s.CANDIDATES)) == "a"
    assert s.sample_of(("key",), brief, 0) == "key"
    assert s.sample_of(["a"], brief, None) is None

"""Which cases of a grid of tests remain: every value, or every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.grid import covering, mark_the_rest_slow

SIZES = {"dtype": 3, "form": 7, "tiles": 4}
pytest_plugins = ["pytester"]
WHOLE = [dict(zip(SIZES, map(str, values), strict=True)) for values in product(*map(range, SIZES.values()))]


@pytest.mark.parametrize(("strength", "most"), [(1, 7), (2, 32)])
def test_every_combination_that_is_asked_for_is_kept(strength: int, most: int) -> None:
    kept = covering(WHOLE, strength)
    assert 7 <= len(kept) <= most
    for names in combinations(SIZES, strength):
        of_all = {tuple(case[name] for name in names) for case in WHOLE}
        assert {tuple(WHOLE[place][name] for name in names) for place in kept} == of_all


def test_only_what_some_case_has_is_asked_for() -> None:
    assert covering([{"a": "0", "b": "0"}, {"a": "1", "b": "1"}], 2) == {0, 1}


def test_a_marked_test_keeps_pairs_by_implementation(pytester: pytest.Pytester) -> None:
    """Names that come together are one value; tests of a GPU all stay."""
    pytester.makeini("[pytest]\nmarkers = grid\n    gpu\n    slow\n")
    path = pytester.makepyfile(
        """
        import pytest

        @pytest.mark.grid
        @pytest.mark.parametrize("impl", ["reference", "kernel", pytest.param("cuda", marks=pytest.mark.gpu)])
        @pytest.mark.parametrize("dtype", [16, 32])
        @pytest.mark.parametrize("form", [[8], [4]])
        @pytest.mark.parametrize(("rows", "width"), [(1, 200), (7, 1016), (7, 200)])
        def test_grid(impl, dtype, form, rows, width): ...

        @pytest.mark.parametrize("number", range(4))
        def test_beside(number): ...
        """
    )
    items, _ = pytester.inline_genitems(path)
    mark_the_rest_slow(items)
    stay = [item for item in items if "slow" not in item.keywords]
    pytester.makeconftest(
        "from tests.grid import make_no_slow_cases, mark_the_rest_slow\n"
        "def pytest_collection_modifyitems(items): mark_the_rest_slow(items)\n"
        "import pytest\n"
        "@pytest.hookimpl(wrapper=True)\n"
        "def pytest_generate_tests(metafunc): yield; make_no_slow_cases(metafunc)\n"
    )
    made, record = pytester.inline_genitems(path, "-m", "not slow and not gpu")
    asked = {item.name for item in stay if "gpu" not in item.keywords}
    assert {item.name for item in made} == asked
    assert not record.getcalls("pytest_deselected")  # nothing else was made
    assert len([item for item in stay if item.name.startswith("test_beside")]) == 4
    grid = [item.callspec.params for item in stay if item.name.startswith("test_grid")]
    assert len([case for case in grid if case["impl"] == "cuda"]) == 12
    for impl in ("reference", "kernel"):
        few = [case for case in grid if case["impl"] == impl]
        assert len(few) < 12
        assert len({(case["dtype"], case["rows"], case["width"]) for case in few}) == 6
        assert len({(case["form"][0], case["rows"], case["width"]) for case in few}) == 6
        assert len({(case["form"][0], case["dtype"]) for case in few}) == 4


def test_all_cases_that_are_named_stay(pytester: pytest.Pytester) -> None:
    """Also of a grid, whose pairs might be in others."""
    pytester.makeini("[pytest]\nmarkers = grid\n    stays\n    slow\n")
    path = pytester.makepyfile(
        """
        import pytest

        @pytest.mark.stays("0-1", "0-2", "1-2")
        @pytest.mark.grid(1)
        @pytest.mark.parametrize("b", [0, 1, 2])
        @pytest.mark.parametrize("a", [0, 1, 2])
        def test_both(a, b): ...
        """
    )
    items, _ = pytester.inline_genitems(path)
    mark_the_rest_slow(items)
    stay = [item.name for item in items if "slow" not in item.keywords]
    assert stay == ["test_both[0-1]", "test_both[0-2]", "test_both[1-2]"]

"""Which segments make up which stage: laws of all layouts, Megatron's letters, the best balance, errors with their sums."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpar.errors import ConfigError
from mpar.schedules._layout import balance, even, layout_letters, parse_layout, stage_ranges


def chain(layers: int, mtp: int = 0) -> list[str]:
    """Names of the segments of a decoder."""
    return ["embed", *(f"layers.{i}" for i in range(layers)), *(f"mtp.{i}" for i in range(mtp)), "head"]


def cover(ranges: tuple[range, ...], count: int) -> bool:
    """Whether the ranges, one after the other, are 0 .. count - 1."""
    return [i for own in ranges for i in own] == list(range(count))


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_every_segment_is_in_one_stage(layers, stages, data):
    """Whatever the layout, the stages are all segments in order, and there are as many as asked for."""
    cuts = sorted(data.draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    counts = [b - a for a, b in pairwise([0, *cuts, layers])]
    letters = "E" + "|".join("t" * count for count in counts) + "mL"
    costs = data.draw(st.lists(st.floats(0, 9), min_size=layers + 3, max_size=layers + 3))
    names = chain(layers, mtp=1)
    layouts = [(counts, None), (letters, None)]
    layouts += [("balance", costs)] * (stages <= len(names)) + [(None, None)] * (stages <= layers)
    for layout, given_costs in layouts:
        ranges = stage_ranges(names, stages, layout, costs=given_costs)
        assert len(ranges) == stages
        assert cover(ranges, len(names))


@given(st.integers(1, 60), st.integers(1, 12))
def test_even_stages_differ_by_one_layer(layers, stages):
    """No stage has two layers more than another, and the last has no more than any."""
    if layers < stages:
        with pytest.raises(ConfigError, match=f"leave {stages - layers} empty"):
            even(layers, stages)
        return
    counts = even(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(2, 8), st.integers(0, 20))
def test_first_and_last_have_what_was_asked(first, last, middle, more):
    """first and last fix their stages, the others share the rest evenly."""
    counts = even(first + last + middle + more, middle + 2, first=first, last=last)
    assert (counts[0], counts[-1], sum(counts)) == (first, last, first + last + middle + more)
    assert max(counts[1:-1]) - min(counts[1:-1]) <= 1


@pytest.mark.parametrize(
    "layers, stages, options, expected", [(4, 1, {"first": 4}, (4,)), (9, 2, {"first": 5, "last": 4}, (5, 4))]
)
def test_nothing_left_between_first_and_last(layers, stages, options, expected):
    """All stages may be fixed if their sum is right."""
    assert even(layers, stages, **options) == expected


def test_layers_over_go_before_the_last():
    """30 layers in 4 stages: the first, which keeps most microbatches, and the last, which has the head, have fewer."""
    assert even(30, 4) == (7, 8, 8, 7)
    assert stage_ranges(chain(30), 4) == (range(0, 8), range(8, 16), range(16, 24), range(24, 32))


def test_counts_may_be_zero():
    """A stage of the embedding alone, one without anything, one of the head alone."""
    assert stage_ranges(chain(2), 4, (0, 2, 0, 0)) == (range(0, 1), range(1, 3), range(3, 3), range(3, 4))


def test_chains_without_embedding_or_head():
    """Parts that a chain lacks are not asked for; names that say nothing are layers."""
    assert stage_ranges(["a", "b", "c"], 2, "t|tt") == (range(0, 1), range(1, 3))
    assert stage_ranges(["a", "b", "c"], 3) == (range(0, 1), range(1, 2), range(2, 3))


def test_an_embedding_of_two_segments_stays_together():
    """E stands for all segments of the embedding, L for all of the head."""
    names = ["embed.tokens", "embed.norm", "layers.0", "layers.1", "head.norm", "head.loss"]
    assert stage_ranges(names, 3, "E|tt|L") == (range(0, 2), range(2, 4), range(4, 6))


def test_example_of_megatron():
    """`Et*3|(tt|)*29,m|L`: 3 layers with the embedding, 29 times 2, an MTP layer alone, the head alone."""
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    assert stages == ("Ettt", *["tt"] * 29, "m", "L")
    ranges = stage_ranges(chain(61, mtp=1), 32, "Et*3|(tt|)*29,m|L")
    assert ranges[0] == range(0, 4) and ranges[1] == range(4, 6) and ranges[-2:] == (range(62, 63), range(63, 64))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", ("",)),
        ("E||L", ("E", "", "L")),
        ("E |*3 t * 2 , L", ("E", "", "", "ttL")),
        ("((t|)*2m)*2", ("t", "t", "mt", "t", "m")),
        ("(tm)*010", ("tm" * 10,)),
        ("()*5t", ("t",)),
    ],
)
def test_letters(text, expected):
    """Groups nest, bars repeat, stages may be empty, spaces and commas mean nothing."""
    assert parse_layout(text) == expected


grammar = st.recursive(
    st.sampled_from("EtmL|"),
    lambda inner: st.tuples(st.lists(inner, max_size=4), st.integers(1, 3)).map(lambda group: (*group,)),
    max_leaves=12,
)


def written(tree) -> str:
    """The tree in the notation of layouts."""
    return tree if isinstance(tree, str) else "(" + ", ".join(written(part) for part in tree[0]) + f")*{tree[1]}"


def expanded(tree) -> str:
    """What the tree stands for, letter by letter."""
    return tree if isinstance(tree, str) else "".join(expanded(part) for part in tree[0]) * tree[1]


@given(grammar)
def test_repetition_is_repetition(tree):
    """A layout with nested repetitions is read as the same one written out."""
    assert "|".join(parse_layout(written(tree))) == expanded(tree)


@pytest.mark.parametrize(
    "text, place, reason",
    [
        ("Et x", 4, "'x' is none of"),
        ("E(t", 2, "never closed"),
        ("Et)", 3, "never opened"),
        ("*3", 1, "nothing to repeat"),
        ("(*3)", 2, "nothing to repeat"),
        ("t*3*3", 4, "nothing to repeat"),
        ("t*", 2, "a number, 1 or more"),
        ("t*1 0", 2, "2 numbers"),
        ("t*0", 2, "a number, 1 or more"),
        ("t*²", 2, "a number, 1 or more"),
        ("t*" + "9" * 5000, 2, "longer than"),
        ("(((t|)*999)*999)*999", 12, "longer than"),
        ("(" * 50_000, 50_000, "never closed"),
    ],
)
def test_mistakes_have_a_place(text, place, reason):
    """What cannot be read is refused with its place, at once, however much it would be written out."""
    with pytest.raises(ConfigError, match=f"at character {place}, .*{reason}"):
        parse_layout(text)


@pytest.mark.parametrize(
    "layout, stages, words",
    [
        ("Et*3|(t|)*26L", 28, "30 layers, the layout has 29 (3 + 26 x 1): add 1"),
        ("Et*20|t*11L", 2, "30 layers, the layout has 31 (20 + 11): remove 1"),
        ("Et*15|t*15L", 4, "4 stages (ranks times chunks), the layout has 2: add 2"),
        ("Et*15|t*14|tL", 2, "2 stages (ranks times chunks), the layout has 3: remove 1"),
        ("tEt*14|t*15L", 2, "E (embedding) must be the first letter of the first stage, which is 'tE"),
        ("|Et*30L", 2, "E (embedding) must be the first letter of the first stage, which is ''"),
        ("Et*30L|", 2, "L (head) must be the last letter of the last stage, which is ''"),
        ("Et*15Lt*15", 1, "L (head) must be the last letter"),
        ("t*15|t*15L", 2, "the model has one embedding, the layout has 0 E"),
        ("Et*15|Et*15L", 2, "the model has one embedding, the layout has 2 E"),
        ("Et*15|t*15", 2, "the model has one head, the layout has 0 L"),
        ("Et*15|t*15mL", 2, "0 MTP layers, the layout has 1 (1): remove 1"),
        ([8, 8, 8, 5], 4, "30 layers, the layout has 29 (3 x 8 + 5): add 1"),
        ([30, 0, 0], 4, "4 stages (ranks times chunks), the layout has 3: add 1"),
        ([31, -1], 2, "stage 1: -1"),
        ([True] * 30, 30, "stage 0: True"),
        ([15.0, 15.0], 2, "stage 0: 15.0"),
        ([], 2, "there are none"),
        ([10**12, 1], 2, "add up to 1000000000001"),
        (3, 2, "here it is 3"),
        ("balance", 2, "costs are not given"),
        (None, 0, "at least one"),
        (None, 31, "leave 1 empty"),
    ],
)
def test_layouts_of_other_models_are_refused(layout, stages, words):
    """The error says the sums that disagree."""
    with pytest.raises(ConfigError) as error:
        stage_ranges(chain(30), stages, layout)
    assert words in str(error.value)


def test_all_mistakes_of_a_layout_at_once():
    """Wrong in four ways, told four times."""
    with pytest.raises(ConfigError) as error:
        stage_ranges(chain(2, mtp=1), 3, "tm|t|t|")
    lines = str(error.value).splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == [
        "3 stages (ranks times chunks)",
        "the model has one embedding",
        "the model has one head",
        "2 layers",
        "a layer t follows an MTP layer m: MTP layers come after all layers",
    ]


@pytest.mark.parametrize("names", [["layers.0", "embed", "head"], ["embed", "head", "layers.0"], ["mtp.0", "layers.0"]])
def test_chains_out_of_order_are_refused(names):
    """Letters could not say which segment is where."""
    with pytest.raises(ConfigError, match="out of place"):
        stage_ranges(names, 1)


@pytest.mark.parametrize(
    "layers, stages, options, words",
    [
        (30, 4, {"first": 20, "last": 11}, "-1 layers would be left for the other 2"),
        (30, 2, {"first": 20, "last": 9}, "1 layers would be left for the other 0"),
        (4, 1, {"first": 3}, "1 layers would be left for the other 0"),
        (4, 1, {"first": 2, "last": 2}, "both the first and the last"),
        (4, 3, {"first": -1}, "left for the other 2"),
        (3, 4, {"last": 1}, "2 layers for 3 stages leave 1 empty"),
    ],
)
def test_even_refuses_impossible_counts(layers, stages, options, words):
    """first and last that do not fit are refused with the sum."""
    with pytest.raises(ConfigError) as error:
        even(layers, stages, **options)
    assert words in str(error.value)


def all_cuts(count: int, stages: int) -> list[tuple[range, ...]]:
    """Every way to cut without empty stages."""
    return [tuple(range(a, b) for a, b in pairwise((0, *cuts, count))) for cuts in combinations(range(1, count), stages - 1)]


@given(st.lists(st.integers(0, 6) | st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_balance_is_the_best_of_all_cuts(costs, data):
    """Least maximum, then least sum of squares, then lightest first stages: compared with every cut there is."""
    stages = data.draw(st.integers(1, len(costs)))

    def weight(ranges):
        loads = [sum(Fraction(costs[i]) for i in own) for own in ranges]
        return max(loads), sum(load**2 for load in loads), loads

    ranges = balance(costs, stages)
    assert weight(ranges) == min(map(weight, all_cuts(len(costs), stages)))
    assert cover(ranges, len(costs)) and all(ranges) and len(ranges) == stages


def test_balance_lightens_the_stage_of_the_head():
    """A head that costs as much as three layers takes the place of three."""
    ranges = stage_ranges(chain(13), 4, "balance", costs=[0, *[1] * 13, 3])
    assert ranges == (range(0, 5), range(5, 9), range(9, 13), range(13, 15))


@pytest.mark.parametrize("costs, stages", [([1, 2], 3), ([1, 2], 0), ([1, -1], 1), ([1, float("nan")], 1), ([float("inf")], 1)])
def test_balance_refuses(costs, stages):
    """Empty stages, and costs that cannot be added."""
    with pytest.raises(ConfigError):
        balance(costs, stages)


def test_costs_must_fit():
    """One cost for each segment, and only where they are used."""
    with pytest.raises(ConfigError, match="4 segments by 3 costs"):
        stage_ranges(chain(2), 2, "balance", costs=[1, 1, 1])
    with pytest.raises(ConfigError, match="belong to the layout"):
        stage_ranges(chain(2), 2, costs=[1, 1, 1, 1])


@pytest.mark.parametrize("layout", ["Et|tt|tL", "E|ttt||L", "Etttm|mL", "Etttt|mmL"])
def test_letters_of_stages_are_the_layout(layout):
    """Stages that were made by a layout are written as the same layout."""
    names = chain(layout.count("t"), layout.count("m"))
    ranges = stage_ranges(names, layout.count("|") + 1, layout)
    assert layout_letters({names[i]: stage for stage, own in enumerate(ranges) for i in own}) == layout

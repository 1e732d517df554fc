"""Pictures: bars are the timeline's, no format loses any, hostile names stay text, files stay small and need no network."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mpar.errors import ConfigError
from mpar.schedules._action import Action
from mpar.schedules._chrome import chrome_trace
from mpar.schedules._html import html
from mpar.schedules._picture import BAR_KINDS, Bar, Picture, from_timeline, rows, show_memory, show_time
from mpar.schedules._svg import LEFT, RIGHT, WIDTH, _envelope, svg
from mpar.schedules._timeline import Costs, timeline

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert("x")</script></title>]]>&amp;\'\x00\x0b\ud800\u2028'


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """The best known order, in the test's own words."""
    table = []
    for rank in range(ranks):
        warm = min(ranks - rank - 1, microbatches)
        order = [("F", m) for m in range(warm)]
        order += [pair for m in range(microbatches - warm) for pair in (("F", m + warm), ("B", m))]
        order += [("B", m) for m in range(microbatches - warm, microbatches)]
        table.append([Action(rank, kind, m) for kind, m in order])
    return table


def small(title: str = "small", unit: str = "") -> Picture:
    """4 ranks, 6 microbatches, with memory."""
    table = one_f_one_b(4, 6)
    costs = Costs.uniform(4)
    return from_timeline(table, timeline(table, costs), title, costs=costs, unit=unit)


def shapes(text: str) -> list[ElementTree.Element]:
    """Rectangles that have a tooltip: the bars."""
    return [rect for rect in ElementTree.fromstring(text).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


class Page(HTMLParser):
    """Tags and attributes of a page, and the text inside each tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        """Remember it; void elements never close."""
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Every element closes in its turn."""
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Text with the element around it."""
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def data(self) -> dict:
        """What the page's script draws: the first script element."""
        return json.loads(next(text for tag, text in self.texts if tag == "script"))


def test_bars_are_the_actions():
    """Every action is a bar of its rank with its times, and nothing else is."""
    table = one_f_one_b(3, 5)
    times = timeline(table, Costs.uniform(3, forward=1, input=1.5, weight=0.5, transfer=0.25))
    picture = from_timeline(table, times, "")
    expected = [
        (rank, times.start[rank][i], times.end[rank][i], str(action), action.kind)
        for rank, own in enumerate(table)
        for i, action in enumerate(own)
    ]
    assert [bar[:5] for bar in picture.bars] == expected
    assert picture.end == times.makespan


def test_chunks_are_counted_within_a_rank():
    """The stages of a rank, lowest first, have shades 0, 1, ..."""
    table = [[Action(0, "F", 0), Action(3, "F", 0)], [Action(2, "F", 0), Action(1, "F", 0)]]
    table[1].reverse()
    picture = from_timeline(table, timeline(table, Costs.uniform(4)), "")
    assert [(bar.label, bar.chunk) for bar in picture.bars] == [("0F0", 0), ("3F0", 1), ("1F0", 0), ("2F0", 1)]


def test_memory_of_a_split_backward():
    """F adds its activations when it begins; I and W give back their parts when they end."""
    table = [[Action(0, "F", 0), Action(0, "F", 1), Action(0, "I", 0), Action(0, "W", 0), Action(0, "B", 1)]]
    costs = Costs([1], [2], [3], activation=[10], weight_part=[4])
    picture = from_timeline(table, timeline(table, costs), "", costs=costs, unit="s")
    assert picture.memory == (((0, 0), (0, 10), (1, 20), (4, 14), (7, 10), (12, 0)),)
    assert picture.facts["most activations"] == "20 B (rank 0)"


def test_memory_peaks_are_those_of_the_timeline():
    """The highest step of each rank is its peak, and in the end all is given back."""
    picture = small()
    assert [max(size for _, size in steps) for steps in picture.memory] == [4, 3, 2, 1]
    assert all(steps[-1][1] == 0 for steps in picture.memory)


def test_facts_of_1f1b():
    """Bubble (P - 1)(F + B) = 9 of (M + P - 1)(F + B) = 27 units (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    facts = small().facts
    assert facts["time"] == "27"
    assert facts["bubble"] == "9 (33.3 %)"


def test_overlapping_bars_get_rows_of_their_own():
    """Compute first, then queues; in a row nothing overlaps, and no bar is lost."""
    bars = [Bar(0, i, i + 2.5, f"s{i}", "send", "to 1") for i in range(6)] + [Bar(0, 1, 2, "0F0", "F"), Bar(1, 0, 1, "1F0", "F")]
    drawn = rows(Picture("", ("a", "b"), tuple(bars)))
    assert [(row.lane, row.queue) for row in drawn] == [(0, "compute"), (0, "to 1"), (0, "to 1"), (0, "to 1"), (1, "compute")]
    for row in drawn:
        assert all(earlier.end <= later.start for earlier, later in pairwise(row.bars))
    assert sorted(bar for row in drawn for bar in row.bars) == sorted(bars)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"bars": (Bar(2, 0, 1, "x", "F"),)}, "bar 'x' is on lane 2 of 2"),
        ({"bars": (Bar(-1, 0, 1, "x", "F"),)}, "lane -1"),
        ({"bars": (Bar(0, 0, 1, "x", "Z"),)}, "kind 'Z'"),
        ({"bars": (Bar(0, 2, 1, "x", "F"),)}, "from 2 to 1"),
        ({"bars": (Bar(0, -1, 1, "x", "F"),)}, "from -1 to 1"),
        ({"bars": (Bar(0, 0, float("nan"), "x", "F"),)}, "to nan"),
        ({"bars": (Bar(0, 0, float("inf"), "x", "F"),)}, "to inf"),
        ({"bars": (Bar(0, 0, 1e301, "x", "F"),)}, "to 1e+301"),
        ({"bars": (Bar(0, 0, 1, "x", "F", chunk=-1),)}, "of chunk -1"),
        ({"memory": ((),)}, "memory of 1 lanes, there are 2"),
        ({"memory": ((), ((1, 1), (0, 1)))}, "memory of lane 1"),
        ({"memory": ((), ((0, float("inf")),))}, "memory of lane 1"),
        ({"memory": (((0, -1),), ())}, "memory of lane 0"),
        ({"unit": "ms"}, "unit 'ms'"),
        ({"bars": tuple(Bar(7, 0, 1, "x", "F") for _ in range(50))}, "... and 30 more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, words):
    """With its name, before any file is written."""
    with pytest.raises(ConfigError) as error:
        Picture(**{"title": "t", "lanes": ("a", "b"), "bars": (), **change})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "value, unit, expected",
    [(0, "s", "0"), (1.5, "s", "1.5 s"), (0.0123, "s", "12.3 ms"), (4e-6, "s", "4 µs"), (5e-9, "s", "5 ns"), (33, "", "33")],
)
def test_times_are_readable(value, unit, expected):
    """Seconds get a prefix, units of one's own stay as they are."""
    assert show_time(value, unit) == expected


@pytest.mark.parametrize(
    "value, unit, expected",
    [(0, "s", "0 B"), (1023, "s", "1023 B"), (1536, "s", "1.5 KiB"), (2**50, "s", "1024 TiB"), (7, "", "7")],
)
def test_sizes_are_readable(value, unit, expected):
    """Bytes get a binary prefix."""
    assert show_memory(value, unit) == expected


def test_svg_draws_each_bar_in_its_place():
    """Left edge and width are start and duration on the scale of the axis, rows are ranks."""
    picture = small()
    scale = (WIDTH - LEFT - RIGHT) / picture.end
    drawn = shapes(svg(picture))
    by_label = {rect.find(f"{SVG}title").text.split(":")[0]: rect for rect in drawn}
    assert len(drawn) == len(by_label) == len(picture.bars)
    tops = {}
    for bar in picture.bars:
        rect = by_label[bar.label]
        assert float(rect.get("x")) == pytest.approx(LEFT + bar.start * scale, abs=0.5)
        assert float(rect.get("width")) == pytest.approx((bar.end - bar.start) * scale, abs=0.6)
        tops.setdefault(bar.lane, set()).add(float(rect.get("y")))
    assert all(len(own) == 1 for own in tops.values())
    assert [min(tops[lane]) for lane in range(4)] == sorted(min(own) for own in tops.values())


def test_svg_rows_do_not_overlap():
    """Compute, queues beside it and the next rank are one below the other, whatever overlaps in time."""
    bars = [Bar(0, 0, 2, "a", "F"), Bar(0, 0, 2, "b", "send", "to 1"), Bar(0, 1, 2, "c", "send", "to 1"), Bar(1, 0, 2, "d", "F")]
    drawn = shapes(svg(Picture("", ("x", "y"), tuple(bars))))
    assert [rect.find(f"{SVG}title").text[0] for rect in drawn] == ["a", "b", "c", "d"]
    edges = [(float(rect.get("y")), float(rect.get("y")) + float(rect.get("height"))) for rect in drawn]
    assert all(above[1] < below[0] for above, below in pairwise(edges))


def test_svg_numbers_microbatches():
    """Wide bars show their microbatch."""
    texts = [text.text for text in ElementTree.fromstring(svg(small())).iter(f"{SVG}text") if text.get("pointer-events")]
    assert sorted(texts) == sorted(str(m) for m in range(6) for _ in range(8))


def test_svg_of_very_many_bars_shows_shares_of_time():
    """64 ranks, 512 microbatches: less than 2 MB, and the coloured areas are in proportion to the work."""
    table = one_f_one_b(64, 512)
    costs = Costs.uniform(64)
    picture = from_timeline(table, timeline(table, costs), "", costs=costs)
    text = svg(picture)
    assert len(text.encode()) < 2_000_000
    areas: dict[str, float] = {}
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        for path in group.iter(f"{SVG}path"):
            for left, top, right, bottom in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)", path.get("d")):
                size = (float(right) - float(left)) * (float(bottom) - float(top))
                areas[path.get("fill")] = areas.get(path.get("fill"), 0) + size
    forward, backward = areas["#0072b2"], areas["#e69f00"]
    assert backward / forward == pytest.approx(2, rel=0.02)
    whole = 64 * 12 * (WIDTH - LEFT - RIGHT)  # a row is 12 high between lines
    assert (forward + backward) / whole == pytest.approx(512 * 3 / picture.end, rel=0.02)


def test_an_envelope_is_never_below_its_curve():
    """A curve with more steps than pixels keeps every peak, also those of an instant."""
    steps = [(i / 10, (i * 7919) % 101) for i in range(1000)]
    thin = _envelope(steps, 100, 37)
    assert len(thin) <= 37
    for i, (time, _) in enumerate(steps):
        drawn = [size for at, size in thin if at <= time + 1e-9][-1]
        assert drawn >= steps[i][1]
    assert max(size for _, size in thin) == max(size for _, size in steps)


def test_html_has_every_bar():
    """The page's data are the pictures, number by number."""
    chunks = Picture(
        "chunks", ("a",), (Bar(0, 0, 1, "0F0", "F"), Bar(0, 1, 2, "1F0", "F", chunk=1), Bar(0, 0, 1, "s", "send", "q"))
    )
    pictures = [small(), small(unit="s"), chunks]
    page = Page(html(pictures))
    assert [data["unit"] for data in page.data["pictures"]] == ["", "s", ""]
    for data, picture in zip(page.data["pictures"], pictures, strict=True):
        bars = [Bar(row["lane"], *bar[:4], row["queue"], bar[4]) for row in data["rows"] for bar in row["bars"]]
        assert sorted(bars) == sorted(picture.bars)
        assert data["memory"] == [[list(step) for step in steps] for steps in picture.memory]
        assert {f"{bar.kind}{bar.chunk}" for bar in picture.bars} == set(data["colours"])
    assert sum(tag == "canvas" for tag, _ in page.tags) == 3


def test_html_says_the_facts():
    """Keys and values of the facts are in a table."""
    page = Page(html([small()]))
    for key, value in small().facts.items():
        assert ("th", key) in page.texts
        assert ("td", value) in page.texts


def test_hostile_text_stays_text():
    """Titles, lanes, labels, queues and facts with markup in them neither become elements nor break the file."""
    bar = Bar(0, 0, 1, HOSTILE, "F", HOSTILE)
    picture = Picture(HOSTILE, (HOSTILE,), (bar,), (((0, 1),),), "s", {HOSTILE: HOSTILE})
    drawing = svg(picture)
    drawing.encode()
    assert not list(ElementTree.fromstring(drawing).iter(f"{SVG}script"))
    text = html([picture], title=HOSTILE)
    text.encode()
    page = Page(text)
    assert page.open == []
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert page.data["pictures"][0]["rows"][0]["bars"][0][2] == HOSTILE
    assert ("h2", HOSTILE.translate(dict.fromkeys(map(ord, "\x00\x0b\ud800"), "\ufffd"))) in page.texts
    json.dumps(chrome_trace(picture)).encode()


def test_no_file_refers_to_another():
    """No address, no import, no attribute that loads anything; the page forbids itself the network."""
    drawing, page = svg(small()), html([small()])
    assert re.findall(r"\w+://[^\"]*", drawing) == ["http://www.w3.org/2000/svg"]  # the name of the format, never fetched
    assert "://" not in page
    assert not {"src", "href", "action"} & {name for _, attributes in Page(page).tags for name in attributes}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    policies = [attributes for _, attributes in Page(page).tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and policies[0]["content"].startswith("default-src 'none'; ")


def test_trace_has_every_bar():
    """A complete event per bar in microseconds, on the process of its lane and the thread of its queue."""
    bars = (
        Bar(0, 0.5, 2, "0F0", "F"),
        Bar(1, 2, 3, "1F0", "F"),
        Bar(0, 2, 4, "s", "send", "to 1"),
        Bar(0, 3, 5, "t", "send", "to 1"),
    )
    trace = chrome_trace(Picture("p", ("a", "b"), bars, (((0, 0), (0.5, 8)), ()), "s"))
    events = trace["traceEvents"]
    assert sorted((e["pid"], e["tid"], e["ts"], e["dur"], e["name"]) for e in events if e["ph"] == "X") == [
        (0, 0, 0.5e6, 1.5e6, "0F0"),
        (0, 1, 2e6, 2e6, "s"),
        (0, 2, 3e6, 2e6, "t"),
        (1, 0, 2e6, 1e6, "1F0"),
    ]
    assert [(e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [(0, 0, {"bytes": 0}), (0, 5e5, {"bytes": 8})]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"].endswith("_name")}
    assert names == {(0, None): "a", (1, None): "b", (0, 0): "compute", (0, 1): "to 1", (0, 2): "to 1", (1, 0): "compute"}


def test_trace_follows_the_format():
    """What the Trace Event Format asks of each phase (its document, sections on complete, counter and metadata events)."""
    needed = {
        "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
        "C": {"name", "ph", "ts", "pid", "args"},
        "M": {"name", "ph", "args"},
    }
    trace = json.loads(json.dumps(chrome_trace(small()), allow_nan=False))
    assert {event["ph"] for event in trace["traceEvents"]} == set(needed)
    for event in trace["traceEvents"]:
        assert needed[event["ph"]] <= set(event)
        if event["ph"] == "C":
            assert all(isinstance(number, int | float) for number in event["args"].values())


@pytest.mark.parametrize(
    "picture",
    [
        Picture("nothing", (), ()),
        Picture("idle", ("a", "b"), ()),
        Picture("an instant", ("a",), (Bar(0, 0, 0, "0F0", "F"),), (((0, 0),),)),
        Picture("denormal", ("a",), (Bar(0, 0, 5e-324, "0F0", "F"),)),
        Picture("tiny", ("a",), (Bar(0, 0, 1e-300, "0F0", "F"),), (((0, 5e-324),),), "s"),
        Picture("huge", ("a",), (Bar(0, 0, 1e300, "0F0", "F"),), (((0, 1e300),),), "s"),
        Picture("kinds", ("a",), tuple(Bar(0, i, i + 1, kind, kind, chunk=i) for i, kind in enumerate(BAR_KINDS))),
    ],
    ids=lambda picture: picture.title,
)
def test_extremes_can_be_drawn(picture):
    """Empty pictures and numbers at the ends of what floats can say give valid files without nan."""
    drawing = svg(picture)
    ElementTree.fromstring(drawing)
    assert not re.search(r"\b(nan|inf)\b", drawing)
    assert len(Page(html([picture])).data["pictures"]) == 1
    json.dumps(chrome_trace(picture), allow_nan=False)

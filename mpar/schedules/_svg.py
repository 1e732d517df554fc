"""A picture as SVG: a static figure, a row per rank, with the memory curve below each row."""

import re
from collections.abc import Iterator
from functools import lru_cache
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from typing import NamedTuple

from mpar.schedules._picture import BAR_KINDS, Bar, Curve, Picture, Row, rows, show_memory, show_time

__all__ = ["COLOURS", "clean", "shade", "svg"]

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart; wine and greys for the kinds it leaves over
COLOURS = {
    "F": "#0072B2",
    "B": "#E69F00",
    "I": "#D55E00",
    "W": "#009E73",
    "send": "#56B4E9",
    "recv": "#CC79A7",
    "gather": "#F0E442",
    "reduce": "#882255",
    "update": "#555555",
    "other": "#AAAAAA",
}
WIDTH, LEFT, RIGHT = 1200, 64, 56
MAX_BARS = 6000  # each has a tooltip; of more bars only shares of time are drawn, in a bounded number of columns
MAX_COLUMNS = 36_000
LEVELS = 12  # steps in height of a share
DIGIT = 0.56  # width of a digit, in font sizes


def svg(picture: Picture) -> str:
    """The SVG file, below 2 MB for up to 1000 lanes. With more than 6000 bars, it shows shares of time instead of bars."""
    return "\n".join(_Drawing(picture).lines())


def clean(text: str) -> str:
    """The text without characters that XML cannot carry, escaped."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


@lru_cache(maxsize=1024)
def shade(kind: str, chunk: int, chunks: int) -> tuple[int, int, int]:
    """The colour of a kind of work, red, green, blue; later chunks are lighter."""
    towards_white = 0.55 * chunk / (chunks - 1) if chunks > 1 else 0
    red, green, blue = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return tuple(round(c + (255 - c) * towards_white) for c in (red, green, blue))  # type: ignore[return-value]


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _number(value: float) -> str:
    """A coordinate as short text, rounded to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _ticks(end: float) -> list[float]:
    """About ten round times, for the grid."""
    if end <= 0:
        return [0.0]
    raw = end / 10
    size = 10.0 ** floor(log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    return [i * step for i in range(floor(end / step * 1.0000001) + 1)]


def _envelope(steps: Curve, end: float, columns: int) -> Curve:
    """The curve with at most as many steps as there are columns, never below the original."""
    highest, value, at = [0.0] * columns, 0.0, 0
    for time, after in steps:
        column = min(int(time / end * columns), columns - 1)
        highest[at : column + 1] = [max(highest[at], value), *[value] * (column - at)]
        highest[column] = max(highest[column], after)
        value, at = after, column
    highest[at:] = [highest[at], *[value] * (columns - at - 1)]
    return [(i * end / columns, high) for i, high in enumerate(highest) if not i or high != highest[i - 1]]


class _Heights(NamedTuple):
    """row: of a row of compute, narrow: of one of communication, curve: of memory, gap: between lanes; font, its size."""

    row: int
    narrow: float
    curve: float
    gap: int
    font: int


def _heights(picture: Picture) -> _Heights:
    """The heights for a number of lanes: the more lanes, the lower each one."""
    lanes = len(picture.lanes)
    row = 24 if lanes <= 8 else 18 if lanes <= 16 else 13 if lanes <= 64 else 9 if lanes <= 128 else 4
    curve = round(row * 0.7, 1) if picture.peak_memory else 0
    return _Heights(row, round(row * 0.45, 1), curve, max(2, row // 4), min(10, row))


class _Drawing:
    """Where everything goes, and the lines of the file."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.end = picture.end if picture.end > 1e-300 else 1.0  # less would have no finite scale
        self.scale = (WIDTH - LEFT - RIGHT) / self.end
        self.rows: dict[int, list[Row]] = {lane: [] for lane in range(len(picture.lanes))}
        for row in rows(picture):
            self.rows[row.lane].append(row)
        self.chunks = 1 + max((bar.chunk for bar in picture.bars), default=0)
        self.heights = _heights(picture)
        self.digits = max((1, *(len(bar.number) for bar in picture.bars)))
        narrow = min((bar.end - bar.start for bar in picture.bars if bar.number and bar.end > bar.start), default=1.0)
        self.digit_font = min(self.heights.font, max(6.5, (narrow * self.scale - 2) / DIGIT / self.digits))
        self.facts = self._fact_lines()
        self.tops, y = [], float(self.top)
        for own in self.rows.values():
            self.tops.append(y)
            y += sum(self._height(row) for row in own) or self.heights.row
            y += self.heights.curve + self.heights.gap
        self.bottom = y

    @property
    def top(self) -> int:
        """The top of the first lane, below title, facts and legend."""
        return 30 + 15 * len(self.facts) + 24

    @property
    def many(self) -> bool:
        """Whether shares of time are drawn instead of bars."""
        return len(self.picture.bars) > MAX_BARS

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        height = ceil(self.bottom + 34)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'role="img" font-family="Helvetica, Arial, \'Liberation Sans\', sans-serif" font-size="10" fill="#333">'
        )
        yield f"<title>{clean(self.picture.title)}</title>"
        yield f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        yield f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold" fill="#111">{clean(self.picture.title)}</text>'
        for i, line in enumerate(self.facts):
            yield f'<text x="{LEFT}" y="{37 + 15 * i}" font-size="11" fill="#555">{clean(line)}</text>'
        yield from self._legend()
        yield from self._axis()
        for lane, own in self.rows.items():
            y = self.tops[lane]
            yield from self._lane_name(lane, y)
            for row in own:
                yield from self._shares(row, y) if self.many else self._bars(row, y)
                y += self._height(row)
            if self.heights.curve:
                yield from self._memory(self.picture.memory[lane], y)
        yield "</svg>"

    def _height(self, row: Row) -> float:
        return self.heights.row if row.queue == "compute" else self.heights.narrow

    def _x(self, time: float) -> float:
        return LEFT + time * self.scale

    def _fact_lines(self) -> list[str]:
        """`bubble 3 (9 %)   time 33`, broken into lines that fit."""
        lines = [""]
        for key, value in self.picture.facts.items():
            fact = f"{key} {value}"
            if lines[-1] and len(lines[-1]) + len(fact) > 170:
                lines.append("")
            lines[-1] += ("   ·   " if lines[-1] else "") + fact
        return lines if lines[0] else []

    def _legend(self) -> Iterator[str]:
        """A coloured square and a word for each kind of bar in the picture."""
        x, y = float(LEFT), self.top - 20
        used = {bar.kind for bar in self.picture.bars}
        words = [(COLOURS[kind], name) for kind, name in BAR_KINDS.items() if kind in used]
        if self.heights.curve:
            words.append(("#d5d9de", f"memory, up to {show_memory(self.picture.peak_memory, self.picture.unit)}"))
        for colour, word in words:
            yield f'<rect x="{_number(x)}" y="{y}" width="10" height="10" fill="{colour}"/>'
            yield f'<text x="{_number(x + 14)}" y="{y + 9}" font-size="11">{word}</text>'
            x += 14 + 6.2 * len(word) + 14
        notes = ["lighter: later stages of a rank"] if self.chunks > 1 else []
        notes += ["height: share of time"] if self.many else []
        if notes:
            yield f'<text x="{_number(x)}" y="{y + 9}" font-size="11" fill="#555">{"; ".join(notes)}</text>'

    def _axis(self) -> Iterator[str]:
        """Vertical lines at round times, and their numbers."""
        for time in _ticks(self.end):
            x, words = _number(self._x(time)), show_time(time, self.picture.unit)
            yield f'<path d="M{x} {self.top - 3}V{_number(self.bottom + 3)}" stroke="#e4e4e4"/>'
            yield f'<text x="{x}" y="{_number(self.bottom + 14)}" text-anchor="middle">{words}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle}" y="{_number(self.bottom + 28)}" text-anchor="middle" font-size="11" fill="#555">time</text>'

    def _lane_name(self, lane: int, y: float) -> Iterator[str]:
        name = self.picture.lanes[lane]
        short = name if len(name) <= 11 else name[:10] + "…"
        middle = _number(y + self.heights.row / 2 + self.heights.font * 0.35)
        yield f'<text x="{LEFT - 6}" y="{middle}" text-anchor="end" font-size="{self.heights.font}">{clean(short)}</text>'

    def _bars(self, row: Row, y: float) -> Iterator[str]:
        """A rectangle for every bar, with its microbatch where there is room."""
        height = self._height(row) - 1
        for bar in row.bars:
            x, width = self._x(bar.start), (bar.end - bar.start) * self.scale
            inset = min(0.5, width / 4)  # a thin white line between neighbours
            colour = shade(bar.kind, bar.chunk, self.chunks)
            yield (
                f'<rect x="{_number(x + inset / 2)}" y="{_number(y)}" width="{_number(max(width - inset, 0.3))}" '
                f'height="{_number(height)}" fill="{_hex(colour)}"><title>{self._tooltip(bar)}</title></rect>'
            )
            font = min(self.digit_font, 0.9 * height)
            if bar.number and height >= 8 and width >= self.digits * DIGIT * font + 2:
                dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 140
                yield (
                    f'<text x="{_number(x + width / 2)}" y="{_number(y + height / 2 + font * 0.36)}" text-anchor="middle" '
                    f'font-size="{_number(font)}" fill="{"#fff" if dark else "#111"}" pointer-events="none">{bar.number}</text>'
                )

    def _tooltip(self, bar: Bar) -> str:
        unit = self.picture.unit
        return f"{clean(bar.label)}: {show_time(bar.start, unit)} to {show_time(bar.end, unit)}"

    def _shares(self, row: Row, y: float) -> Iterator[str]:
        """Columns of equal width; in each the kinds are stacked, as high as their share of its time. Idle time stays white."""
        works = sorted({(list(BAR_KINDS).index(bar.kind), bar.chunk, bar.kind) for bar in row.bars})
        room = MAX_COLUMNS // (len(works) * sum(map(len, self.rows.values())))
        mean = sum(bar.end - bar.start for bar in row.bars) / len(row.bars) * self.scale
        columns = max(20, min(room, int((WIDTH - LEFT - RIGHT) / max(1.0, 4 * mean))))
        width = self.end / columns
        filled = {(chunk, kind): [0.0] * columns for _, chunk, kind in works}
        for bar in row.bars:
            shares = filled[bar.chunk, bar.kind]
            for i in range(min(int(bar.start / width), columns - 1), min(int(bar.end / width), columns - 1) + 1):
                shares[i] += max(0.0, min(bar.end, (i + 1) * width) - max(bar.start, i * width)) / width
        height = (self._height(row) - 1) / LEVELS
        yield f'<g transform="translate(0 {_number(y)})" shape-rendering="crispEdges">'
        below = [0.0] * columns
        for (chunk, kind), shares in filled.items():
            above = [low + share for low, share in zip(below, shares, strict=True)]
            levels = [(round(LEVELS * low), round(LEVELS * high)) for low, high in zip(below, above, strict=True)]
            path, i = [], 0
            for (low, high), run in groupby(levels):
                first, i = i, i + len(list(run))
                if high > low:
                    left, right = _number(self._x(first * width)), _number(self._x(i * width))
                    path.append(f"M{left} {_number(height * low)}H{right}V{_number(height * high)}H{left}z")
            yield f'<path fill="{_hex(shade(kind, chunk, self.chunks))}" d="{"".join(path)}"/>'
            below = above
        yield "</g>"

    def _memory(self, steps: Curve, y: float) -> Iterator[str]:
        """The area below the curve, its peak at the right."""
        most = self.picture.peak_memory
        columns = max(20, min(WIDTH - LEFT - RIGHT, MAX_COLUMNS // len(self.picture.lanes)))
        points = steps if len(steps) <= columns else _envelope(steps, self.end, columns)
        base, height = y + self.heights.curve - 1, self.heights.curve - 2
        path = [f"M{LEFT} {_number(base)}"]
        path += [f"H{_number(self._x(time))}V{_number(base - height * value / most)}" for time, value in points]
        yield f'<path d="{"".join(path)}H{WIDTH - RIGHT}V{_number(base)}z" fill="#d5d9de"/>'
        if self.heights.font > 8:
            peak = show_memory(max((value for _, value in steps), default=0), self.picture.unit)
            size = min(9, self.heights.font)
            yield f'<text x="{WIDTH - RIGHT + 4}" y="{_number(base)}" font-size="{size}" fill="#777">{peak}</text>'

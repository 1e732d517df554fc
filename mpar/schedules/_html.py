"""Writes pictures as one HTML page with zoom, pan and tooltips. The page needs no network and no other file."""

import json
from collections.abc import Sequence

from mpar.schedules._picture import BAR_KINDS, Picture, rows
from mpar.schedules._svg import clean, shade

__all__ = ["html"]


def html(pictures: Sequence[Picture], title: str = "Pipeline") -> str:
    """The page, with pictures one below the other. Pictures of the same unit share one scale of time."""
    kinds = [kind for kind in BAR_KINDS if any(bar.kind == kind for picture in pictures for bar in picture.bars)]
    legend = "".join(f'<span><i style="background:{_css(kind, 0, 1)}"></i>{BAR_KINDS[kind]}</span>' for kind in kinds)
    data = {"kinds": BAR_KINDS, "pictures": [_data(picture) for picture in pictures]}
    # "<" as an escape: no text of ours can end the script element
    island = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width">',
            f"<title>{clean(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            f"<header><h1>{clean(title)}</h1><div class=legend>{legend}</div>{CONTROLS}</header>",
            *(_section(picture) for picture in pictures),
            "<div id=tip hidden></div>",
            f'<script type="application/json" id="data">{island}</script>',
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _section(picture: Picture) -> str:
    """Heading, facts, and the canvas that the script draws on."""
    facts = "".join(f"<tr><th>{clean(key)}</th><td>{clean(value)}</td></tr>" for key, value in picture.facts.items())
    title = clean(picture.title)
    return (
        f"<section>\n<h2>{title}</h2>\n<table>{facts}</table>\n"
        f'<div class=chart><canvas tabindex="0" aria-label="{title}"></canvas><div class=hair></div></div>\n</section>'
    )


def _data(picture: Picture) -> dict:
    """The data that the script draws. A bar is [start, end, label, kind, chunk]."""
    chunks = 1 + max((bar.chunk for bar in picture.bars), default=0)
    used = sorted({(bar.kind, bar.chunk) for bar in picture.bars})
    return {
        "unit": picture.unit,
        "end": picture.end,
        "most": picture.peak_memory,
        "lanes": picture.lanes,
        "memory": picture.memory,
        "colours": {f"{kind}{chunk}": _css(kind, chunk, chunks) for kind, chunk in used},
        "rows": [
            {"lane": row.lane, "queue": row.queue, "bars": [(b.start, b.end, b.label, b.kind, b.chunk) for b in row.bars]}
            for row in rows(picture)
        ],
    }


def _css(kind: str, chunk: int, chunks: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*shade(kind, chunk, chunks))


CONTROLS = """<div class=controls>
<button data-zoom=0.5 title="key +">zoom in</button><button data-zoom=2 title="key -">zoom out</button>
<button data-zoom=all title="key 0">all</button>
<small>drag or arrow keys: move; Ctrl + wheel, pinch or double click: zoom</small>
</div>"""

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --soft: #6a717b; --line: #e3e5e8; --area: #d2d7dd; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181c; --text: #e4e7ea; --soft: #98a1ab; --line: #2b3036; --area: #3c444d; }
}
body { margin: 0 auto; max-width: 1800px; padding: 0 20px 40px; background: var(--back); color: var(--text);
  font: 14px/1.4 system-ui, "Helvetica Neue", Helvetica, Arial, sans-serif; }
header { position: sticky; top: 0; z-index: 1; padding: 10px 0; background: var(--back); border-bottom: 1px solid var(--line);
  display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: center; }
h1 { font-size: 18px; margin: 0; } h2 { font-size: 15px; margin: 22px 0 4px; overflow-wrap: anywhere; }
small, th { color: var(--soft); font-weight: normal; }
.legend span { margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
button { font: inherit; padding: 1px 9px; margin-right: 5px; }
table { border-collapse: collapse; margin-bottom: 6px; } tr { display: inline-block; margin-right: 22px; }
th, td { padding: 0 6px 0 0; text-align: left; font-variant-numeric: tabular-nums; }
.chart { position: relative; } canvas { display: block; width: 100%; cursor: grab; touch-action: pan-y; }
.hair { position: absolute; top: 0; bottom: 20px; width: 1px; background: var(--soft); pointer-events: none; display: none; }
#tip { position: fixed; z-index: 2; padding: 6px 9px; white-space: pre; pointer-events: none; background: var(--back);
  border: 1px solid var(--soft); border-radius: 4px; font-size: 12.5px; font-variant-numeric: tabular-nums; }
"""

SCRIPT = r"""
"use strict";
const {kinds, pictures} = JSON.parse(document.getElementById("data").textContent);
const LEFT = 84, RIGHT = 66, ROW = 20, THIN = 11, CURVE = 16, GAP = 7, AXIS = 20;
const tip = document.getElementById("tip");
const views = {};  // by unit: the part of time that all its pictures show

function bisect(list, before) {  // position of the first item that is not before
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (before(list[middle])) low = middle + 1; else high = middle;
  }
  return low;
}

function showTime(time, unit) {
  if (!unit || !time) return String(+time.toPrecision(6));
  const [scale, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([scale]) => time >= scale) || [1e-9, "ns"];
  return +(time / scale).toPrecision(5) + " " + name;
}

function showMemory(size, unit) {
  if (!unit) return String(+size.toPrecision(6));
  let power = 0;
  while (size >= 1024 && power < 4) { size /= 1024; power++; }
  return +size.toPrecision(4) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}

function memoryAt(steps, time) {
  const after = bisect(steps, step => step[0] <= time);
  return after ? steps[after - 1][1] : 0;
}

function layOut(picture, canvas) {  // heights do not depend on the width of the window
  picture.canvas = canvas;
  picture.hair = canvas.nextElementSibling;
  let y = 4;
  picture.places = picture.lanes.map((name, lane) => {
    const place = {name, lane, top: y, rows: []};
    for (const row of picture.rows.filter(row => row.lane === lane)) {
      row.top = y;
      row.height = row.queue === "compute" ? ROW : THIN;
      y += row.height + 1;
      place.rows.push(row);
    }
    if (!place.rows.length) y += ROW;
    place.curve = y;
    if (picture.most) y += CURVE;
    place.end = y;
    y += GAP;
    return place;
  });
  picture.bottom = y;
  canvas.style.height = y + AXIS + "px";
}

function scaleOf(picture) {
  const view = views[picture.unit], width = picture.canvas.clientWidth - LEFT - RIGHT;
  return {view, width, perTime: width / (view.to - view.from)};
}

function draw(picture) {
  const {canvas, unit} = picture, {view, width, perTime} = scaleOf(picture);
  const ratio = window.devicePixelRatio || 1, height = picture.bottom + AXIS;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim(), x = time => LEFT + (time - view.from) * perTime;
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, Helvetica, Arial, sans-serif";
  drawAxis(picture, pen, x, colour);
  for (const place of picture.places) {
    pen.fillStyle = colour("--text");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(place.name.length > 12 ? place.name.slice(0, 11) + "…" : place.name, LEFT - 8, place.top + ROW / 2);
  }
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width, picture.bottom);
  pen.clip();
  for (const row of picture.rows) drawRow(picture, row, pen, x, view);
  if (picture.most) for (const place of picture.places) drawMemory(picture, place, pen, x, view, colour("--area"));
  pen.restore();
  if (!picture.most) return;
  pen.fillStyle = colour("--soft");
  pen.textAlign = "left";
  for (const {lane, end} of picture.places) {
    const peak = picture.memory[lane].reduce((most, step) => Math.max(most, step[1]), 0);
    pen.fillText(showMemory(peak, unit), LEFT + width + 6, end - 6);
  }
}

function drawAxis(picture, pen, x, colour) {
  const {view, width} = scaleOf(picture), raw = (view.to - view.from) / Math.max(2, width / 110);
  const size = 10 ** Math.floor(Math.log10(raw)), step = size * [1, 2, 5, 10].find(factor => size * factor >= raw * 0.999);
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (let i = Math.ceil(view.from / step); i * step <= view.to * (1 + 1e-9); i++) {
    pen.fillStyle = colour("--line");
    pen.fillRect(x(i * step) - 0.5, 0, 1, picture.bottom);
    pen.fillStyle = colour("--soft");
    pen.fillText(showTime(i * step, picture.unit), x(i * step), picture.bottom + 13);
  }
}

function drawRow(picture, row, pen, x, view) {
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = bisect(row.bars, bar => bar[1] < view.from); i < row.bars.length && row.bars[i][0] <= view.to; i++) {
    const [start, end, label, kind, chunk] = row.bars[i], left = x(start), width = x(end) - left;
    const fill = picture.colours[kind + chunk];
    pen.fillStyle = fill;
    pen.fillRect(left, row.top, Math.max(width - (width > 3 ? 0.7 : 0), 0.2), row.height);
    if (width < 8 || row.height < ROW / 2) continue;
    const number = (label.match(/[0-9]+$/) || [""])[0];
    const text = label.length * 6.4 + 6 < width ? label : number.length * 6.4 + 3 < width ? number : "";
    if (!text) continue;
    const [red, green, blue] = [1, 3, 5].map(at => parseInt(fill.slice(at, at + 2), 16));
    pen.fillStyle = 0.299 * red + 0.587 * green + 0.114 * blue < 140 ? "#fff" : "#111";
    pen.fillText(text, left + width / 2, row.top + row.height / 2 + 0.5);
  }
}

function drawMemory(picture, place, pen, x, view, colour) {
  const steps = picture.memory[place.lane], base = place.end - 1;
  const y = size => base - (CURVE - 3) * size / picture.most;
  pen.beginPath();
  pen.moveTo(x(view.from), base);
  pen.lineTo(x(view.from), y(memoryAt(steps, view.from)));
  let size = memoryAt(steps, view.from);
  for (let i = bisect(steps, step => step[0] <= view.from); i < steps.length && steps[i][0] <= view.to; i++) {
    pen.lineTo(x(steps[i][0]), y(size));
    size = steps[i][1];
    pen.lineTo(x(steps[i][0]), y(size));
  }
  const last = Math.max(view.from, Math.min(view.to, picture.end));
  pen.lineTo(x(last), y(size));
  pen.lineTo(x(last), base);
  pen.fillStyle = colour;
  pen.fill();
}

let due = false;
function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; pictures.forEach(draw); });
}

function show(view, from, to) {  // keep within time, and between all of it and a millionth
  const span = Math.min(Math.max(to - from, view.end / 1e6), view.end);
  const start = Math.min(Math.max((from + to - span) / 2, 0), view.end - span);
  view.from = start;
  view.to = start + span;
  redraw();
}

function zoom(view, factor, time) {
  show(view, time - (time - view.from) * factor, time + (view.to - time) * factor);
}

function point(picture, event) {  // the lane, row, bar and time below the mouse
  const box = picture.canvas.getBoundingClientRect(), {view, perTime} = scaleOf(picture);
  const y = event.clientY - box.top, time = view.from + (event.clientX - box.left - LEFT) / perTime;
  const place = picture.places.find(place => y >= place.top && y < place.end);
  const row = place && place.rows.find(row => y >= row.top && y < row.top + row.height + 1);
  const bar = row && row.bars[bisect(row.bars, bar => bar[1] <= time)];
  return {time, place, row, bar: bar && bar[0] <= time ? bar : null, inside: time >= view.from && time <= view.to};
}

function describe(picture, {time, place, row, bar}) {
  const {unit} = picture, lines = [];
  if (bar) {
    const [start, end, label, kind] = bar;
    lines.push(label + "  " + kinds[kind] + (row.queue === "compute" ? "" : " (" + row.queue + ")"));
    lines.push(showTime(start, unit) + " to " + showTime(end, unit) + ", takes " + showTime(end - start, unit));
  } else {
    lines.push(showTime(Math.max(time, 0), unit));
  }
  const memory = picture.memory.length ? ", memory " + showMemory(memoryAt(picture.memory[place.lane], time), unit) : "";
  lines.push(place.name + memory);
  return lines.join("\n");
}

function hover(picture, event) {
  const found = point(picture, event);
  for (const other of pictures) {
    const {view, perTime} = scaleOf(other);
    other.hair.style.display = found.inside && other.unit === picture.unit ? "block" : "none";
    other.hair.style.left = LEFT + (found.time - view.from) * perTime + "px";
  }
  tip.hidden = !found.place || !found.inside;
  if (tip.hidden) return;
  tip.textContent = describe(picture, found);
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, room)) + "px";
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.top = event.clientY + (below ? 18 : -12 - tip.offsetHeight) + "px";
}

function leave() {
  tip.hidden = true;
  for (const {hair} of pictures) hair.style.display = "none";
}

function listen(picture) {
  const {canvas} = picture, view = views[picture.unit];
  let held = null;
  canvas.addEventListener("wheel", event => {
    const along = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!along && !event.ctrlKey && !event.metaKey) return;  // the page scrolls
    event.preventDefault();
    if (along) show(view, ...[view.from, view.to].map(time => time + event.deltaX / scaleOf(picture).perTime));
    else zoom(view, Math.exp(Math.max(-50, Math.min(50, event.deltaY)) * 0.01), point(picture, event).time);
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => {
    held = {x: event.clientX, from: view.from, to: view.to};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!held) return hover(picture, event);
    leave();
    const moved = (event.clientX - held.x) / scaleOf(picture).perTime;
    show(view, held.from - moved, held.to - moved);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = null; });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", event => zoom(view, event.shiftKey ? 2 : 0.5, point(picture, event).time));
}

function step(action) {  // of a button or key, in all pictures
  for (const view of Object.values(views)) {
    const span = view.to - view.from, middle = (view.from + view.to) / 2;
    if (action === "all") show(view, 0, view.end);
    else if (action === "left" || action === "right") {
      const moved = (action === "left" ? -0.2 : 0.2) * span;
      show(view, view.from + moved, view.to + moved);
    } else zoom(view, Number(action), middle);
  }
}

document.querySelectorAll("canvas").forEach((canvas, i) => layOut(pictures[i], canvas));
for (const {unit, end} of pictures) {
  const longest = Math.max(views[unit] ? views[unit].end : 0, end || 1);
  views[unit] = {from: 0, to: longest, end: longest};
}
pictures.forEach(listen);
document.querySelectorAll("button").forEach(button => button.addEventListener("click", () => step(button.dataset.zoom)));
const KEYS = {"+": "0.5", "=": "0.5", "-": "2", "0": "all", ArrowLeft: "left", ArrowRight: "right"};
addEventListener("keydown", event => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  step(KEYS[event.key]);
});
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
"""

"""Writes a picture as a trace in the Trace Event Format, which Perfetto and chrome://tracing open as JSON."""

from mpar.schedules._picture import BAR_KINDS, Picture, rows

__all__ = ["chrome_trace"]


def chrome_trace(picture: Picture) -> dict:
    """The trace has a process for each lane, a thread for each of its queues (more where bars overlap), a counter of memory.

    Times are in microseconds. In a picture without a unit, one unit of time stands for a millisecond.
    """
    scale = 1e6 if picture.unit else 1e3
    events: list[dict] = []
    for lane, name in enumerate(picture.lanes):
        events.append({"ph": "M", "pid": lane, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": lane, "name": "process_sort_index", "args": {"sort_index": lane}})
    threads = [0] * len(picture.lanes)
    for row in rows(picture):
        place = {"pid": row.lane, "tid": threads[row.lane]}
        threads[row.lane] += 1
        events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": row.queue}})
        events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": place["tid"]}})
        for bar in row.bars:
            start = bar.start * scale
            span = {"ts": start, "dur": bar.end * scale - start}
            events.append(
                {"ph": "X", **place, **span, "name": bar.label, "cat": BAR_KINDS[bar.kind], "args": {"chunk": bar.chunk}}
            )
    for lane, steps in enumerate(picture.memory):
        for time, size in steps:
            events.append({"ph": "C", "pid": lane, "ts": time * scale, "name": "memory", "args": {"bytes": size}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": picture.title, **picture.facts}}

"""Where posted collectives run: in order, beside the caller, and never on after an error."""

import threading

import pytest
import torch

from mpar.runtime.comm._aside import aside_of


def test_work_runs_in_order_beside_the_caller():
    """The caller goes on while the first work waits; results are there after the wait, those of the second behind the first."""
    aside, go, order = aside_of(torch.device("cpu")), threading.Event(), []

    def first():
        go.wait(10)
        order.append("first")
        return [torch.ones(2)]

    def second():
        order.append("second")
        return [torch.zeros(1), torch.zeros(3)]

    posted = [aside.post(work, []) for work in (first, second)]
    assert not order
    go.set()
    for one in reversed(posted):
        for work in one.works:
            work.wait()
    assert order == ["first", "second"]
    assert [len(one.values) for one in posted] == [1, 2]
    aside.settle()


def test_nothing_runs_after_an_error():
    """Others would take the messages of a later work for those of the one that failed: every wait raises that error."""
    aside, ran = aside_of(torch.device("cpu")), []

    def fails():
        raise OSError("no memory")

    def later():
        ran.append(1)
        return []

    posted = [aside.post(work, []) for work in (fails, later)]
    for one in posted:
        with pytest.raises(OSError, match="no memory"):
            one.works[0].wait()
    with pytest.raises(OSError, match="no memory"):
        aside.settle()
    assert not ran


def test_settled_means_that_all_work_is_done():
    aside, done = aside_of(torch.device("cpu")), []
    aside.settle()
    for number in range(3):
        aside.post(lambda number=number: done.append(number) or [], [])
    aside.settle()
    assert done == [0, 1, 2]

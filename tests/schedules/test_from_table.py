"""Tables as text: there and back, what torch writes, what torch reads, and what is refused."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mpar.errors import ConfigError
from mpar.schedules import SCHEDULES, Action, Transfer, actions, from_table, lower, to_table
from mpar.schedules._verify import verify


class Stub:
    """What torch's schedules ask of a stage before they run it."""

    def __init__(self, ranks: int, stages: int):
        self.group_rank, self.group_size, self.num_stages, self.submod = 0, ranks, stages, None
        self.is_first, self.is_last, self.stage_index, self.has_backward = True, stages == 1, 0, True


TORCH = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "zb1p": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dual_pipe_v": torch_schedules.ScheduleDualPipeV,
}


def table_of(name: str, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Our order, torch's order of microbatches where there is a choice."""
    options = {"order": "torch"} if name == "looped_bfs" else {}
    return tuple(map(tuple, actions(name, num_ranks=ranks, num_microbatches=microbatches, **options)))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_there_and_back(name):
    """What was written is read."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 12)):
        table = table_of(name, ranks, microbatches)
        assert from_table(to_table(table)) == table


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_messages_there_and_back(name):
    """A lowered table is read as it was written, but for the numbers of messages, which the text does not have."""
    lowered = lower(table_of(name, 4, 8))
    read = from_table(to_table(lowered))
    numbers: dict[int, int] = {}
    for own, others in zip(lowered, read, strict=True):
        for mine, other in zip(own, others, strict=True):
            if isinstance(mine, Transfer):
                assert numbers.setdefault(mine.message, other.message) == other.message
                mine = mine._replace(message=other.message)
            assert mine == other
    assert len(set(numbers.values())) == len(numbers)
    verify(read)


@pytest.mark.parametrize("name", list(TORCH))
def test_torch_files_are_read(name, tmp_path):
    """torch's own files, without messages: our order; with them: a program that verifies and computes in that order."""
    ranks, microbatches = 4, 8
    schedule = TORCH[name]([Stub(ranks, 2 * ranks) for _ in range(2)], microbatches)
    table = table_of(name, ranks, microbatches)
    schedule._dump_csv(tmp_path / "plain", format="compute_only")
    schedule._dump_csv(tmp_path / "lowered", format="compute_comms")
    assert from_table((tmp_path / "plain").read_text()) == table
    lowered = from_table((tmp_path / "lowered").read_text(), drop=True)
    assert tuple(tuple(action for action in own if isinstance(action, Action)) for own in lowered) == table
    verify(lowered)


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if name not in ("dual_pipe", "forward_only")])
def test_torch_reads_ours(name, tmp_path):
    """torch's runtime takes our file, validates it, and adds its messages; it reads our messages as well."""
    ranks, microbatches = 4, 8
    chunks = SCHEDULES[name].chunks
    table = table_of(name, ranks, microbatches)
    lowered = lower(table)
    for text, form in ((to_table(table), "compute_only"), (to_table(lowered, waits=False), "compute_comms")):
        (tmp_path / form).write_text(text)
        runtime = torch_schedules._PipelineScheduleRuntime([Stub(ranks, chunks * ranks) for _ in range(chunks)], microbatches)
        runtime._load_csv(tmp_path / form, format=form)
        order = runtime.pipeline_order if form == "compute_only" else runtime.pipeline_order_with_comms
        assert "".join(",".join(map(str, order[rank])) + "\n" for rank in range(ranks)) == text


def test_small_text():
    """Empty cells are nothing, a pair is its members, messages know their other ends; waits are added if there are none."""
    first = (Action(0, "F", 0), Transfer("send", 0, 1, 0, "F", 0), Transfer("recv", 1, 1, 0, "B", 0))
    first += (Transfer("wait", 1, 1, 0, "B", 0), Action(0, "B", 0), Transfer("wait", 0, 1, 0, "F", 0))
    second = (Transfer("recv", 0, 0, 1, "F", 0), Transfer("wait", 0, 0, 1, "F", 0), Action(1, "F", 0), Action(1, "B", 0))
    second += (Transfer("send", 1, 0, 1, "B", 0), Transfer("wait", 1, 0, 1, "B", 0))
    text = "0F0,0SEND_F0, ,0RECV_B0,0B0\n,1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0\n"
    assert from_table(text) == (first, second)


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0X0\n0F,F0", "line 1, cell 2: '0X0' is no action.*line 2, cell 1: '0F' is no.*line 2, cell 2: 'F0' is no"),
        ("0F0,0UNSHARD", r"line 1, cell 2: '0UNSHARD' is no work on a microbatch \(drop=True leaves it out\)"),
        ("0F0,0SEND_F0", "line 1: 0SEND_F0 has no other end"),
        ("0F0,0WAIT_F0\n1F0", "line 1: 0WAIT_F0 has no other end"),
        ("0F0,(0B0)OVERLAP", r"line 1, cell 2: '\(0B0\)OVERLAP' is no action"),
        (",".join(["?"] * 20), "and 12 more"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    """The error names line, cell and text of all that is wrong."""
    with pytest.raises(ConfigError, match=message):
        from_table(text)


def test_dropped_on_request():
    """With drop=True gathers, frees and reductions of parameters are left out."""
    assert from_table("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD", drop=True) == ((Action(0, "F", 0), Action(0, "B", 0)),)

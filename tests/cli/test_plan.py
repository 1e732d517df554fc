"""`mpar plan`: no process, no weights."""

import json
import re

import pytest

from mpar.cli import main as command_line
from tests.cli.conftest import SMALL


def test_plan_prints_everything(capsys, tmp_path):
    """Program, collectives, memory and time are on the screen; the whole program is in the file."""
    assert command_line.main(["plan", *SMALL, f"plan.out={tmp_path}/all.txt", "plan.lines=6", "plan.rank=1"]) == 0
    text = capsys.readouterr().out
    assert "rank 1 of 2" in text
    assert re.search(r"\.\.\. \d+ more", text)
    assert re.search(r"all_gather +│ tp +│ 2 +│ forward", text)
    assert all(name in text for name in ("cpu", "h100_dgx", "h200", "verified"))
    lines = (tmp_path / "all.txt").read_text(encoding="utf-8").splitlines()
    assert [int(line[:4]) for line in lines[1:]] == list(range(len(lines) - 1))


def test_plan_of_16384_ranks(mpar):
    """Llama 405B, 126 layers, on 16,384 ranks: verified, with bytes of a rank, in less than 4 GiB."""
    done = mpar("plan", "model=llama3_405b", "strategy=zero3_tp", "mesh.fsdp=2048", "mesh.tp=8")
    assert done.returncode == 0, done.stderr
    assert "16,384 ranks" in done.stdout
    assert "backward layers.0" in done.stdout or "layers.125" in done.stdout
    taken = re.search(r"this process used up to ([\d.]+) (MiB|GiB)", done.stderr)
    assert taken is not None
    assert float(taken[1]) * (1 if taken[2] == "MiB" else 1024) < 4096


PIPELINE = [*SMALL, "model.config.num_hidden_layers=4", "data.batch_size=8", "mesh=pp2", "strategy=ddp"]


def test_plan_of_a_pipeline(capsys):
    """Idle time and the peak of every position along pp are on the screen, with the messages of a rank."""
    assert command_line.main(["plan", *PIPELINE, "schedule=zbv", "lines=4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"pipeline +zbv, 4 stages; bubble [\d.]+ % of the step, [\d.]+ % between", text)
    peaks = re.search(r"peaks +along pp: ([\d.]+) (\w+), ([\d.]+) (\w+)\n", text)
    assert peaks is not None
    most = re.search(r"peak ([\d.]+ \w+),", text)
    assert most is not None
    assert most[1] in (f"{peaks[1]} {peaks[2]}", f"{peaks[3]} {peaks[4]}")
    assert re.search(r"send +│ to pp=1 +│ 2 +│ activations +│ 4", text)


@pytest.mark.parametrize(("suffix", "begins"), [("html", "<!DOCTYPE html>"), ("svg", "<svg"), ("json", "{")])
def test_timeline_by_suffix(suffix, begins, capsys, tmp_path):
    """The picture is in the file, in the format of its suffix, with a lane for each position along pp."""
    file = tmp_path / f"step.{suffix}"
    assert command_line.main(["plan", *PIPELINE, "schedule=zbv", f"timeline={file}"]) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert text.startswith(begins)
    assert all(lane in text for lane in ("pp=0", "pp=1"))
    if suffix == "json":
        names = {event["name"] for event in json.loads(text)["traceEvents"]}
        assert {"0F0", "3B0", "0F3"} <= names or {"0F0", "3I0", "0F3"} <= names


def test_a_suffix_that_nobody_draws(capsys, tmp_path):
    """The three that can be drawn are named, before anything is compiled."""
    assert command_line.main(["plan", *PIPELINE, f"timeline={tmp_path}/step.pdf"]) == 2
    text = capsys.readouterr().err
    assert "'.pdf'" in text
    assert all(suffix in text for suffix in (".html", ".svg", ".json"))


def test_compare(capsys, tmp_path):
    """One row a schedule, its numbers those of its own plan; what cannot run is a row with the reason; the fastest is marked."""
    file = tmp_path / "all.html"
    names = ["one_f_one_b", "zbv", "dual_pipe"]
    how = [*PIPELINE, "schedule.num_microbatches=2", "data.batch_size=8"]
    assert command_line.main(["plan", *how, f"compare=[{','.join(names)}]", f"timeline={file}"]) == 0
    text = capsys.readouterr().out
    rows = {cells[0]: cells for line in text.splitlines() if (cells := [c.strip() for c in line.strip("│").split("│")])[0]}
    assert "cannot run" in rows["dual_pipe"][-1]
    assert [rows[name][1] for name in names] == ["2", "4", "-"]
    steps = {}
    for name in names[:2]:
        assert command_line.main(["plan", *how, f"schedule={name}", "hardware=cpu"]) == 0
        alone = capsys.readouterr().out
        assert f"bubble {rows[name][2]} of the step" in alone
        assert f"peak {rows[name][4]}," in alone
        assert re.search(rf"│ cpu +│[^│]*│ {re.escape(rows[name][6])} +│", alone)
        value, unit = rows[name][6].split()
        steps[name] = float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    best = [name for name in names if rows[name][-1] == "best"]
    assert best == [min(steps, key=steps.__getitem__)]
    page = file.read_text(encoding="utf-8")
    assert page.count("<h2>") == 2
    assert all(f"<h2>{name}</h2>" in page for name in names[:2])


def test_compare_unknown_name(capsys):
    """Names that are no schedules stop it at once, all of them."""
    assert command_line.main(["plan", *PIPELINE, "compare=[zbv,nope,never]"]) == 2
    assert "cannot compare nope, never" in capsys.readouterr().err


def test_diff(capsys, tmp_path):
    """Overrides are composed again, with groups and lists in them; totals first, all lines in the file."""
    file = tmp_path / "diff.txt"
    args = ["plan", *PIPELINE, "diff=[schedule=zbv,task.chat=[a,b]]", f"out={file}", "lines=6"]
    assert command_line.main(args) == 0
    text = capsys.readouterr().out
    assert text.startswith("with schedule=zbv task.chat=[a,b]\ninstructions ")
    assert re.search(r"backward_weight +-0 +\+\d", text)
    assert re.search(r"\.\.\. [\d,]+ more lines", text)
    whole = file.read_text(encoding="utf-8")
    assert "@@ pp=1 line" in whole
    assert "more lines" not in whole
    assert command_line.main(["plan", *PIPELINE, "diff=[mesh.ppp=4]"]) == 2
    assert "did you mean mesh.pp?" in capsys.readouterr().err


TWO_KINDS = (("all_gather", "gather"), ("reduce_scatter", "reduce"))
MOE = ["model=tiny_qwen3_moe", "strategy=zero3", "mesh.tp=1", "lines=4", "data.seq_len=128"]


def test_where_sequences_and_experts_lie(capsys):
    """Of the rank that is asked for: its positions, zigzag, and its experts; and what of the storage they take the place of."""
    how = ["mesh.fsdp=2", "mesh.cp=4", "strategy.expert_parallel=4", "strategy.context_parallel=all_to_all+ring"]
    assert command_line.main(["plan", *MOE, *how, "rank=6"]) == 0  # fsdp=1, cp=2
    text = capsys.readouterr().out
    assert re.search(r"sequence +over cp_outer x cp_inner, 4 ranks; all_to_all among 2, ring between 2; rank 6 has 32 pos", text)
    assert "32 positions, zigzag: 32 to 63" in text  # of the parts 0, 3, 1, 2 the third
    assert re.search(r"experts +8 over cp_outer x cp_inner, 4 ranks; rank 6 has 4 to 5; tokens go there by all_to_all", text)
    assert re.search(r"storage +of an expert is shared by 2 ranks of fsdp: cp_outer x cp_inner shards by experts already", text)
    assert re.search(r"if tokens are spread evenly over experts, [\d.]+ \w+ if all go to one rank", text)
    assert "warning" not in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["capacity_factor=1.25"], "; up to 320 rows of a microbatch\n"),
        (["capacity_factor=1.25", "token_groups=[2,2]"], "; up to 80 rows of each of 2 x 2 groups of 4 x 64 tokens\n"),
        (
            ["capacity_factor=1", "padded=true", "group=rank"],
            "; up to 32 rows of each of 4 x 2 groups of 2 x 64 tokens, padded to as many\n",
        ),
        (
            ["capacity_factor=1", "padded=true"],
            "(tokens are gathered: a group spans several of the 4 x 2 parts",
        ),
    ],
    ids=["microbatch", "groups", "ranks", "gathered"],
)
def test_what_experts_take(options, told, capsys):
    """The capacity of a group, as Megatron has it of a rank, and whether groups make tokens travel."""
    how = ["mesh.fsdp=4", "mesh.cp=2", "strategy.expert_parallel=4"]
    assert command_line.main(["plan", *MOE, *how, *(f"model.router.{option}" for option in options)]) == 0
    assert told in capsys.readouterr().out


def test_equal_collectives_are_counted(capsys):
    """Three messages of a ring on four ranks are one word on the screen, and three in the file."""
    assert command_line.main(["plan", *MOE, "mesh.cp=4", "strategy.context_parallel=ring", "lines=99"]) == 0
    assert re.search(r"forward layers.0 mb0 .*3 x shift cp [\d.]+ KiB", capsys.readouterr().out)


def test_what_is_done_once_a_step_is_told(capsys):
    """Megatron's distributed optimizer: a gather and a reduction of each unit, though there are two microbatches."""
    how = ["plan", "model=tiny_llama", "mesh.fsdp=2", "mesh.tp=1", "strategy=zero3", "schedule.bucket_bytes=0", "lines=0"]
    how += ["schedule.num_microbatches=2", "data.batch_size=4"]
    for more, gathers, reductions in ([], 20, 12), (["strategy.gather=keep", "strategy.reduce=last"], 6, 6):
        assert command_line.main([*how, *more]) == 0
        out = capsys.readouterr().out
        assert ("after the last microbatch, parameters gathered once a step" in out) is bool(more)
        counts = {kind: int(re.search(rf"{kind} +│ fsdp +│ 2 +│ {op} +│ (\d+)", out)[1]) for kind, op in TWO_KINDS}
        assert counts == {"all_gather": gathers, "reduce_scatter": reductions}


def test_pairs_of_microbatches(capsys):
    """Joined instructions name both microbatches; the number of microbatches is even by itself, an odd one is refused."""
    how = ["plan", "model=tiny_llama", "mesh.tp=2", "strategy=tp_sp", "hardware=h100_dgx", "schedule.paired=true", "lines=99"]
    assert command_line.main([*how, "data.batch_size=4"]) == 0
    assert re.search(r"forward layers\.0(\.\.layers\.\d)? mb0\+mb1", capsys.readouterr().out)
    assert command_line.main([*how, "data.batch_size=6", "schedule.num_microbatches=3"]) == 2
    assert "cannot take 3 microbatches two at a time" in capsys.readouterr().err


def test_what_time_decided_is_told(capsys):
    """`auto` says what it came to; what was asked for says no more than that."""
    for how, told in ((["strategy.context_parallel=ring"], r"ring; rank"), ([], r"\w+, by predicted time; rank")):
        assert command_line.main(["plan", *MOE, "mesh.cp=2", *how]) == 0
        assert re.search(rf"sequence +over cp, 2 ranks; {told} 0 has 64 positions", capsys.readouterr().out)


def test_ways_that_cannot_be_are_told(capsys):
    """A length that zigzag cannot deal out leaves `auto` only the exchange of heads, and the plan says which ways it left out."""
    assert command_line.main(["plan", *MOE[:-1], "mesh.cp=2", "data.seq_len=126"]) == 0
    method = "all_to_all: each rank has some heads of all positions, by predicted time among those that are possible"
    assert f"{method} (not ring, all_gather); rank 0 has 63 positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "group"),
    [
        (["mesh.cp=4"], "cp of 4 ranks"),
        (["mesh.tp=4", "strategy=zero3_tp"], "tp of 4 ranks"),
        (["mesh.fsdp=4", "strategy.expert_parallel=4"], "expert_parallel of 4 ranks"),
    ],
    ids=["cp", "tp", "experts"],
)
def test_ranks_that_talk_much_across_nodes(how, group, capsys):
    """Nodes of three ranks are warned of; nodes of four are not."""
    assert command_line.main(["plan", *MOE, *how, "hardware.ranks_per_node=3"]) == 0
    assert re.search(rf"warning +{group} crosses nodes, of 3 ranks each on cpu", capsys.readouterr().out)
    assert command_line.main(["plan", *MOE, *how, "hardware.ranks_per_node=4"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_ranks_that_do_the_same_work_beside_their_experts(capsys):
    """Experts over ranks that no other rule knows: a line says so; with a strategy that shards by them there is none."""
    how = ["plan", *MOE, "mesh.tp=2", "mesh.fsdp=2", "strategy.expert_parallel=4", "lines=2"]
    assert command_line.main([*how, "strategy=zero3"]) == 0
    assert "ranks along tp hold different experts and do the same work otherwise" in capsys.readouterr().out
    assert command_line.main([*how, "strategy=zero3_tp"]) == 0
    assert "the same work" not in capsys.readouterr().out


def test_a_million_tokens_are_planned(capsys):
    """Llama 3 8B on one sequence of 1,048,576 tokens fits 8 ranks of 141 GB; without tiles of logits it needs much more."""
    assert command_line.main(["plan", "experiment=llama3_8b_1m", "lines=2"]) == 0
    text = capsys.readouterr().out
    assert "1 sequence of 1,048,576 positions" in text
    assert re.search(r"│ h200 +│ \d\d % of 131.3 GiB", text)
    peak = float(re.search(r"peak ([\d.]+) GiB,", text)[1])
    assert command_line.main(["plan", "experiment=llama3_8b_1m", "lines=2", "model.logits_chunk=null"]) == 0
    whole = float(re.search(r"peak ([\d.]+) GiB,", capsys.readouterr().out)[1])
    assert whole - peak > 30  # 131,072 x 128,256 logits in bfloat16 are 31.3 GiB


def test_four_million_tokens_keep_their_activations_on_the_host(capsys):
    """Of 4,194,304 tokens the inputs of 32 layers are 128 GiB a rank: too many beside the rest, but the host holds them."""
    how = ["experiment=llama3_8b_1m", "lines=2", "model.seq_len=4194304", "model.config.max_position_embeddings=4194304"]
    assert command_line.main(["plan", *how]) == 0
    assert re.search(r"│ h200 +│ too small: 1\d\d % of 131.3 GiB", capsys.readouterr().out)
    assert command_line.main(["plan", *how, "recompute.offload=true"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"│ h200 +│ \d\d % of 131.3 GiB", text)
    host = float(re.search(r", ([\d.]+) GiB more on the host", text)[1])
    assert 120 < host <= 136

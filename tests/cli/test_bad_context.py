"""What users get wrong about long sequences and experts: one screen of text, before any rank starts."""

import pytest

from mpar.cli import main as command_line
from mpar.train import read_metrics
from tests.cli.test_bad_input import refused

MOE = ["model=tiny_qwen3_moe", "strategy=zero3", "mesh=dp2"]
DENSE = ["model=tiny_qwen3", "strategy=zero3"]
MAMBA = ["model=tiny_mamba2", "strategy=zero3", "mesh=cp2"]
CASES = {
    "top-k above experts": ([*MOE, "model.config.num_experts_per_tok=9"], ["top_k=9 is more than num_experts=8"]),
    "experts that do not divide": (
        [*MOE, "mesh=one", "mesh.dp=3", "data.batch_size=3", "strategy.expert_parallel=3"],
        ["8 experts cannot be spread evenly over expert_parallel=3", "use a divisor of 8"],
    ),
    "more ranks of experts than there are": (
        [*MOE, "strategy.expert_parallel=4"],
        ["dp=2", "cannot hold expert_parallel=4", "leave a factor of 2", "other mesh sizes"],
    ),
    "no rank for experts": ([*MOE, "strategy.expert_parallel=0"], ["strategy.expert_parallel=0", "at least 1"]),
    "an axis that is none": ([*MOE, "strategy.expert_axes=[dp,ep]"], ["['ep']", "['dp', 'fsdp', 'cp', 'tp']"]),
    "experts of a dense model": (
        [*DENSE, "mesh=dp2", "strategy.expert_parallel=2"],
        ["expert_parallel=2 is for layers of experts", "has none"],
    ),
    "routers of a dense model": ([*DENSE, "mesh=dp2", "+model.router.capacity_factor=1.0"], ["is for layers of experts"]),
    "an unknown option of routers": ([*MOE, "model.router.capacity=1.0"], ["['capacity']", "capacity_factor"]),
    "a capacity that is none": ([*MOE, "model.router.capacity_factor=0"], ["capacity_factor=0: must be a number > 0"]),
    "padded without a capacity": ([*MOE, "model.router.padded=true"], ["padded=True needs a capacity", "capacity_factor"]),
    "token groups that do not divide": (
        [*MOE, "model.router.token_groups=[3,5]", "data.seq_len=128"],
        ["microbatch of 8 x 128 tokens", "3 does not divide the 8 sequences and 5 does not divide the 128 positions"],
    ),
    "one number of token groups": ([*MOE, "model.router.token_groups=[2]"], ["token_groups=(2,): must be two positive ints"]),
    "token groups of nothing": (
        [*MOE, "model.router.group=rank", "model.router.aux_loss=0"],
        ["token_groups=(2, 1) changes nothing", "capacity_factor, aux_loss and kind='sinkhorn'"],
    ),
    "an unknown group": ([*MOE, "model.router.group=node"], ["model.router.group=node", "Use group=rank"]),
    "groups said twice": (
        [*MOE, "model.router.group=rank", "model.router.token_groups=[2,1]"],
        ["model.router.token_groups is given, too"],
    ),
    "a sequence that does not divide": (
        [*DENSE, "mesh=cp2", "data.seq_len=130", "strategy.context_parallel=ring"],
        [
            "a sequence of 130 positions",
            "2 ranks share a sequence, in two parts each",
            "Use 132 (2 positions of padding) or 128.",
        ],
    ),
    "a sequence that is contiguous": (
        [*DENSE, "mesh=cp4", "data.seq_len=130", "strategy.sequence=contiguous"],
        ["4 ranks share a sequence, so", "Use 132 (2 positions of padding) or 128."],
    ),
    "too few heads": (
        [*DENSE, "mesh=cp4", "strategy.context_parallel=all_to_all"],
        ["among 4 of the 4 ranks", "6 heads", "at most 2 can", "all_to_all+ring"],
    ),
    "heads that do not divide": (
        [*DENSE, "mesh=cp4", "strategy.context_parallel=all_to_all+ring", "strategy.ulysses_size=3"],
        ["among 3 of the 4 ranks", "ulysses_size that divides"],
    ),
    "a scan in zigzag": ([*MAMBA, "strategy.sequence=zigzag"], ["strategy.sequence=zigzag", "mamba2", "all_to_all"]),
    "a scan in a ring": ([*MAMBA, "strategy.context_parallel=ring"], ["strategy.context_parallel=ring", "scan"]),
    "an unknown method": ([*DENSE, "mesh=cp2", "strategy.context_parallel=rings"], ["did you mean ring?"]),
    "an unknown dispatcher": ([*MOE, "strategy.dispatcher=alltoall"], ["did you mean all_to_all?"]),
    "an unknown order": ([*DENSE, "mesh=cp2", "strategy.sequence=zig-zag"], ["did you mean zigzag?"]),
    "an unknown key": ([*MOE, "strategy.expert_paralel=2"], ["did you mean strategy.expert_parallel?"]),
    "tiles of nothing": ([*MOE, "model.mlp_chunk=64"], ["no feed-forward layer that every token goes through"]),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused(case, capsys):
    """The message has the facts that disagree and a way out."""
    args, told = CASES[case]
    text = refused(capsys, "plan", *args)
    assert all(words in text for words in told), text


@pytest.mark.full("its run takes 14 s; tests/models counts tokens that are dropped")
@pytest.mark.gloo
def test_a_capacity_below_what_a_batch_needs_is_reported(mpar, tmp_path):
    """Experts that can take half of the slots, padding counted, drop many: on the screen, in every record, for each layer."""
    how = ["mesh=one", "strategy=ddp", "model.router.capacity_factor=0.5", "data.batch_size=2", "steps=2", "task.chat=[]"]
    done = mpar("train", "model=tiny_qwen3_moe", *how, "run_dir=r", "tensorboard=false")
    assert done.returncode == 0, done.stderr
    assert "dropped" in done.stderr
    assert "% dropped" in done.stdout
    for record in read_metrics(tmp_path / "r" / "metrics.jsonl"):
        assert 0.25 < record["dropped"] < 1
        assert record["dropped"] == pytest.approx((record["dropped/layers.0"] + record["dropped/layers.1"]) / 2)


def test_a_scan_is_planned_where_it_can_be(capsys):
    """What was refused names ways that work."""
    for how in (["strategy.context_parallel=all_to_all"], ["strategy.sequence=contiguous"]):
        assert command_line.main(["plan", *MAMBA, *how, "lines=2"]) == 0
    assert "rank 0 has 128 positions, 0 to 127" in capsys.readouterr().out

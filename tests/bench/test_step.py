"""Training steps beside transformers: the same losses, rows that fail alone, bars read off the figures."""

import os
import subprocess
import sys
import textwrap
import types
from typing import ClassVar

import pytest
import torch

from bench._child import ChildFailed
from bench._result import RESULTS, Origin, Result, read_results
from bench.step import _ours, _run, _worker
from bench.step._case import CASES, VARIANTS, Case
from bench.step._data import token_batches
from bench.step._ours import Ours
from bench.step._peer import Peer, missing
from bench.step._report import bars, markdown, newest
from bench.step._run import run
from bench.step._worker import _Worker, serve
from mpar import models
from mpar.kernels import Kernels
from tests.processes import PATIENCE_S

X4, LLAMA = CASES[0], CASES[1]
EAGER, PEER, GRAPH = "mpar eager", "transformers fp32", "mpar cuda_graph"


def variant(name):
    """By its name."""
    return next(variant for variant in VARIANTS if variant.name == name)


def losses(maker, case, name, steps=10):
    """What the first steps say on the CPU."""
    trainer = maker(case.shrunk(), variant(name), torch.device("cpu"))
    return [float(trainer.step()) for _ in range(steps)]


@pytest.mark.parametrize("case", [X4, LLAMA], ids=lambda case: case.model)
def test_everybody_trains_the_same_model(case):
    """From the same weights on the same tokens, with the same optimizer, losses agree; batches come again after eight steps."""
    ours = losses(Ours, case, EAGER)
    assert ours == pytest.approx(losses(Peer, case, PEER), abs=1e-3)
    assert ours[:1] == pytest.approx(losses(Peer, case, "transformers bf16", 1), abs=1e-3)
    assert ours[8] < ours[0] - 0.02 and len({round(loss, 3) for loss in ours}) > 5


@pytest.mark.parametrize("case", [X4, LLAMA], ids=lambda case: case.model)
def test_the_program_for_the_chip_trains_the_same_model(case, monkeypatch):
    """With the fusions that kernels bring (their calls are carried out by references here) losses are those of the peer."""
    monkeypatch.setattr(_ours, "kernels_for", lambda mode, device: Kernels(mode, "sm_90"))
    ours = Ours(case.shrunk(), variant(EAGER), torch.device("cpu"))
    assert "rope_many" in ours.about and "add_" in ours.about and "linear_cross_entropy_grad" in ours.about
    assert [float(ours.step()) for _ in range(4)] == pytest.approx(losses(Peer, case, PEER, 4), abs=1e-3)


def test_labels_are_the_tokens_that_follow():
    """The last token of a row has none, and rows are not the same."""
    first, second = token_batches(X4.shrunk(), torch.device("cpu"))[:2]
    assert torch.equal(first["labels"][:, :-1], first["tokens"][:, 1:]) and (first["labels"][:, -1] == -100).all()
    assert first["tokens"].shape == (4, 16) and not torch.equal(first["tokens"], second["tokens"])


@pytest.mark.full("the run takes 12 s; the parts of a run have tests of their own")
def test_a_tiny_run_goes_through_the_command_line(tmp_path):
    """Processes, blocks, profile: every row that can run on a CPU is ok, and nothing is left that looks like a figure."""
    command = [sys.executable, "-m", "bench.step", "run", "--tiny", "--cases", LLAMA.key, "--profile", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--variants", f"{EAGER},{GRAPH},{PEER}"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tokens/s") == 4 and "mpar cuda_graph: MISSING: needs a GPU" in done.stdout
    assert sorted(path.name.partition("_mpar")[0] for path in tmp_path.iterdir()) == ["step_kernels.md", f"step_{LLAMA.key}"]
    assert (tmp_path / "step_kernels.md").read_text().count("| kernel | calls |") == 2


def test_ours_needs_no_library_of_the_command_line():
    """A step is compiled and taken where hydra, omegaconf, rich, matplotlib, jinja2, tokenizers and transformers are not."""
    program = """
        import sys
        from importlib.abc import MetaPathFinder

        class Blocked(MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("hydra", "omegaconf", "rich", "matplotlib", "jinja2", "tokenizers", "transformers"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocked())
        import torch
        import bench.step._run, bench.step.__main__
        from bench.step._case import CASES, VARIANTS
        from bench.step._ours import Ours
        trainer = Ours(CASES[1].shrunk(), VARIANTS[0], torch.device("cpu"))
        print(float(trainer.step()) > 0, "transformers" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_what_cannot_run_says_why():
    """Graphs and Liger need a GPU; a library that is missing is named."""
    assert missing(variant(GRAPH), cpu=True) == "needs a GPU" and not missing(variant(GRAPH), cpu=False)
    assert "liger" in missing(variant("transformers fp32 liger"), cpu=True) and not missing(variant(PEER), cpu=True)


def test_a_worker_on_a_gpu(gpu):
    """Steps are timed from event to event, and the peak is that of steps alone, after those that warm up."""
    worker = _Worker(LLAMA.shrunk(), variant(EAGER), torch.device("cpu"))
    worker.cuda = True
    gpu.peak, gpu.total = 10**9, 7
    answer = worker.build()
    assert (answer["peak_bytes"], answer["total_bytes"], len(answer["losses"])) == (0, 7, 7)
    assert answer["predicted_bytes"] > answer["predicted"]["peak_bytes"] > answer["predicted"]["state_bytes"] > 300_000
    step = worker.trainer.step
    worker.trainer.step = lambda: (gpu.takes(500.0)(), step())[1]
    gpu.allocated = 123
    block = worker.block(2.2)
    assert (block["times"], block["held_bytes"]) == ([500.0] * 4, 123) and block["last_loss"] == pytest.approx(5.3, abs=0.3)


@pytest.mark.parametrize(("name", "peak"), [(EAGER, 30), (GRAPH, 70)])
def test_the_peak_of_a_recorded_step_is_that_of_its_recording(gpu, monkeypatch, name, peak):
    """Replays allocate nothing, so all steps count; others count once they are warm; neither counts what building took."""
    needs = [50, 70, 0, 0, 0, 0, 0] if name == GRAPH else [50, 70, 30, 30, 30, 30, 30]

    class Trainer:
        about, predicted = "so", None

        def __init__(self, case, variant, device):
            gpu.peak = 1000

        def step(self):
            gpu.peak = max(gpu.peak, needs.pop(0))
            return torch.tensor(1.0)

    monkeypatch.setattr(_worker, "Ours", Trainer)
    worker = _Worker(LLAMA.shrunk(), variant(name), torch.device("cpu"))
    worker.cuda = True
    assert worker.build()["peak_bytes"] == peak and not needs


def test_a_program_that_fits_recomputes_no_more_than_it_must(gpu, monkeypatch):
    """The first of none, selective and full whose predicted peak fits is taken; if none does, that is an error."""
    case, seen = Case(LLAMA.model, 4, 128, 1.0, tiny=True), []
    cuda = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(_ours, "kernels_for", lambda mode, device: Kernels(mode))
    real = _ours.compile_step
    monkeypatch.setattr(_ours, "compile_step", lambda *args, **more: (seen.append(more["recompute"]), real(*args, **more))[1])
    model = models.from_config(case.config())
    program, recompute = _ours._compile(model, case, cuda)
    need = program.predict().need_bytes
    assert (recompute, seen) == ("none", ["none"])
    gpu.total = need / _ours.FULL - 1
    assert _ours._compile(model, case, cuda)[1] in ("selective", "full")
    gpu.total = 1000
    with pytest.raises(RuntimeError, match="no program fits"):
        _ours._compile(model, case, cuda)


def test_failures_are_answers():
    """What a variant raises is said in one line with its place, and the process goes on."""
    questions = iter([("build",), ("block", 0.0)])

    class Connection:
        said: ClassVar[list] = []

        def recv(self):
            try:
                return next(questions)
            except StopIteration:
                raise EOFError from None

        def send(self, answer):
            self.said.append(answer)

    serve(Connection(), Case("megatron_1b7", 0, 16, 1.0, tiny=True), variant(EAGER), "cpu")
    (first, build), (_, block) = Connection.said
    assert first and build["status"] == block["status"] == "failed" and ".py:" in build["error"]


class Servant:
    """A child that answers by a script: by variant, what building it and each of its blocks gives."""

    script: ClassVar[dict] = {}
    log: ClassVar[list] = []
    patience: ClassVar[dict] = {}

    def __init__(self, target, case, variant, device):
        self.name = variant.name
        self.answers = iter(Servant.script[variant.name])
        Servant.log.append((self.name, "start"))

    def ask(self, question, timeout_s):
        Servant.log.append((self.name, question[0]))
        if question[0] == "build":
            Servant.patience[self.name] = timeout_s
        others = {name for name, event in Servant.log if event == "start"} - {n for n, event in Servant.log if event == "close"}
        if question[0] == "build" and self.name in Servant.script.get("alone", ()) and others - {self.name}:
            return {"status": "out of memory", "error": "tried"}
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        Servant.log.append((self.name, "close"))


def built(peak_gb, predicted_gb=None):
    """What a variant says when it stands."""
    answer = {"about": "so", "losses": [12.0] * 7, "built_s": 1.0, "peak_bytes": peak_gb * 10**9, "total_bytes": 140 * 10**9}
    return answer if predicted_gb is None else answer | {"predicted_bytes": int(predicted_gb * 1e9)}


def block(ms, held_gb=20):
    """What a block says."""
    return {"times": [ms] * 5, "wall_ms": ms, "last_loss": 11.9, "held_bytes": held_gb * 10**9}


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """`fn(script, seconds)` gives (lines by variant, log, folder) of a run of the first case on a pretended GPU."""

    def fn(script, seconds=500.0, profile=False):
        monkeypatch.setattr(Servant, "script", script)
        monkeypatch.setattr(Servant, "log", [])
        monkeypatch.setattr(_run, "Child", Servant)
        monkeypatch.setattr(_run, "this_gpu_run", lambda commit: Origin(gpu="a chip", commit=commit))
        names = [name for name in script if name != "alone"]
        results = run([X4.key], names, tiny=False, seconds=seconds, out=tmp_path, commit="abc", profile=profile)
        return {result.text("variant"): result for result in results}, Servant.log, tmp_path

    return fn


def test_blocks_are_taken_in_turn(measure):
    """Each is built and takes its first block; then all take blocks in turn; figures are of the median step."""
    script = {EAGER: [built(48, 49), block(400.0), block(410.0), block(420.0)], PEER: [built(70), *[block(500.0)] * 3]}
    lines, log, folder = measure(script)
    assert [name for name, event in log if event == "block"] == [EAGER, PEER, EAGER, PEER, EAGER, PEER]
    assert log[-2:] == [(EAGER, "close"), (PEER, "close")]
    result, line = lines[EAGER], lines[EAGER].figures
    assert (line["ms"], line["rounds"], line["calls"]) == (410.0, [400.0, 410.0, 420.0], 15)
    assert line["tokens_per_s"] == pytest.approx(4 * 4096 / 0.41)
    weights = 24 * (4 * 2048 * 2048 + 2 * 2048 * 8192) + 2048 * 131072
    flops = 6 * weights + 12 * 24 * 2048 * 4096
    assert line["mfu"] == pytest.approx(flops * 4 * 4096 / 0.41 / 989e12)
    assert line["mfu_causal"] == pytest.approx((flops - 6 * 24 * 2048 * 4096) * 4 * 4096 / 0.41 / 989e12)
    assert newest(read_results(folder / "step.jsonl"))[X4.key, EAGER] == result and result.origin.commit == "abc"
    text = (folder / "step.md").read_text()
    assert "| 410.0 (400.0 to 420.0) |" in text and "gpu a chip" in text and "49.00 (1.021)" in text


def test_a_row_that_dies_costs_itself_alone(measure):
    """A process that dies while it is built, or in a later block, leaves the others as they were."""
    died = ChildFailed("the process died with code -9", {})
    lines, _, _ = measure({EAGER: [built(48), block(400.0), died], GRAPH: [died], PEER: [built(70), *[block(500.0)] * 3]})
    assert lines[GRAPH].figures["status"] == "failed" and "died with code -9" in lines[GRAPH].figures["error"]
    assert (
        lines[EAGER].figures["status"] == "ok"
        and "round 2" in lines[EAGER].figures["cut"]
        and lines[EAGER].figures["ms"] == 400.0
    )
    assert lines[PEER].figures["status"] == "ok" and lines[PEER].figures["calls"] == 15


def test_what_does_not_fit_beside_others_is_built_alone(measure):
    """Out of memory beside variants that wait: they are closed, and it is tried once more."""
    script = {EAGER: [built(48), block(400.0)], PEER: [built(100), *[block(500.0)] * 3], "alone": [PEER]}
    lines, log, _ = measure(script)
    assert lines[PEER].figures["status"] == "ok" and lines[EAGER].figures["status"] == "ok" and lines[EAGER].figures["calls"] == 5
    assert log.index((EAGER, "close")) < [i for i, entry in enumerate(log) if entry == (PEER, "start")][1]


def test_who_holds_much_makes_room(measure):
    """Before another is built, those that hold most while they wait are closed, but not the fastest of a side."""
    script = {
        EAGER: [built(48), *[block(400.0, 10)] * 3],
        PEER: [built(70), *[block(500.0, 45)] * 3],
        GRAPH: [built(60), *[block(450.0, 40)] * 3],
        "transformers bf16": [built(60), *[block(480.0, 20)] * 3],
    }
    lines, log, _ = measure(script)
    assert log.index((GRAPH, "close")) < log.index(("transformers bf16", "start"))
    assert [result.figures["calls"] for result in lines.values()] == [15, 15, 5, 15]


def test_time_that_is_over_leaves_rows_out(measure):
    """Rows that were not reached are said, in the table too."""
    lines, _, folder = measure({EAGER: [], PEER: []}, seconds=0.0)
    assert {result.text("status") for result in lines.values()} == {"not reached"}
    assert (folder / "step.md").read_text().count("not reached: time was over") == 2


def test_time_is_kept_for_blocks_in_turn(measure):
    """What is built late may not take the time of the rounds, and of the profiles, of those that stand."""
    script = {EAGER: [built(48), *[block(400.0)] * 3], PEER: [built(70), *[block(500.0)] * 3]}
    measure(script, seconds=112.0)
    assert [Servant.patience[name] for name in (EAGER, PEER)] == pytest.approx([100 - 5 - 10, 100 - 5 - 20], abs=1.0)
    measure({EAGER: [*script[EAGER], {"kernels": "## a"}], PEER: [*script[PEER], {"kernels": "## b"}]}, 112.0, profile=True)
    assert Servant.patience[PEER] == pytest.approx(100 - 5 - 20 - 16, abs=1.0)


def test_losses_that_are_not_finite_fail_a_row(measure):
    """A step that is fast and wrong is no figure."""
    lines, _, _ = measure({EAGER: [built(48), block(400.0) | {"last_loss": float("nan")}, block(1.0), block(1.0)]})
    assert lines[EAGER].figures["status"] == "failed" and "nan" in lines[EAGER].figures["error"]


def line(name, ms, peak_gb, first=12.0, run="a", **more):
    """A line of results of the first case."""
    figures = {"ms": ms, "tokens_per_s": 16384 / ms * 1e3, "peak_bytes": peak_gb * 1e9, "losses": [first] * 7, "last_loss": 11.0}
    return Result({"case": X4.key, "variant": name}, {"status": "ok"} | figures | more, Origin(run=run))


def verdicts(*lines):
    """By bar (without its number) the verdict."""
    return [verdict for _, _, verdict in bars(X4, newest(lines))]


def test_bars():
    """Speed, ratio, memory, prediction, equal losses, a sane loss: each is met, missed or not measured by itself."""
    good = line(EAGER, 430.0, 60, predicted_bytes=61e9), line(PEER, 500.0, 75, first=12.01)
    assert verdicts(*good) == ["met"] * 6
    assert verdicts(line(EAGER, 460.0, 60, predicted_bytes=63e9), good[1]) == ["missed", "missed", "met", "missed", "met", "met"]
    assert verdicts(good[0], line(PEER, 500.0, 70, first=12.03)) == ["met", "met", "missed", "met", "missed", "met"]
    assert verdicts(line(EAGER, 430.0, 60, first=13.0, predicted_bytes=60e9))[-1] == "missed"
    assert verdicts(good[1]) == ["not measured"] * 5 + ["met"] and verdicts() == ["not measured"] * 6


def test_bars_are_about_the_fastest_of_each_side():
    """Our fastest against the fastest peer with float32 masters; bfloat16 ones are in no bar."""
    lines = [line(EAGER, 450.0, 50), line(GRAPH, 400.0, 60), line(PEER, 500.0, 75), line("transformers bf16", 300.0, 40)]
    lines.append(line("transformers fp32 liger", 480.0, 70, run="b"))
    rows = bars(X4, newest(lines))
    assert rows[1][1:] == ("1.200 (mpar cuda_graph over transformers fp32 liger, of another run)", "met")


def test_a_row_that_was_not_reached_leaves_an_older_figure():
    """The last line counts, but one without figures."""
    old, case = line(EAGER, 430.0, 60), {"case": X4.key, "variant": EAGER}
    late, failed = (Result(case, {"status": status, "error": ""}, Origin(run="b")) for status in ("not reached", "failed"))
    assert newest([late, old, late])[X4.key, EAGER] is old
    assert newest([old, failed])[X4.key, EAGER] is failed


def test_the_table_in_the_repository_is_that_of_its_lines():
    """`step.md` is what the code makes of `step.jsonl`; without lines it says that nothing was measured."""
    assert (RESULTS / "step.md").read_text() == markdown(read_results(RESULTS / "step.jsonl"))
    empty = markdown([])
    assert "Nothing here has been measured on a GPU yet." in empty and empty.count("not yet measured") == len(CASES) * len(
        VARIANTS
    )


def test_unknown_names_are_refused():
    """A typing error is not an empty run."""
    command = [sys.executable, "-m", "bench.step", "run", "--tiny", "--cases", "megatron"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 2 and "unknown: megatron; there are megatron_1b7_x4" in done.stderr

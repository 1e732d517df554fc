"""Pipelines that cannot be: refused before a rank starts, with the numbers that disagree."""

import pytest

from tests.cli.conftest import SMALL
from tests.cli.test_bad_input import refused

PIPELINE = [*SMALL, "model.config.num_hidden_layers=4", "data.batch_size=8", "mesh=pp2", "strategy=ddp"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (["schedule.layout=[1,2]"], "4 layers, the layout has 3 (1 + 2)"),
        (["schedule.layout='Et|t|L'"], "2 stages (ranks times chunks), the layout has 3"),
        (["schedule.layout='E*t'"], "at character 2"),
        (["schedule=interleaved", "mesh=pp4"], "4 layers for 8 stages leave 4 empty"),
        (["schedule=dual_pipe", "schedule.num_microbatches=2"], "2 microbatches are fewer than 2 * 2 ranks = 4"),
        (["schedule.num_microbatches=3"], "8, 'positions': 8, 'documents': 8} rows into 3 equal microbatches"),
        (["schedule.num_chunks=2"], "2 chunks on 2 ranks are 4 stages, but it has 1 per rank"),
        (["schedule.name=zb_v"], "did you mean zbv"),
        (["schedule.name=forward_only"], "it has no backward"),
        (["schedule.options.foo=1"], "it has no option 'foo' (its options: extra_warmup, forwards_ahead)"),
        (["mesh.pp=0"], "must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_pipeline(how, words, capsys):
    """Each is one screen of text, with the arithmetic."""
    assert words in refused(capsys, "plan", *PIPELINE, *how)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F0,0B0,zero\n", "line 1, cell 3: 'zero' is no action"),
        (b"0F0,0B0\n", "1 ranks, which does not fit mesh axis pp=2"),
        (b"0F0,0B0\n1F0,1B0\n", "1 microbatches, which does not fit num_microbatches=4"),
        (b"\xff\xfe\x00\x80", "not UTF-8"),
        (None, "No such file"),
    ],
    ids=["cell", "ranks", "microbatches", "bytes", "missing"],
)
def test_a_table_that_is_none(content, words, capsys, tmp_path):
    """A file that is not a table of this pipeline is refused with what is wrong in it."""
    file = tmp_path / "table.csv"
    if content is not None:
        file.write_bytes(content)
    assert words in refused(capsys, "plan", *PIPELINE, f"schedule.table={file}")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (["evaluation.every=5"], "evaluation.every=5 has no data"),
        (
            ["evaluation.fraction=0.1", "evaluation.sources={held_out: self-cognition}"],
            "'held_out', which is what evaluation.fraction",
        ),
        (["evaluation.sources={a/b: self-cognition}"], "names 'a/b': a name has letters"),
        (["evaluation.sources={new: no.jsonl}"], "evaluation.sources.new="),
        (["evaluation.fraction=1.5"], "evaluation.fraction=1.5: must be above 0, below 1"),
        (["evaluation.fraction=0.1", "evaluation.every=0", "evaluation.batches=-1"], "evaluation.batches=-1: must be at least 1"),
    ],
    ids=["no data", "name taken", "name", "file", "fraction", "counts"],
)
def test_a_wrong_evaluation(how, words, capsys, tmp_path):
    """Contradictions in what to evaluate on are found before a rank starts."""
    assert words in refused(capsys, "train", *PIPELINE, *how, f"run_dir={tmp_path}/run")

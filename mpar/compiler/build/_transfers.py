"""Transfers: a stage sends every slice of every leaf of x, or of every gradient that leaves of x have, to another stage as a
message of its own."""

import itertools

from mpar.compiler.build._actions import Actions
from mpar.compiler.build._waiting import Waiting
from mpar.ir import Piece
from mpar.schedules import Transfer

__all__ = ["write_transfer"]


def write_transfer(actions: Actions, transfer: Transfer) -> None:
    """Write the sends or the receipts of a transfer's messages, or the waits for them."""
    per_edge = actions.blueprint.messages_per_edge
    numbers = range(transfer.message * per_edge, (transfer.message + 1) * per_edge)
    if transfer.op == "send":
        _write_sends(actions, transfer, numbers)
    elif transfer.op == "recv":
        _write_receipts(actions, transfer, numbers)
    else:
        segment, piece = f"stage {transfer.stage}", Piece(transfer.microbatch, 0)
        for value, number in zip(actions.edges.messages.pop(transfer.message), numbers, strict=False):
            actions.writer.wait(value, number, transfer.peer, segment, piece)


def _write_sends(actions: Actions, transfer: Transfer, numbers: range) -> None:
    """Post what the stage sends: its output, or the gradients of its input."""
    edges, segment, piece = actions.edges, f"stage {transfer.stage}", Piece(transfer.microbatch, 0)
    waiting = (edges.outputs if transfer.kind == "F" else edges.input_gradients).pop((transfer.stage, transfer.microbatch))
    values = [v for of_slice in waiting for v in of_slice.values]
    for value, number in zip(values, numbers, strict=False):
        actions.writer.send(value, number, transfer.peer, transfer.kind, segment, piece)
    edges.messages[transfer.message] = values


def _write_receipts(actions: Actions, transfer: Transfer, numbers: range) -> None:
    """Post the receipt of what the stage needs: its input, or the gradients of its output."""
    blueprint, edges, segment, first = actions.blueprint, actions.edges, f"stage {transfer.stage}", Piece(transfer.microbatch, 0)
    segments = actions.segments_of(transfer.stage)
    index, prefix = (segments.start, "x") if transfer.kind == "F" else (segments.stop, "dx")
    codes = blueprint.placement.segments
    by_slice = [codes.entering[index]] * blueprint.options.num_slices
    if transfer.kind == "B":
        by_slice = [[leaves[i] for i in active] for leaves, active in zip(by_slice, codes.active[index], strict=True)]
    pieces = zip(blueprint.pieces(transfer.microbatch), by_slice, strict=True)
    places = [(piece, x, spec) for piece, leaves in pieces for x, spec in leaves]
    values = [
        actions.writer.receive(
            f"{prefix}{index}.{blueprint.piece_name(piece)}", x, spec, number, transfer.peer, transfer.kind, segment, first
        )
        for (piece, x, spec), number in zip(places, numbers, strict=False)
    ]
    remaining = iter(values)
    waiting = [Waiting(list(itertools.islice(remaining, len(leaves)))) for leaves in by_slice]
    (edges.inputs if transfer.kind == "F" else edges.cotangents)[transfer.stage, transfer.microbatch] = waiting
    edges.messages[transfer.message] = values

"""Pipelines: generation, run-time overhead, steps on gloo beside torch.distributed.pipelining, predicted and measured time."""

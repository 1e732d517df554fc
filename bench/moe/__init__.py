"""The MoE layer beside a dense one of the same FLOPs and transformers' experts: `python -m bench.moe layer`."""

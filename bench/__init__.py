"""Benchmarks: mpar beside what a user would run instead, in the same processes, step by step in turn."""

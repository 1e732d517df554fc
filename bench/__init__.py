"""Benchmarks: mpar beside what a user would run instead, where possible in the same processes, taking steps in turn."""

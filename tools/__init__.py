"""What the developers of mpar use besides its tests: none of it is installed with the package.

Benchmarks and tests may import from here, and nothing here imports them.
"""

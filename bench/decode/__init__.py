"""The engine beside transformers on a CPU, one request and many with answers of unlike lengths: `python -m bench.decode`."""

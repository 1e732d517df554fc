"""A server under the load of many streaming clients: `python -m bench.serve`."""

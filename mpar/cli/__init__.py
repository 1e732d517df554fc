"""The command line: configuration, processes, printing. It starts in `mpar.cli.main`; a rank imports only `mpar.cli._worker`."""

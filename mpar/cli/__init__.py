"""The command line: configuration, processes, printing. `mpar.cli.main` begins it; a rank imports `mpar.cli._worker` alone."""

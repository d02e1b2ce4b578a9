"""One file per command: parse, open the run, call one function."""

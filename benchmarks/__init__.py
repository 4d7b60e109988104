"""holdfast beside torch and its peers, measured in one run: `python -m benchmarks --help`.

`workloads` says what is loaded, `loaders` by whom, `measure` takes one measurement in a process of
its own, `rounds` takes them in turns, `report` turns them into a table, a JSON file and a plot.
"""

"""``python -m holdfast``, for where the command itself is not on the path."""

from holdfast.cli import main

main(prog_name="python -m holdfast")

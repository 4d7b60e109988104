"""The subcommands of ``holdfast``, one file each."""

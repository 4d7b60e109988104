"""Our engine for programs that do not import it: `holdfast.install` and ``holdfast run``."""
